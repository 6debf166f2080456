"""The model card of a continued pretraining: README.md in the folder of its model.

It says what the model was made from, of how much text, with which settings, and the loss on
held-out documents before and after, as the run's log has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from packhorse.atomic import new_file
from packhorse.data.packed.manifest import Manifest
from packhorse.train.settings import TrainSettings

NAME = "README.md"
MEASURES = {"mlm_loss": "masked-word loss", "mlm_accuracy": "masked words guessed"}
SETTINGS = ("batch", "epochs", "optimizer", "learning_rate", "schedule", "warmup", "weight_decay")
COUNTS = {"documents": "documents read", "held_out": "of them held out", "characters": "characters"}


def write_card(
    folder: Path, settings: TrainSettings, corpus: Manifest, log: Path, best: float | None
) -> Path:
    """Write the card of the model in `folder`; `best` is the run's best measure."""
    lines = log.read_text("utf-8").splitlines()
    evaluations = [value for line in lines if (value := json.loads(line).get("evaluation"))]
    before = evaluations[0] if evaluations and settings.eval_first else {}
    after = evaluations[-1] if evaluations else {}
    if settings.write == "best":
        after = next((values for values in evaluations if best in values.values()), after)
    text = model_card(folder.parent.name, settings, corpus, before, after)
    with new_file(folder / NAME) as file:
        file.write(text.encode())
    return folder / NAME


def model_card(
    name: str,
    settings: TrainSettings,
    corpus: Manifest,
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> str:
    """The card as Markdown, with the fields that the hub reads at its head."""
    counts = corpus.config["found"]
    sources = corpus.config["made_by"]["sources"]
    base = settings.model or "no model: its weights were drawn at random"
    lines = ["---", "library_name: transformers", "pipeline_tag: fill-mask"]
    if settings.model and not Path(settings.model).exists():
        lines.append(f"base_model: {json.dumps(settings.model)}")
    lines += [
        "---",
        "",
        f"# {name}",
        "",
        f"Pretrained on masked words by Packhorse, from {base}.",
        "",
        "## Text",
        "",
        f"{sources['files']:,} files: {', '.join(sources['names'])}",
        "",
        "| | |",
        "|---|---|",
        *(f"| {label} | {counts[key]:,} |" for key, label in COUNTS.items()),
        f"| tokens to learn from | {corpus.tokens:,} |",
        f"| tokens per sequence at most | {corpus.layout.capacity:,} |",
        "",
        "## Held-out documents",
        "",
        "| | before | after |",
        "|---|---|---|",
    ]
    for key, label in MEASURES.items():
        cells = (f"{values[key]:.4f}" if key in values else "" for values in (before, after))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    lines += ["", "## Settings", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {getattr(settings, key)} |" for key in SETTINGS]
    return "\n".join(lines) + "\n"
