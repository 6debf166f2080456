"""Which files a user means by a model, and in which format they are.

A path may be a model's folder, a file of weights, or the prefix of a TensorFlow checkpoint;
anything else is a hub id. Formats are recognized by the files' contents, and by their names only
where a format has no signature. In a folder the first format of `FORMATS` that is present is taken:
the ones that keep most of a model come first. A folder with nothing but an adapter
stands for its base with the adapter in it. Files of other programs in which BERT models are
published (Keras, Flax, numpy) are refused with the command that converts them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from packhorse.checkpoint import adapters, files, gelu, gguf, hf, hub, onnx, sentence
from packhorse.checkpoint.contents import Contents
from packhorse.checkpoint.tensorflow import frozen, tf1
from packhorse.errors import CheckpointError

FORMATS = {  # and the files that each is recognized by, for messages
    "safetensors": "model.safetensors, or its shards and model.safetensors.index.json",
    "torch": "pytorch_model.bin, or its shards and pytorch_model.bin.index.json",
    "tf1": "a TensorFlow checkpoint: PREFIX.index and PREFIX.data-…",
    "onnx": "model.onnx, here or in a folder onnx",
    "frozen": "a frozen TensorFlow graph: NAME.pb",
    "gguf": "a GGUF file of llama.cpp: NAME.gguf",
}
INDEXES = {kind.index for kind in hf.KINDS.values()}  # such a file stands for its folder
# Format by file name, where the contents do not show it; its reader then reports the damage.
SUFFIXES = {".onnx": "onnx", ".pb": "frozen", ".meta": "frozen", ".gguf": "gguf"}

_TRANSFORMERS = (
    "python -c \"from transformers import AutoModel; AutoModel.from_pretrained('{folder}', "
    "from_%s=True).save_pretrained('OUT')\" (or the class of its task, which keeps the head)"
)
# Suffix → the first bytes of such a file (None: it has no signature), and the message about it.
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
        # A zip archive whose first member is a .npy: bytes 4 to 29 are the rest of its header.
        re.compile(rb"PK\x03\x04.{26}[^\0]{1,200}?\.npy", re.S),
        "holds arrays of numpy, which are not read here; if they have the names of transformers: "
        'python -c "import numpy, safetensors.numpy as s; '
        "s.save_file(dict(numpy.load('{file}')), '{folder}/model.safetensors')\"",
    ),
}
SIGNATURE = 512  # bytes at the beginning of a file that show its format
# Keras numbers the layers in its checkpoints; only the code that saved them knows what they are.
NUMBERED = re.compile(r"(.*/)?layer(_with_weights)?-\d+/")


@dataclass(frozen=True)
class ModelSource:
    """The files of a checkpoint."""

    format: str  # a key of FORMATS
    path: Path  # the argument of the format's reader
    folder: Path  # where configuration and vocabulary are looked for first
    layout: sentence.SentenceLayout | None = None
    root: Path = Path()  # the path that the user's argument resolved to; the layout's folder
    name: str = ""  # short: the last part of a path, or a whole hub id
    adapter: Path | None = None  # the folder of an adapter to be merged

    def read(self, *, slots: bool = False) -> Contents:
        """Read all tensors; with `slots`, the optimizer's state too."""
        if self.format != "tf1":
            return self._reader(self.path)
        contents = tf1.read(self.path, slots=slots)
        check_names(self.path, contents.tensors)
        forms, notes = gelu.forms_in_meta(self.path)
        graph = self.path.with_name(f"{self.path.name}.meta")
        return replace(contents, gelu=forms, graph=graph, notes=contents.notes + notes)

    @property
    def _reader(self) -> Callable[[Path], Contents]:
        if self.format in ("safetensors", "torch"):
            return hf.read if self.path.is_dir() else hf.read_file
        return {"onnx": onnx.read, "frozen": frozen.read, "gguf": gguf.read}[self.format]


def find(model: str | Path, is_base: bool = False) -> ModelSource:
    """The source that a path or a hub id stands for; is_base: of an adapter, so that it is none."""
    path = hub.resolve(model)
    name = path.resolve().name if path == Path(model).expanduser() else str(model)
    path = path.parent if path.name in INDEXES else path
    if not path.is_dir():
        return _file_source(path, name)
    layout = sentence.read(path)
    home = layout.transformer if layout else path
    if adapters.is_adapter(home) and not hf.format_of(home):
        if is_base:
            raise CheckpointError(f"{home} is an adapter too, and has no weights of a model")
        return replace(adapted(_base(home), home), name=name)
    format, weights = _folder_format(home)
    layout = layout or _own_layout(format, weights)
    return ModelSource(format, weights, home, layout, path, name)


def _own_layout(format: str, weights: Path) -> sentence.SentenceLayout | None:
    """The pooling that a file of weights names itself."""
    pooling = gguf.pooling(weights) if format == "gguf" else None
    if pooling is None:
        return None
    return sentence.SentenceLayout(weights.parent, weights.parent, pooling=(pooling,))


def adapted(source: ModelSource, adapter: str | Path) -> ModelSource:
    """The source with an adapter, a folder or a hub id; its layout counts, if it has one."""
    path = hub.resolve(adapter)
    layout = sentence.read(path) if path.is_dir() else None
    home = layout.transformer if layout else path
    if not path.is_dir() or not adapters.is_adapter(home):
        raise CheckpointError(f"{adapter} is no folder of an adapter: it has no {adapters.CONFIG}")
    if source.adapter is not None:
        raise CheckpointError(
            f"{source.adapter} is an adapter already, and {adapter} another; pass their base "
            "model and one adapter"
        )
    if layout:
        source = replace(source, layout=layout, root=path)
    return replace(source, adapter=home, name=f"{source.name}:{path.resolve().name}")


def _base(adapter: Path) -> ModelSource:
    named = adapters.base(adapter)
    try:
        return find(named, is_base=True)
    except CheckpointError as error:
        raise CheckpointError(
            f"{adapter} is an adapter of {named!r}: {error}; where that model lies elsewhere, load "
            f"it and pass --adapter {adapter} (adapter=)"
        ) from error.__cause__


def _file_source(path: Path, name: str) -> ModelSource:
    """The source of a file of weights or of a prefix; the layout is that of its folder."""
    prefix = tf1.find(path)
    weights = prefix or path
    format = "tf1" if prefix else _file_format(path)
    layout = sentence.read(weights.parent) or _own_layout(format, weights)
    return ModelSource(format, weights, weights.parent, layout, weights, name)


def _file_format(path: Path) -> str:
    """The format of a file that does not belong to a TensorFlow checkpoint."""
    if problem := tf1.damaged(path) or foreign_file(path):
        raise CheckpointError(problem)
    if format := hf.sniff(path):
        return format
    if gguf.sniff(path):
        return "gguf"
    if onnx.sniff(path):
        return "onnx"
    if frozen.known(path):  # its reader explains TensorFlow's other files too
        return "frozen"
    if format := SUFFIXES.get(path.suffix):
        return format
    raise CheckpointError(
        f"{path} ({path.stat().st_size} bytes) is no checkpoint that is known here, or is damaged; "
        f"those are: {'; '.join(FORMATS.values())}"
    )


def _folder_format(folder: Path) -> tuple[str, Path]:
    """The format of the weights in a folder, and the path that its reader takes."""
    if format := hf.format_of(folder):
        return format, folder
    if prefix := tf1.find(folder):
        return "tf1", prefix
    damaged = tf1.damaged(folder)
    if damaged and any(folder.glob("*.data-?????-of-?????")):
        raise CheckpointError(damaged)
    for place in (folder, folder / "onnx"):
        if files.exists(place, "model.onnx"):
            return "onnx", place / "model.onnx"
    if any(files.exists(folder, f"saved_model.{suffix}") for suffix in ("pb", "pbtxt")):
        return "frozen", folder  # its reader explains what to do with a SavedModel
    for suffix, format in (
        (".onnx", "onnx"),
        (".pb", "frozen"),
        (".pbtxt", "frozen"),
        (".gguf", "gguf"),
    ):
        paths = [path for path in sorted(folder.glob(f"*{suffix}")) if path.is_file()]
        if len(paths) == 1:
            return format, paths[0]
        if paths:
            names = ", ".join(path.name for path in paths)
            raise CheckpointError(f"{folder} has several models ({names}); pass one of the files")
    if problem := foreign_in_folder(folder) or damaged:
        raise CheckpointError(problem)
    formats = "; ".join(FORMATS.values())
    raise CheckpointError(f"{folder}: there are no weights; looked for: {formats}")


def foreign_file(path: Path) -> str | None:
    """The message about a file of another program; None if it is not known to be one."""
    with files.open_file(path.parent, path.name) as file:
        start = file.read(SIGNATURE)
    for suffix, (signature, message) in FOREIGN.items():
        if signature.match(start) if signature else path.suffix == suffix and start:
            return f"{path} {message.format(file=path, folder=path.parent)}"
    return None


def foreign_in_folder(folder: Path) -> str | None:
    """The message about the first file of another program in a folder; None if there is none."""
    for suffix in FOREIGN:
        for path in sorted(folder.glob(f"*{suffix}")):
            if path.is_file() and (message := foreign_file(path)):
                return message
    return None


def check_names(prefix: Path, names: Iterable[str]) -> None:
    """Raise for a TensorFlow 2 object checkpoint, whose weights are numbered, not named."""
    numbered = next((name for name in names if NUMBERED.match(name)), None)
    if numbered:
        raise CheckpointError(
            f"{prefix} is an object checkpoint of TensorFlow 2, in which weights are numbered and "
            f"have no names ({numbered}); one of TensorFlow's Model Garden is converted where "
            f"transformers < 5 and TensorFlow are installed: python -m transformers.models.bert"
            f".convert_bert_original_tf2_checkpoint_to_pytorch --tf_checkpoint_path {prefix} "
            f"--bert_config_file {prefix.parent}/bert_config.json --pytorch_dump_path OUT.bin"
        )
