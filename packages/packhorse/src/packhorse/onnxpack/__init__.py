"""Packed ONNX: rewrite a user's own model so that it takes packed rows, and run it.

`pack` writes the new model; `load` opens it as the backend of an Encoder. Both need the extra
`onnx`, which is imported here and only when one of them is called.
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

    from packhorse.onnxpack.facts import Facts, Kind, Mode, Precision
    from packhorse.onnxpack.rewrite import Finding
    from packhorse.onnxpack.session import OnnxBackend


TAIL = 1 << 16  # bytes
FAR = 0.05  # a difference to the original, of its size, that users are warned of


@dataclass(frozen=True)
class Report:
    """What was made."""

    facts: Facts
    findings: tuple[Finding, ...]
    nodes: tuple[int, int]  # before and after
    files: tuple[Path, ...]
    # To the original, of its size (root mean squares): as ONNX Runtime runs both, and with nothing
    # fused, which for int8 is not the same.
    difference: float
    difference_unfused: float

    @property
    def warning(self) -> str:
        """What to tell users of a large difference; empty where it is small."""
        if self.difference <= FAR:
            return ""
        fused = self.difference_unfused < FAR
        reason = (
            f"with nothing fused it is {self.difference_unfused:.1e}: ONNX Runtime fuses the nodes "
            f"of the original and of the packed model differently, and int8 rounds differently then"
            if fused
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
) -> Report:
    """Write `target`, the model `source` for packed rows; it is compared with the original first.

    shape: rows and tokens a row, where they are to be fixed. outputs: what the graph does not show
    about an output, one a token or one a sequence.
    """
    _need_extra()
    from packhorse.onnxpack import checking, files
    from packhorse.onnxpack.graph import Graph
    from packhorse.onnxpack.rewrite import rewrite

    source, target = Path(source), Path(target)
    if target.exists() and source.exists() and target.samefile(source):
        raise InputError(f"{target} is the model to be packed; choose another name")
    if shape is not None and min(shape) < 1:
        raise InputError(f"a shape of {shape[0]} rows of {shape[1]} tokens holds nothing")
    model, folder = files.read(source), source.absolute().parent
    before, beside = len(model.graph.node), bool(files.external(model))
    try:
        facts, findings = rewrite(Graph(model, folder), mode, shape, outputs or {})
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error
    if precision == "fp16":
        model = files.halve(model, folder)
    with files.draft(target, overwrite=overwrite) as path:
        files.write(model, path, folder, beside=beside)
        off = checking.compare(source, path, facts, _numbers(model))
        written = tuple(target.with_name(file.name) for file in sorted(path.parent.iterdir()))
    nodes = (before, len(model.graph.node))
    return Report(facts, tuple(findings), nodes, written, off.as_run, off.as_written)


def _numbers(model: ModelProto) -> str:
    """The coarsest numbers that a model computes with."""
    kinds = {node.op_type for node in model.graph.node}
    if any("Quantize" in kind or kind.endswith("Integer") for kind in kinds):
        return "int8"
    halved = any(tensor.data_type == tensor.FLOAT16 for tensor in model.graph.initializer)
    return "fp16" if halved else "fp32"


def is_packed(path: Path) -> bool:
    """Is this a model that `pack` wrote? Its facts are the last thing in the file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return KEY.encode() in file.read()


def load(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    heads: Mapping[str, nn.Module] | None = None,
) -> OnnxBackend:
    """A packed model as the backend of an Encoder; its `facts` say what the Encoder has to know.

    heads: modules `(hidden, packed) -> tensor` that run on the hidden states, for what the model
    itself does not answer (sentence vectors, most often).
    """
    _need_extra()
    from packhorse.onnxpack.session import OnnxBackend

    return OnnxBackend(path, device=device, heads=heads)


def serves(device: torch.device) -> bool:
    """Does the ONNX Runtime that is installed run on it?"""
    _need_extra()
    from packhorse.onnxpack import engine

    return engine.serves(device)


def _need_extra() -> None:
    for package in ("onnx", "onnxruntime"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise MissingExtra(package, "onnx") from error
