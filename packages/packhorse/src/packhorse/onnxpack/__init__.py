"""Packed ONNX: rewrite a user's own model so that it takes packed rows, and run it.

`pack` writes the new model; `load` opens it as the backend of an Encoder. Both need the extra
`onnx`, which is imported only when one of them is called.

Internal: `packhorse onnx pack` is public, and `packhorse.load`, which opens what it writes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packhorse.errors import CheckpointError, InputError, MissingExtra
from packhorse.onnxpack.facts import KEY

if TYPE_CHECKING:
    import torch
    from onnx import ModelProto
    from torch import nn

    from packhorse.onnxpack.facts import Kind, Mode, PackedModelFacts, Precision
    from packhorse.onnxpack.rewrite import PackingFinding
    from packhorse.onnxpack.session import OnnxBackend


METADATA_TAIL = 1 << 16  # bytes at the end of a file in which the facts are looked for
LARGE_DIFFERENCE = 0.05  # from the original, relative, from which on users are warned


@dataclass(frozen=True)
class PackingReport:
    """The packed model, what was changed in the graph, and the difference to the original."""

    facts: PackedModelFacts
    findings: tuple[PackingFinding, ...]
    nodes: tuple[int, int]  # before and after
    files: tuple[Path, ...]
    # Relative to the size of the original's outputs (root mean squares): as ONNX Runtime runs both
    # models, and with nothing fused, which is not the same for int8.
    difference: float
    difference_unfused: float

    @property
    def warning(self) -> str:
        """The warning about a large difference; empty if it is small."""
        if self.difference <= LARGE_DIFFERENCE:
            return ""
        from_fusing = self.difference_unfused < LARGE_DIFFERENCE
        reason = (
            f"with nothing fused it is {self.difference_unfused:.1e}: ONNX Runtime fuses the nodes "
            f"of the original and of the packed model differently, and int8 rounds differently then"
            if from_fusing
            else "it comes from rounding to int8"
        )
        return (
            f"the packed model's answers differ from the original's by {self.difference:.2f} of "
            f"their size ({reason}); compare both with the fp32 model on your own texts before "
            f"you use it"
        )


def pack(
    source: str | Path,
    target: str | Path,
    mode: Mode,
    *,
    precision: Precision = "fp32",
    shape: tuple[int, int] | None = None,
    outputs: Mapping[str, Kind] | None = None,
    overwrite: bool = False,
) -> PackingReport:
    """Write `target`, the model `source` for packed rows, after comparing it with the original.

    shape: rows and tokens per row, to fix them. outputs: which outputs are per token and which per
    sequence, where the graph does not show it.
    """
    _need_extra()
    from packhorse.onnxpack import checking, files
    from packhorse.onnxpack.graph import EditableGraph
    from packhorse.onnxpack.rewrite import rewrite

    source = Path(source)
    target = Path(target)
    if target.exists() and source.exists() and target.samefile(source):
        raise InputError(f"{target} is the model to be packed; choose another name")
    if shape is not None and min(shape) < 1:
        raise InputError(f"a shape of {shape[0]} rows of {shape[1]} tokens holds nothing")
    model = files.read(source)
    folder = source.absolute().parent
    nodes_before = len(model.graph.node)
    external_weights = bool(files.external(model))
    try:
        facts, findings = rewrite(EditableGraph(model, folder), mode, shape, outputs or {})
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error
    if precision == "fp16":
        model = files.halve(model, folder)
    with files.draft(target, overwrite=overwrite) as path:
        files.write(model, path, folder, external_weights=external_weights)
        difference = checking.compare(source, path, facts, _number_format(model))
        written = tuple(target.with_name(file.name) for file in sorted(path.parent.iterdir()))
    return PackingReport(
        facts=facts,
        findings=tuple(findings),
        nodes=(nodes_before, len(model.graph.node)),
        files=written,
        difference=difference.as_run,
        difference_unfused=difference.as_written,
    )


def _number_format(model: ModelProto) -> str:
    """The coarsest number format that a model computes with: int8, fp16 or fp32."""
    kinds = {node.op_type for node in model.graph.node}
    if any("Quantize" in kind or kind.endswith("Integer") for kind in kinds):
        return "int8"
    halved = any(tensor.data_type == tensor.FLOAT16 for tensor in model.graph.initializer)
    return "fp16" if halved else "fp32"


def is_packed(path: Path) -> bool:
    """Is this a model that `pack` wrote? Its metadata is at the end of the file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - METADATA_TAIL))
        return KEY.encode() in file.read()


def load(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    heads: Mapping[str, nn.Module] | None = None,
) -> OnnxBackend:
    """Open a packed model as the backend of an Encoder; its `facts` describe its rows and outputs.

    heads: modules `(hidden, packed) -> tensor` that run on the hidden states, for heads that the
    model itself does not have (most often sentence vectors).
    """
    _need_extra()
    from packhorse.onnxpack.session import OnnxBackend

    return OnnxBackend(path, device=device, heads=heads)


def serves(device: torch.device) -> bool:
    """Does the installed ONNX Runtime run on this device?"""
    _need_extra()
    from packhorse.onnxpack import engine

    return engine.serves(device)


def _need_extra() -> None:
    """Raise MissingExtra unless the packages of the extra `onnx` are installed."""
    for package in ("onnx", "onnxruntime"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise MissingExtra(package, "onnx") from error
