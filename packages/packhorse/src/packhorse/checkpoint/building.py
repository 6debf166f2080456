"""Build a model without weights, then put a checkpoint's tensors into it, strictly.

The model is built on the `meta` device, where tensors are only shapes. Tensors that the user
excludes (`--ignore PATTERN`) are dropped before the others get their canonical names, because a
second encoder under another scope would make those names ambiguous; a pattern that matches a weight
of the model is an error, since a missing layer would change every result. What is missing, has
another shape or is unknown is then listed by its name in the file before anything is placed. Each
tensor is taken out of the file's dictionary, cast and handed to the model, so that little is ever
held twice; values that are not finite are counted on the way, and each tensor gets a checksum, of
which `fingerprint` is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from packhorse.attention import Kernel
from packhorse.checkpoint import names, sentence
from packhorse.checkpoint.contents import checksum
from packhorse.checkpoint.names import CanonicalCheckpoint
from packhorse.checkpoint.names.families import modules_of
from packhorse.device import dtype_name
from packhorse.errors import CheckpointError, InputError
from packhorse.exports import renamed_attribute
from packhorse.model.bert import Bert
from packhorse.model.config import BertConfig
from packhorse.model.heads import (
    Embed,
    LastTokenLabels,
    Mlm,
    PooledLabels,
    Pooler,
    ReplacedTokenDetection,
    TokenLabels,
)
from packhorse.model.model import Model

Shape = tuple[int, ...]
Ignored = dict[str, str]  # name in the file → the pattern that matched it
LISTED = 8  # names that a message lists
WORD_EMBEDDINGS = re.compile(r"(.*[/.])?((word|tok)_embeddings|embed_tokens)(\.weight)?")
ANY_LAYER = "987654321"  # a layer's number in a spelled name, before it becomes a pattern


def build(
    config: BertConfig,
    kernel: Kernel,
    heads: Iterable[str],
    labels: int,
    tied: bool,
    layout: sentence.SentenceLayout | None,
    vectors: int = 0,
) -> Model:
    """The encoder with these heads, and those that the layout describes.

    vectors: the width of a token's vector, where only the weights say.
    """
    with torch.device("meta"), _NoInitialization():
        bert = Bert(config, kernel)
        all_heads = _heads(bert, heads, labels, tied)
        if layout:
            all_heads |= sentence.heads(layout, config, all_heads, vectors)
        elif not {"span", "classify", "tokens"} & set(heads):
            all_heads["embed"] = Embed(("mean",), normalize=False)
        return Model(bert, all_heads).eval()


class _NoInitialization(TorchFunctionMode):
    """Skip random initialization: on `meta` it has no effect, yet it imports a compiler (1.2 s)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return the tensor that an initializer was called with; run every other function."""
        if func.__name__ in ("normal_", "uniform_", "kaiming_uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _heads(bert: Bert, heads: Iterable[str], labels: int, tied: bool) -> dict[str, nn.Module]:
    """The heads; they share one pooler, except for classifiers that have their own."""
    config = bert.config
    pooler = Pooler(config)

    def classifier() -> nn.Module:
        if not config.classify_dense:
            return LastTokenLabels(config, labels)
        if not config.classify_activation:
            return PooledLabels(config, pooler, labels)
        separate = Pooler(config, config.classify_activation, config.classify_pooling)
        return PooledLabels(config, separate, labels)

    constructors = {
        "pooled": lambda: pooler,
        "mlm": lambda: Mlm(config, bert.embed.words, tied),
        "replaced": lambda: ReplacedTokenDetection(config),
        "nsp": lambda: PooledLabels(config, pooler, 2),
        "span": lambda: TokenLabels(config, 2),
        "classify": classifier,
        "tokens": lambda: TokenLabels(config, labels, config.dropout),
    }
    return {head: constructors[head]() for head in heads}


def drop_ignored(tensors: dict[str, Tensor], patterns: Sequence[str]) -> Ignored:
    """Delete the tensors that match one of the patterns, and return which pattern matched each."""
    ignored: Ignored = {}
    for pattern in patterns:
        for name in [name for name in tensors if fnmatchcase(name, pattern)]:
            del tensors[name]
            ignored[name] = pattern
        if not tensors:
            raise InputError(f"--ignore {pattern} (ignore=) leaves no tensor of the model")
    # Without a table of word embeddings `check_encoder` could not recognize the encoder's weights.
    if not any(map(WORD_EMBEDDINGS.fullmatch, tensors)):
        check_needed(ignored, filter(WORD_EMBEDDINGS.fullmatch, ignored))
    return ignored


def check_encoder(ignored: Ignored, checkpoint: CanonicalCheckpoint) -> None:
    """Raise if a weight of the encoder was ignored."""
    patterns: list[str] = []
    for entry in checkpoint.family.tensors.values():
        for module in modules_of(entry):
            for kind in ("weight", "bias"):
                name = checkpoint.name_in_file(f"{module}.{kind}".format(ANY_LAYER))
                patterns.append(re.escape(name).replace(ANY_LAYER, r"\d+"))
    encoder = re.compile("|".join(patterns))
    check_needed(ignored, [name for name in ignored if encoder.fullmatch(name)])


def check_needed(ignored: Ignored, needed: Iterable[str]) -> None:
    """Raise if any of the `needed` names was ignored."""
    for name in needed:
        if name in ignored:
            raise InputError(
                f"--ignore {ignored[name]} (ignore=) matches {name}, which the model needs; "
                f"write the pattern more narrowly"
            )


def ignored_notes(ignored: Ignored) -> tuple[str, ...]:
    """A note that lists the ignored tensors; no note if there are none."""
    return (f"ignored: {len(ignored)} tensors ({_listed(list(ignored))})",) if ignored else ()


@dataclass(frozen=True)
class LoadReport:
    """How the tensors of a file compare with those of the model, by their names in the file."""

    missing: dict[str, Shape] = field(default_factory=dict[str, Shape])
    misshaped: dict[str, tuple[Shape, Shape]] = field(  # expected, in file
        default_factory=dict[str, tuple[Shape, Shape]]
    )
    unknown: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()  # not used, and without effect on any result
    nonfinite: dict[str, int] = field(default_factory=dict[str, int])  # number of such values
    overflowed: dict[str, int] = field(
        default_factory=dict[str, int]
    )  # finite only in the file's dtype
    # By our name, of its values as float32: one checksum per tensor of the file that it is made of.
    checksums: dict[str, tuple[str, ...]] = field(
        default_factory=dict[str, tuple[str, ...]], compare=False
    )

    def mismatches(self) -> list[str]:
        """One line per reason why the tensors do not fit the model."""
        misshaped = [
            f"{name}: {list(in_file)} for {list(expected)}"
            for name, (expected, in_file) in self.misshaped.items()
        ]
        return [
            *_counted("missing", [f"{name} {list(size)}" for name, size in self.missing.items()]),
            *_counted("of another shape", misshaped),
            *(
                f"{line}; skip what is no part of the model with --ignore PATTERN (ignore=)"
                for line in _counted("unknown", self.unknown)
            ),
        ]

    def bad_values(self, dtype: torch.dtype | None) -> list[str]:
        """One line per kind of value that no model can compute with."""
        nonfinite = [f"{name}: {count} values" for name, count in self.nonfinite.items()]
        overflowed = [f"{name}: {count} values" for name, count in self.overflowed.items()]
        limit = dtype_name(dtype) if dtype else "its format"
        return [
            *_counted("with NaN or infinity", nonfinite),
            *_counted(f"beyond the range of {limit}", overflowed),
        ]

    misfits = renamed_attribute("misfits", "mismatches")
    blemishes = renamed_attribute("blemishes", "bad_values")

    def unused_notes(self) -> tuple[str, ...]:
        """A note that lists tensors without use, except tables of the numbers from 0."""
        unused = [name for name in self.unexpected if not name.endswith("position_ids")]
        return (f"not used: {len(unused)} tensors ({_listed(unused)})",) if unused else ()


def _counted(category: str, items: Iterable[str]) -> list[str]:
    items = list(items)
    return [f"{len(items)} {category} ({_listed(items)})"] if items else []


def _listed(items: Sequence[str]) -> str:
    return ", ".join(items[:LISTED]) + (", …" if len(items) > LISTED else "")


def place(
    model: Model,
    checkpoint: CanonicalCheckpoint,
    table: names.Table,
    device: torch.device,
    dtype: torch.dtype | None,
    ignored: Ignored | None = None,
) -> LoadReport:
    """Move `checkpoint.tensors` into the model, after checking that every tensor fits.

    dtype: None keeps that of each tensor. ignored: tensors of the file that were dropped.
    """
    state = model.state_dict()
    sources = {name: names.sources(name, table) for name in state}
    report = _compare(state, sources, checkpoint)
    check_needed(ignored or {}, report.missing)
    raise_problems("the weights do not fit the configuration", report.mismatches())
    # One parameter per tuple of sources, so that weights tied in the file stay tied here.
    parameters: dict[tuple[str, ...], nn.Parameter] = {}
    checksums: dict[str, str] = {}
    for parts in sources.values():
        if parts not in parameters:
            tensors = [_take(name, checkpoint, dtype, report, checksums) for name in parts]
            joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            parameters[parts] = nn.Parameter(joined.to(device))
    for name, parts in sources.items():
        report.checksums[name] = tuple(checksums[part] for part in parts)
    placed = {name: parameters[parts] for name, parts in sources.items()}
    model.load_state_dict(placed, assign=True)
    return report


def _compare(
    state: Mapping[str, Tensor],
    sources: Mapping[str, tuple[str, ...]],
    checkpoint: CanonicalCheckpoint,
) -> LoadReport:
    expected: dict[str, Shape] = {}
    for name, parts in sources.items():
        rows, *widths = state[name].shape
        expected.update(dict.fromkeys(parts, (rows // len(parts), *widths)))
    in_file = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    spare = [name for name in in_file if name not in expected]
    harmless = [name for name in spare if checkpoint.family.harmless.fullmatch(name)]
    spell = checkpoint.name_in_file
    return LoadReport(
        missing={spell(name): shape for name, shape in expected.items() if name not in in_file},
        misshaped={
            spell(name): (shape, in_file[name])
            for name, shape in expected.items()
            if name in in_file and in_file[name] != shape
        },
        unknown=tuple(spell(name) for name in spare if name not in harmless),
        unexpected=tuple(spell(name) for name in harmless),
    )


def _take(
    name: str,
    checkpoint: CanonicalCheckpoint,
    dtype: torch.dtype | None,
    report: LoadReport,
    checksums: dict[str, str],
) -> Tensor:
    """Take a tensor out of the checkpoint, cast it, and report values that are not finite.

    The checksum is that of the values before they are cast to a narrower dtype.
    """
    tensor = checkpoint.tensors.pop(name)
    if not tensor.is_floating_point():
        raise CheckpointError(
            f"{checkpoint.name_in_file(name)} holds {tensor.dtype}; quantized weights are not read"
        )
    cast = tensor.to(dtype or tensor.dtype).contiguous()  # TensorFlow's kernels come transposed
    # The sum needs one pass and is finite unless a value is not (or all are absurdly large).
    if not cast.sum(dtype=torch.promote_types(cast.dtype, torch.float32)).isfinite():
        before = int((~tensor.isfinite()).sum())
        after = int((~cast.isfinite()).sum())
        if before:
            report.nonfinite[checkpoint.name_in_file(name)] = before
        elif after:
            report.overflowed[checkpoint.name_in_file(name)] = after
    values = cast if cast.dtype == torch.float32 else tensor.float()
    checksums[name] = f"{list(values.shape)} {checksum(values)}"
    return cast


def raise_problems(summary: str, problems: list[str]) -> None:
    """Raise a CheckpointError that lists the problems, if there are any."""
    if problems:
        raise CheckpointError(f"{summary}: {'; '.join(problems)}")
