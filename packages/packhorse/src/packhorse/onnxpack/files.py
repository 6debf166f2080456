"""Read an ONNX model and write another, whole or not at all; external weights stay external.

Weights in external files are never loaded: the files are copied under the new model's name. Only
--precision fp16 needs them in memory.
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

INLINE_LIMIT = 1_500_000_000  # bytes in one file; protobuf allows 2 GB


def read(path: Path) -> ModelProto:
    """Read a model without its external weights; functions are inlined into the one graph."""
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
    """The external files of a model, and the tensors in each."""
    tensors: dict[str, list[TensorProto]] = {}
    for tensor in model.graph.initializer:
        if external_data_helper.uses_external_data(tensor):
            location = external_data_helper.ExternalDataInfo(tensor).location
            tensors.setdefault(location, []).append(tensor)
    return tensors


def _inside(folder: Path, location: str) -> Path:
    """The path of external weights; raises for files outside the model's folder."""
    real = (folder / location).resolve()
    if not real.is_relative_to(folder.resolve()) or not real.is_file():
        raise CheckpointError(f"{folder / location}: the weights are not a file beside the model")
    return real


def halve(model: ModelProto, folder: Path) -> ModelProto:
    """Convert weights and arithmetic to fp16; inputs and outputs keep their types."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    external_data_helper.load_external_data_for_model(model, str(folder))
    return convert_float_to_float16(model, keep_io_types=True)


@contextmanager
def draft(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a path to write a model to, which becomes `target` if the block succeeds."""
    if target.exists() and not overwrite:
        raise InputError(
            f"{target} is there already; choose another name, or pass --overwrite (overwrite=True)"
        )
    folder = Path(os.path.abspath(target)).parent
    try:
        with tempfile.TemporaryDirectory(
            dir=folder, prefix=f".{target.name}.", suffix=".partial"
        ) as temporary:
            yield Path(temporary) / target.name
            # The model is moved last, so that it never exists without its weights.
            paths = sorted(Path(temporary).iterdir(), key=lambda path: path.name == target.name)
            for path in paths:
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
                path.replace(folder / path.name)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error


def write(model: ModelProto, path: Path, folder: Path, *, external_weights: bool) -> None:
    """Write `path` and check it.

    folder: where the external files are, which are copied. external_weights: weights in memory go
    to an external file too.
    """
    external_files = external(model)
    for number, (location, tensors) in enumerate(external_files.items()):
        name = f"{path.name}.data{number or ''}"
        shutil.copyfile(_inside(folder, location), path.with_name(name))
        for tensor in tensors:
            entry = next(entry for entry in tensor.external_data if entry.key == "location")
            entry.value = name
    separate = not external_files and (external_weights or model.ByteSize() > INLINE_LIMIT)
    onnx.save(model, path, save_as_external_data=separate, location=f"{path.name}.data")
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise CheckpointError(f"the packed model is not valid ONNX: {error}") from error
