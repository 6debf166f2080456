"""Compares real weights of models in docs/models.py with the library that they were made for.

    make test-models                        # those that a cache here has, and all-MiniLM-L6-v2
    make test-models ARGS="--download"      # all, from the hub
    make test-models ARGS="BAAI/bge-m3"     # some

The states of the last layer, the logits of a classifier and the vectors of a sentence-transformers
folder are compared over the same texts, in fp32 on the CPU. What agrees is written to
docs/works.toml, which docs/models.py shows; what does not ends the command with 1.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import models
import numpy as np
import torch

import packhorse
from packhorse import atomic
from packhorse.checkpoint.hub import COMMIT, EMBEDDED_SHA256, resolve
from packhorse.errors import PackhorseError

HERE = Path(__file__).parent
WORKS = HERE / "works.toml"
LIMIT = 1e-4  # of fp32 states after up to 36 layers
TEXTS = [
    "A man is eating food.",
    "How many people live in Berlin?",
    "def add(first, second):\n    return first + second",
    "Übermorgen, 12. März 2026: 東京では雨が降る.",
    "Packing leaves no token to waste. " * 12,
    "no",
]
HEADER = """# Models whose real weights were compared with the library that they were made for:
# written by docs/compare_models.py (`make test-models`).
"""


def find(name: str) -> tuple[Path, str] | None:
    """The folder of a model and its revision; None if there is none here."""
    try:
        folder = resolve(name)
    except PackhorseError:
        return None
    if COMMIT.fullmatch(folder.name):
        return folder, folder.name
    # The package has one file of weights, whose checksum is that of the hub's.
    return folder, f"sha256 {EMBEDDED_SHA256}"


def compare(folder: Path) -> tuple[str, float]:
    """With what a model was compared, and the largest difference."""
    import transformers

    ours = packhorse.load(folder, device="cpu", dtype="fp32")
    sequences = ours.tokenizer.encode(TEXTS, min(ours.max_length, 256))
    differences: list[float] = []
    inputs = [
        {
            "input_ids": torch.from_numpy(sequence.ids.astype(np.int64))[None],
            "attention_mask": torch.ones(1, len(sequence), dtype=torch.int64),
        }
        for sequence in sequences
    ]
    encoder = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = [encoder(**fields).last_hidden_state[0].numpy() for fields in inputs]
    for (result,), want in zip(ours.run(sequences, "hidden"), states, strict=True):
        differences.append(float(np.abs(result - want).max()))
    against = "states of transformers"
    if "classify" in ours.heads and ours.pair_template is None:
        kind = transformers.AutoModelForSequenceClassification
        classifier = kind.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.inference_mode():
            logits = [classifier(**fields).logits[0].numpy() for fields in inputs]
        for (result,), want in zip(ours.run(sequences, "classify"), logits, strict=True):
            differences.append(float(np.abs(result - want).max()))
        against += " and its logits"
    if (folder / "modules.json").is_file() and ours.embedder is not None:
        from sentence_transformers import SentenceTransformer

        vectors = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
        differences.append(float(np.abs(ours.encode(TEXTS) - vectors).max()))
        against += ", vectors of sentence-transformers"
    return against, max(differences)


def record(revision: str, against: str, difference: float) -> dict[str, Any]:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"revision": revision, "date": today, "against": against, "difference": difference}


def write(works: dict[str, Any]) -> None:
    lines = [HEADER]
    for name, work in works.items():
        lines.append(f'["{name}"]')
        lines += [f'{key} = "{work[key]}"' for key in ("revision", "date", "against")]
        lines.append(f"difference = {work['difference']:.1e}\n")
    with atomic.new_file(WORKS) as file:
        file.write("\n".join(lines).encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="ids; default all")
    parser.add_argument("--download", action="store_true", help="fetch what is not here")
    options = parser.parse_args()
    if not options.download:
        os.environ["HF_HUB_OFFLINE"] = "1"
    works = tomllib.loads(WORKS.read_text("utf-8"))
    failed = False
    for _, name, _, good, _ in models.rows():
        if not good or (options.names and name not in options.names):
            continue
        if (source := find(name)) is None:
            continue
        folder, revision = source
        against, difference = compare(folder)
        agrees = difference <= LIMIT
        failed |= not agrees
        word = "works" if agrees else "DIFFERS"
        print(f"{name}: {word}, {against} at most {difference:.1e} away, revision {revision}")
        if agrees:
            works[name] = record(revision, against, difference)
    write(works)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
