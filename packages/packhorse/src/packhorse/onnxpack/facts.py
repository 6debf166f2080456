"""The facts that a packed model carries about itself: the layout of its rows, its outputs.

They are stored in the model's metadata, as JSON under one key, so that running it needs no flags. A
file may be damaged or not trusted, so that what is read is checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from packhorse.errors import CheckpointError

KEY = "packhorse.onnxpack"
VERSION = 1
INPUTS = {"ids", "types", "mask", "positions", "first", "lengths"}

Mode = Literal["positions", "mask", "repack"]
Kind = Literal["token", "sequence"]
Precision = Literal["fp32", "fp16"]

# Head → the names that exporters give to its outputs (all must be present), and their kind.
NAMED: dict[str, tuple[tuple[str, ...], Kind]] = {
    "hidden": (("last_hidden_state",), "token"),
    "pooled": (("pooler_output",), "sequence"),
    "embed": (("sentence_embedding",), "sequence"),
    "span": (("start_logits", "end_logits"), "token"),
    "mlm": (("prediction_logits",), "token"),
    "nsp": (("seq_relationship_logits",), "sequence"),
}


@dataclass(frozen=True)
class PackedModelFacts:
    """What a packed model needs to be run."""

    mode: Mode
    shape: tuple[int, int] | None  # rows and tokens per row, if they are fixed
    inputs: dict[str, str]  # role, one of INPUTS → name of the graph's input
    outputs: dict[str, Kind]
    heads: dict[str, tuple[str, ...]]  # head → its outputs
    vocab_size: int
    max_positions: int
    padding: int | None  # RoBERTa's padding token, which its positions do not count

    def dump(self) -> str:
        """The JSON for the model's metadata."""
        return json.dumps({"version": VERSION, **asdict(self)})


def parse(text: str) -> PackedModelFacts:
    """Parse and check the facts in a model's metadata."""
    try:
        raw: dict[str, Any] = json.loads(text)
        if raw.pop("version") != VERSION:
            raise ValueError("of another version")
        if not raw.pop("exact", True):  # written by Packhorse up to 0.1.0
            raise ValueError("of an older version: neighbors change its int8 scales")
        raw["shape"] = None if raw["shape"] is None else tuple(map(int, raw["shape"]))
        raw["heads"] = {str(head): tuple(map(str, names)) for head, names in raw["heads"].items()}
        facts = PackedModelFacts(**raw)
        _check(facts)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        message = f"its packing facts are damaged ({error}); pack the model again"
        raise CheckpointError(message) from error
    return facts


def _check(facts: PackedModelFacts) -> None:
    if facts.mode not in get_args(Mode) or not {"ids"} <= facts.inputs.keys() <= INPUTS:
        raise ValueError(f"mode {facts.mode!r} with inputs {sorted(facts.inputs)}")
    if facts.shape is not None and (len(facts.shape) != 2 or min(facts.shape) < 1):
        raise ValueError(f"shape {facts.shape}")
    if not set(facts.outputs.values()) <= set(get_args(Kind)):
        raise ValueError(f"outputs {facts.outputs}")
    if not {name for names in facts.heads.values() for name in names} <= facts.outputs.keys():
        raise ValueError(f"heads {facts.heads}")
    counts = (facts.vocab_size, facts.max_positions, (facts.padding or 0) + 1)
    if min(counts) < 1 or not all(isinstance(count, int) for count in counts):
        raise ValueError(f"{counts} as sizes")


def name_heads(
    outputs: Mapping[str, Kind], widths: Mapping[str, int], words: tuple[int, int]
) -> dict[str, tuple[str, ...]]:
    """Map heads of an Encoder to outputs; every output is also a head under its own name.

    words: size and width of the table of words, by which scores and hidden states without a known
    name are recognized.
    """
    heads = {
        head: names
        for head, (names, kind) in NAMED.items()
        if all(outputs.get(name) == kind for name in names)
    }
    taken = {name for names in heads.values() for name in names}
    for name, kind in outputs.items():
        if name in taken:
            continue
        if name == "logits":
            scores = "mlm" if widths[name] == words[0] else "tokens"
            heads["classify" if kind == "sequence" else scores] = (name,)
        elif widths[name] == words[1]:  # as wide as the hidden states
            heads.setdefault("pooled" if kind == "sequence" else "hidden", (name,))
    return {name: (name,) for name in outputs} | heads
