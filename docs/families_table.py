"""Writes docs/reference/families.md: how far every family, kernel and head is from transformers.

    python docs/families_table.py                  # on this machine's CPU
    python docs/families_table.py --device cuda    # the same on a GPU
    python docs/families_table.py --oracle DIR     # transformers' results, from there or kept there

A tiny random model of each family is made by transformers, which computes a padded batch on the CPU
in float32 (and float64); here the same weights run packed, by every kernel that supports them. A
run replaces the figures of its device in docs/families.json and writes the page anew. A machine
with a GPU and without transformers, or with an older one, takes the folder of another.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from packhorse import attention, checkpoint
from packhorse.device import describe, dtype_name, parse_dtype
from packhorse.runtime.batches import lay
from packhorse.runtime.proof import SyntheticSequence

HERE = Path(__file__).parent
FIGURES = HERE / "families.json"
PAGE = HERE / "reference" / "families.md"
CPU = torch.device("cpu")
EXPECTED, VERSION = "expected.safetensors", "transformers.txt"  # of a model, of the whole folder
WORDS, CAPACITY = 60, 96
LENGTHS = (5, 40, 1, 9, 90, 33, 17)
# Class of transformers, by what follows the family's name → our head and the fields of its output.
HEADS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Model": ("hidden", ("last_hidden_state",)),
    "ForMaskedLM": ("mlm", ("logits",)),
    "ForSequenceClassification": ("classify", ("logits",)),
    "ForTokenClassification": ("tokens", ("logits",)),
    "ForQuestionAnswering": ("span", ("start_logits", "end_logits")),
}
PER_SEQUENCE = ("classify",)
ALL = tuple(HEADS)
NO_SPANS = ALL[:-1]
DECODER = ("Model", "ForSequenceClassification", "ForTokenClassification")
DISENTANGLED = {"relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 16}
DISENTANGLED |= {
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
}
SPECIAL = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}

LIMITS = {"fp32": 1e-5, "fp64": 1e-10}  # of hidden states
ROTARY = ("nomic_bert", "gte", "jina_embeddings_v3")  # of those that are compared in fp64
ROTARY_LIMIT = 1e-7  # in fp64 on a GPU
INTRODUCTION = """# Families, kernels and heads

Written by `docs/families_table.py`: the largest absolute difference to transformers' own class, of
tiny random models ({words} words, {layers} layers) over sequences of {lengths} tokens. transformers
computes a padded batch on the CPU; here the same weights run packed. In fp32 the limit is 1e-5 for
hidden states and 1e-10 in fp64, which is compared where transformers computes in it throughout;
rotary angles are fp32 in every format, and a GPU rounds their cosines otherwise, so that there
1e-7 is the limit with them. bf16 has three digits. A dash: the kernel does not support that, or it
was not compared. Jina v2 (ALiBi), GTE's own code, NeoBERT and XLM-RoBERTa with rotary positions
have no class in transformers; what they are tested against is in the
[table of layouts](../models.md#where-layouts-were-taken-from).
"""


@dataclass(frozen=True)
class TinyFamily:
    """How transformers calls a family, and the settings of its tiny model."""

    prefix: str  # of its classes
    endings: tuple[str, ...] = ALL
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    wide: bool = True  # transformers computes it in float64 throughout

    def config(self, ending: str) -> Any:
        import transformers

        usual: dict[str, Any] = {
            "vocab_size": WORDS,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "max_position_embeddings": 128,
            "pad_token_id": 1,
        }
        if "Classification" in ending:
            usual["num_labels"] = 3
        name = f"{self.prefix}Config"
        kind = getattr(transformers, name, None) or getattr(
            transformers, f"{self.prefix}TextConfig"
        )
        return kind(**usual | self.settings)


FAMILIES = {
    "bert": TinyFamily("Bert"),
    "roberta": TinyFamily("Roberta"),
    "xlm-roberta": TinyFamily("XLMRoberta"),
    "camembert": TinyFamily("Camembert"),
    "distilbert": TinyFamily("DistilBert", settings={"dim": 32, "n_heads": 4, "hidden_dim": 48}),
    "albert": TinyFamily("Albert", settings={"embedding_size": 16}),
    "electra": TinyFamily("Electra", settings={"embedding_size": 16}),
    "mpnet": TinyFamily("MPNet"),
    "deberta-v2": TinyFamily("DebertaV2", settings=DISENTANGLED, wide=False),
    "modernbert": TinyFamily("ModernBert", settings={**SPECIAL, "local_attention": 18}, wide=False),
    "nomic_bert": TinyFamily("NomicBert", NO_SPANS),
    "gte": TinyFamily("Gte", NO_SPANS),
    "jina_embeddings_v3": TinyFamily("JinaEmbeddingsV3", NO_SPANS),
    "eurobert": TinyFamily("EuroBert", NO_SPANS, {"num_key_value_heads": 2}, wide=False),
    "qwen3": TinyFamily("Qwen3", DECODER, GROUPED, wide=False),
    "gemma3_text": TinyFamily(
        "Gemma3Text",
        DECODER[:2],
        GROUPED
        | {
            "query_pre_attn_scalar": 16,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "use_bidirectional_attention": True,
        },
        wide=False,
    ),
}


def sequences() -> list[SyntheticSequence]:
    random = np.random.default_rng(5)
    ids = [random.integers(2, WORDS, length) for length in LENGTHS]
    return [SyntheticSequence(row, np.zeros(len(row), int)) for row in ids]


def expected(model: Any, keys: tuple[str, ...], per_sequence: bool) -> Tensor:
    """The output of a padded batch in transformers, what is padding cut away."""
    entries = sequences()
    ids = torch.ones(len(entries), max(LENGTHS), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, item in enumerate(entries):
        ids[row, : len(item.ids)] = torch.from_numpy(item.ids)
        mask[row, : len(item.ids)] = 1
    result = model(input_ids=ids, attention_mask=mask)
    parts = [result[key] for key in keys]
    whole = parts[0] if len(parts) == 1 else torch.stack(parts, -1)
    return whole if per_sequence else whole[mask.bool()]


def computed(model: Any, kernel: str, head: str, device: torch.device) -> Tensor:
    """The same by one of our kernels, in the order of the sequences."""
    chosen = attention.kernel(kernel)
    model.bert.use(chosen)
    packed = lay(sequences(), CAPACITY if chosen.serves.rows else 0).to(device)
    (output,) = model(packed, head)
    output = packed.pick(output) if head in PER_SEQUENCE else torch.cat(packed.split(output))
    return output.cpu()


def tiny_model(family: TinyFamily, ending: str) -> Any:
    import transformers

    torch.manual_seed(3)
    model = getattr(transformers, family.prefix + ending)(family.config(ending)).eval()
    with torch.no_grad():  # zeros and ones would hide a bias or a norm that went astray
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def write_oracle(folder: Path) -> None:
    """The tiny models, each with what transformers computes from it."""
    import transformers

    for name, family in FAMILIES.items():
        for ending in family.endings:
            head, keys = HEADS[ending]
            model = tiny_model(family, ending)
            model.save_pretrained(folder / name / head)
            dtypes = ["fp32", "fp64"] if head == "hidden" and family.wide else ["fp32"]
            outputs = {
                dtype: expected(model.to(parse_dtype(dtype)), keys, head in PER_SEQUENCE)
                for dtype in dtypes
            }
            save_file(
                {dtype: output.contiguous() for dtype, output in outputs.items()},
                folder / name / head / EXPECTED,
            )
    (folder / VERSION).write_text(transformers.__version__)


def figures(oracle: Path, device: torch.device) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Family, head, and the difference by kernel and number format."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for name, family in FAMILIES.items():
        for ending in family.endings:
            head, _ = HEADS[ending]
            yield name, head, dict(_differences(oracle / name / head, head, device))


def _differences(folder: Path, head: str, device: torch.device) -> Iterator[tuple[str, float]]:
    expected = load_file(folder / EXPECTED)
    dtypes = [parse_dtype(name) for name in expected]
    if head == "hidden" and device.type == "cuda":
        dtypes.append(torch.bfloat16)
    for dtype in dtypes:
        model = checkpoint.load(folder, device=device, dtype=dtype).model
        want = expected["fp64" if dtype == torch.float64 else "fp32"]
        for kernel in attention.KERNELS:
            refusal = attention.kernel(kernel).serves.refusal(
                device, dtype, **model.bert.config.needs
            )
            if refusal is None:
                result = computed(model, kernel, head, device)
                yield f"{kernel} {dtype_name(dtype)}", float((result - want).abs().max())


def measure(oracle: Path, device: torch.device) -> dict[str, Any]:
    """All figures of a device, and what they were computed with."""
    rows: dict[str, dict[str, dict[str, float]]] = {}
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not (oracle / VERSION).is_file():
            write_oracle(oracle)
        for family, head, differences in figures(oracle, device):
            rows.setdefault(family, {})[head] = differences
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": describe(device) if device.type == "cuda" else "a CPU",
        "torch": torch.__version__.partition("+")[0],
        "transformers": (oracle / VERSION).read_text(),
        "rows": rows,
    }


def page(sections: dict[str, Any]) -> str:
    """The whole file."""
    lines = [
        INTRODUCTION.format(words=WORDS, layers=4, lengths=", ".join(map(str, LENGTHS))),
    ]
    for kind, section in sections.items():
        lines += _section(kind, section)
    return "\n".join(lines) + "\n"


def _section(kind: str, section: dict[str, Any]) -> list[str]:
    columns: dict[str, None] = {}
    for heads in section["rows"].values():
        for differences in heads.values():
            columns |= dict.fromkeys(differences)
    order = sorted(columns, key=lambda column: ("fp32", "fp64", "bf16").index(column.split()[1]))
    lines = [
        f"## {'GPU' if kind == 'cuda' else 'CPU'}",
        "",
        f"{section['date']}, {section['device']}, torch {section['torch']}, transformers "
        f"{section['transformers']}: `python docs/families_table.py --device {kind}`",
        "",
        f"| family | head | {' | '.join(order)} |",
        f"|---|---|{'---:|' * len(order)}",
    ]
    for family, heads in section["rows"].items():
        for head, differences in heads.items():
            cells = [f"{differences[c]:.0e}" if c in differences else "-" for c in order]
            lines.append(f"| {family} | {head} | {' | '.join(cells)} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="where the figures are kept")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--oracle", type=Path, help="folder of transformers' results")
    parser.add_argument("--page-only", action="store_true", help="write the page, measure nothing")
    options = parser.parse_args()
    device = torch.device(options.device)
    sections = json.loads(options.figures.read_text()) if options.figures.is_file() else {}
    if not options.page_only:
        with tempfile.TemporaryDirectory() as temporary:
            sections[device.type] = measure(options.oracle or Path(temporary), device)
        options.figures.write_text(json.dumps(sections, indent=1) + "\n")
    options.page.write_text(page(sections))


if __name__ == "__main__":
    main()
