"""Read a model and write another, whole or not at all; weights beside the file stay beside it.

Weights in external files are never loaded: the new model gets copies of the files, under its own
name. Only --precision fp16 has to have them in memory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto, external_data_helper, inliner

from packhorse.errors import CheckpointError, InputError

INLINE_LIMIT = 1_500_000_000  # bytes; protobuf ends at 2 GB


def read(path: Path) -> ModelProto:
    """The model without its external weights; functions are inlined, so that there is one graph."""
    try:
        model = onnx.load(path, load_external_data=False)
    except FileNotFoundError as error:
        raise InputError(f"there is no {path}") from error
    except (DecodeError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no ONNX model: {error}") from error
    if not model.graph.node:
        raise CheckpointError(f"{path} is no ONNX model: it has no graph")
    for location in external(model):
        _inside(path.parent, location)
    if model.functions:
        model = inliner.inline_local_functions(model)
    return model


def external(model: ModelProto) -> dict[str, list[TensorProto]]:
    """The external files, and the tensors in each."""
    found: dict[str, list[TensorProto]] = {}
    for tensor in model.graph.initializer:
        if external_data_helper.uses_external_data(tensor):
            location = external_data_helper.ExternalDataInfo(tensor).location
            found.setdefault(location, []).append(tensor)
    return found


def _inside(folder: Path, location: str) -> Path:
    """A model may name any file of this machine; those beside it will do."""
    real = (folder / location).resolve()
    if not real.is_relative_to(folder.resolve()) or not real.is_file():
        raise CheckpointError(f"{folder / location}: the weights are not a file beside the model")
    return real


def halve(model: ModelProto, folder: Path) -> ModelProto:
    """Weights and arithmetic in fp16, inputs and outputs as they were."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    external_data_helper.load_external_data_for_model(model, str(folder))
    return convert_float_to_float16(model, keep_io_types=True)


@contextmanager
def draft(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Where to write a model that becomes `target` when the block ends well."""
    if target.exists() and not overwrite:
        raise InputError(
            f"{target} is there already; choose another name, or pass --overwrite (overwrite=True)"
        )
    folder = Path(os.path.abspath(target)).parent
    try:
        with tempfile.TemporaryDirectory(
            dir=folder, prefix=f".{target.name}.", suffix=".partial"
        ) as place:
            yield Path(place) / target.name
            # The model last: without it, weights are only files.
            for path in sorted(Path(place).iterdir(), key=lambda path: path.name == target.name):
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
                path.replace(folder / path.name)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error


def write(model: ModelProto, path: Path, weights: Path, *, beside: bool) -> None:
    """Write `path` and check it.

    weights: the folder of the external files, which are copied. beside: weights that are in memory
    go to an external file as well.
    """
    files = external(model)
    for number, (location, tensors) in enumerate(files.items()):
        name = f"{path.name}.data{number or ''}"
        shutil.copyfile(_inside(weights, location), path.with_name(name))
        for tensor in tensors:
            next(e for e in tensor.external_data if e.key == "location").value = name
    apart = not files and (beside or model.ByteSize() > INLINE_LIMIT)
    onnx.save(model, path, save_as_external_data=apart, location=f"{path.name}.data")
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise CheckpointError(f"the packed model is not valid ONNX: {error}") from error
