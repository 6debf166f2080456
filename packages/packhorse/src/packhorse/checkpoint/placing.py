"""Put a checkpoint's tensors into a model, once it is sure that each has its place.

Tensors are taken out of the file's dictionary one by one, cast, and handed to the model, so that
little is ever held twice. Strict: what is missing, has another shape or is unknown is listed by its
name in the file before anything is placed; values that are not finite are counted on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from packhorse.checkpoint import names
from packhorse.checkpoint.ignoring import Ignored, check_needed
from packhorse.device import dtype_name
from packhorse.errors import CheckpointError
from packhorse.model.model import Model

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """How the tensors of a file meet those of the model; all by their names in the file."""

    missing: dict[str, Shape] = field(default_factory=dict)
    misshaped: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)  # expected, found
    unknown: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()  # without use and without harm
    nonfinite: dict[str, int] = field(default_factory=dict)  # how many values
    overflowed: dict[str, int] = field(default_factory=dict)  # finite only in the file

    def misfits(self) -> list[str]:
        """What keeps the tensors from being the model's, a line each."""
        wrong = [
            f"{n}: {list(found)} for {list(want)}" for n, (want, found) in self.misshaped.items()
        ]
        return [
            *_listed("missing", [f"{n} {list(shape)}" for n, shape in self.missing.items()]),
            *_listed("of another shape", wrong),
            *(
                f"{line}; skip what is no part of the model with --ignore PATTERN (ignore=)"
                for line in _listed("unknown", self.unknown)
            ),
        ]

    def blemishes(self, dtype: torch.dtype | None) -> list[str]:
        """Values no model can work with."""
        bad = [f"{name}: {count} values" for name, count in self.nonfinite.items()]
        over = [f"{name}: {count} values" for name, count in self.overflowed.items()]
        return [
            *_listed("with NaN or infinity", bad),
            *_listed(f"beyond the range of {dtype_name(dtype) if dtype else 'its format'}", over),
        ]


def _listed(what: str, items: Iterable[str]) -> list[str]:
    items = list(items)
    shown = ", ".join(items[:8]) + (", …" if len(items) > 8 else "")
    return [f"{len(items)} {what} ({shown})"] if items else []


def place(
    model: Model,
    found: names.Found,
    table: names.Table,
    device: torch.device,
    dtype: torch.dtype | None,
    ignored: Ignored | None = None,
) -> Report:
    """Empty `found.tensors` into the model, once it is sure that each has its place.

    Without a dtype each keeps its own. ignored: tensors of the file that were taken out.
    """
    state = model.state_dict()
    sources = {ours: names.sources(ours, table) for ours in state}
    report = _compare(state, sources, found)
    check_needed(ignored or {}, report.missing)
    insist("the weights do not fit the configuration", report.misfits())
    # One parameter for each set of sources: what is shared or tied in the file stays so here.
    made: dict[tuple[str, ...], nn.Parameter] = {}
    for parts in sources.values():
        if parts not in made:
            pieces = [_cast(name, found, dtype, report) for name in parts]
            joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            made[parts] = nn.Parameter(joined.to(device))
    model.load_state_dict({ours: made[parts] for ours, parts in sources.items()}, assign=True)
    return report


def _compare(
    state: Mapping[str, Tensor], sources: Mapping[str, tuple[str, ...]], found: names.Found
) -> Report:
    shapes: dict[str, Shape] = {}
    for ours, parts in sources.items():
        rows, *rest = state[ours].shape
        shapes.update(dict.fromkeys(parts, (rows // len(parts), *rest)))
    has = {name: tuple(tensor.shape) for name, tensor in found.tensors.items()}
    spare = [name for name in has if name not in shapes]
    harmless = [name for name in spare if found.family.harmless.fullmatch(name)]
    return Report(
        missing={found.spell(n): shape for n, shape in shapes.items() if n not in has},
        misshaped={
            found.spell(n): (shape, has[n])
            for n, shape in shapes.items()
            if n in has and has[n] != shape
        },
        unknown=tuple(found.spell(name) for name in spare if name not in harmless),
        unexpected=tuple(found.spell(name) for name in harmless),
    )


def _cast(name: str, found: names.Found, dtype: torch.dtype | None, report: Report) -> Tensor:
    """Take a tensor out of the checkpoint, cast it, and note values that are not finite."""
    tensor = found.tensors.pop(name)
    if not tensor.is_floating_point():
        raise CheckpointError(
            f"{found.spell(name)} holds {tensor.dtype}; quantised weights are not read"
        )
    cast = tensor.to(dtype or tensor.dtype).contiguous()  # TensorFlow's kernels come transposed
    # One pass over the sum: it is finite unless some value is not (or all are absurdly large).
    if not cast.sum(dtype=torch.promote_types(cast.dtype, torch.float32)).isfinite():
        in_file, here = (int((~t.isfinite()).sum()) for t in (tensor, cast))
        if in_file:
            report.nonfinite[found.spell(name)] = in_file
        elif here:
            report.overflowed[found.spell(name)] = here
    return cast


def insist(what: str, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(f"{what}: {'; '.join(problems)}")
