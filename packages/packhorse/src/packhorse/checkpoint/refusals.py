"""What people pass as a checkpoint and is none that is read here: what it is, and what converts it.

Told from a file's first bytes, and only where a format has no mark of its own from its name. A
format stands here if BERT models are found in it; whatever else a file may be, its name is given
with the formats that are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from packhorse.checkpoint import files
from packhorse.errors import CheckpointError

_TRANSFORMERS = (
    "python -c \"from transformers import AutoModel; AutoModel.from_pretrained('{folder}', "
    "from_%s=True).save_pretrained('OUT')\" (or the class of its task, which keeps the head)"
)
# By the ending of a name: how such a file begins (None: no two alike), and what to say of it.
FOREIGN: dict[str, tuple[re.Pattern[bytes] | None, str]] = {
    ".h5": (
        re.compile(rb"\x89HDF\r\n\x1a\n"),
        "holds weights of Keras (HDF5), which are not read here; convert a tf_model.h5 where "
        f"transformers < 5 and TensorFlow are installed: {_TRANSFORMERS % 'tf'}",
    ),
    ".msgpack": (
        None,
        "holds weights of Flax, which are not read here; convert a flax_model.msgpack where "
        f"transformers < 5 and Flax are installed: {_TRANSFORMERS % 'flax'}",
    ),
    ".npz": (
        re.compile(rb"PK\x03\x04.{26}[^\0]{1,200}?\.npy", re.S),
        "holds arrays of numpy, which are not read here; if they have the names of transformers: "
        'python -c "import numpy, safetensors.numpy as s; '
        "s.save_file(dict(numpy.load('{file}')), '{folder}/model.safetensors')\"",
    ),
    ".gguf": (
        re.compile(rb"GGUF"),
        "is a model for llama.cpp (GGUF), from which nothing makes a BERT again; pass the model "
        "that it was made of: hf download ORG/NAME",
    ),
}
# Keras numbers the layers of such a checkpoint; what they are is known to its code alone.
NUMBERED = re.compile(r"(.*/)?layer(_with_weights)?-\d+/")


def of_file(path: Path) -> str | None:
    """What to say of a file that another program reads; None if it is not known to be such."""
    with files.open_file(path.parent, path.name) as file:
        start = file.read(512)
    for suffix, (begins, said) in FOREIGN.items():
        if begins.match(start) if begins else path.suffix == suffix and start:
            return f"{path} {said.format(file=path, folder=path.parent)}"
    return None


def of_folder(folder: Path) -> str | None:
    """The same of a folder that holds such a file."""
    for suffix in FOREIGN:
        for path in sorted(folder.glob(f"*{suffix}")):
            if path.is_file() and (said := of_file(path)):
                return said
    return None


def check_names(prefix: Path, names: Iterable[str]) -> None:
    """Refuse a checkpoint of TensorFlow 2 whose weights are numbered and have no names."""
    numbered = next((name for name in names if NUMBERED.match(name)), None)
    if numbered:
        raise CheckpointError(
            f"{prefix} is an object checkpoint of TensorFlow 2, in which weights are numbered and "
            f"have no names ({numbered}); one of TensorFlow's Model Garden is converted where "
            f"transformers < 5 and TensorFlow are installed: python -m transformers.models.bert"
            f".convert_bert_original_tf2_checkpoint_to_pytorch --tf_checkpoint_path {prefix} "
            f"--bert_config_file {prefix.parent}/bert_config.json --pytorch_dump_path OUT.bin"
        )
