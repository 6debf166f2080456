"""Write a TensorFlow checkpoint: one data file, the index, and the pointer file that names it.

What `tf.train.load_checkpoint` and `Saver.restore` open; no graph (.meta) is written. Each tensor
is asked for once and written before the next, so weights that are made on the way, or lie on a
device, are never all in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from packhorse import wire
from packhorse.checkpoint.tensorflow import sstable
from packhorse.checkpoint.tensorflow.tf1 import POINTER, STEP
from packhorse.checkpoint.tensorflow.tf1_index import DIMENSION_LIMIT, DTYPES, TENSOR_LIMIT, VERSION
from packhorse.errors import InputError

CODES = {dtype: code for code, dtype in DTYPES.items()}
CHUNK = 1 << 20  # bytes summed and then written


def write(prefix: Path, tensors: Mapping[str, Tensor], step: int | None = None) -> None:
    """Write `tensors` as they are, TensorFlow's names and layout, to PREFIX.index and its data."""
    names = _in_order(tensors, step)
    header = wire.write_field(1, 1) + wire.write_field(3, wire.write_field(1, VERSION))
    entries = [(b"", header)]
    with prefix.with_name(f"{prefix.name}.data-00000-of-00001").open("wb") as file:
        for name in names:
            tensor = tensors[name] if name in tensors else torch.tensor(step, dtype=torch.int64)
            entries.append((name.encode(), _append(file, name, tensor)))
    prefix.with_name(f"{prefix.name}.index").write_bytes(sstable.build(entries))
    escaped = prefix.name.replace("\\", "\\\\").replace('"', '\\"')
    keys = ("model_checkpoint_path", "all_model_checkpoint_paths")
    lines = (f'{key}: "{escaped}"\n' for key in keys)
    prefix.with_name(POINTER).write_text("".join(lines), "utf-8")


def _in_order(tensors: Mapping[str, Tensor], step: int | None) -> list[str]:
    """The names in the order of the index, checked."""
    if step is not None and STEP in tensors:
        raise InputError(f"there is a tensor {STEP} and a step besides; pass one of them")
    names = [*tensors, *([] if step is None else [STEP])]
    if len(names) > TENSOR_LIMIT:
        raise InputError(f"{len(names)} tensors; more than {TENSOR_LIMIT} would not be read")
    for name in names:
        if not name or name.startswith("\0") or len(name.encode()) > sstable.KEY_LIMIT:
            raise InputError(f"{name!r} is no name that a TensorFlow checkpoint can hold")
    return sorted(names, key=str.encode)


def _append(file: BinaryIO, name: str, tensor: Tensor) -> bytes:
    """Write the tensor's bytes; its entry in the index."""
    if tensor.dtype not in CODES or tensor.layout != torch.strided or tensor.is_meta:
        raise InputError(f"{name!r} ({tensor.dtype}) is no tensor that TensorFlow stores")
    if tensor.dim() > DIMENSION_LIMIT:
        raise InputError(f"{name!r} has more than {DIMENSION_LIMIT} dimensions")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().data
    offset, crc = file.tell(), 0
    for at in range(0, len(data), CHUNK):
        crc = wire.crc32c(data[at : at + CHUNK], crc)
        file.write(data[at : at + CHUNK])
    shape = b"".join(wire.write_field(2, wire.write_field(1, size)) for size in tensor.shape)
    return (
        wire.write_field(1, CODES[tensor.dtype])
        + wire.write_field(2, shape)
        + wire.write_field(4, offset)
        + wire.write_field(5, len(data))
        + wire.write_fixed32(6, wire.mask(crc))
    )
