"""Which files a user means by a model, and in which format: told from the files themselves.

A path may be a model's folder, a file of weights, or the prefix of a TensorFlow checkpoint; what is
no path is a hub id. In a folder the first of `FORMATS` that is there is taken: what keeps most of a
model comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from packhorse.checkpoint import files, hf, hub, onnx, refusals, sentence
from packhorse.checkpoint.contents import Contents
from packhorse.checkpoint.tensorflow import frozen, gelu, tf1
from packhorse.errors import CheckpointError

# Each by what tells it.
FORMATS = {
    "safetensors": "model.safetensors, or its shards and model.safetensors.index.json",
    "torch": "pytorch_model.bin, or its shards and pytorch_model.bin.index.json",
    "tf1": "a TensorFlow checkpoint: PREFIX.index and PREFIX.data-…",
    "onnx": "model.onnx, here or in a folder onnx",
    "frozen": "a frozen TensorFlow graph: NAME.pb",
}
INDEXES = {kind.index for kind in hf.KINDS.values()}  # passed as a file, one means its folder
# What a file claims to be by its name, where its bytes do not say: that reader says what is wrong.
CLAIMS = {".onnx": "onnx", ".pb": "frozen", ".meta": "frozen"}


@dataclass(frozen=True)
class Source:
    """Where a checkpoint lies."""

    format: str
    path: Path  # what the format's reader takes
    folder: Path  # where configuration and vocabulary are looked for first
    layout: sentence.Layout | None = None
    root: Path = Path()  # what the user's word led to; the folder of the layout
    name: str = ""  # short: of a path its last part, of a hub id all

    def read(self, *, slots: bool = False) -> Contents:
        """What it holds; with `slots`, the optimizer's state too."""
        if self.format != "tf1":
            return self._reader(self.path)
        contents = tf1.read(self.path, slots=slots)
        refusals.check_names(self.path, contents.tensors)
        forms, notes = gelu.of_checkpoint(self.path)
        graph = self.path.with_name(f"{self.path.name}.meta")
        return replace(contents, gelu=forms, graph=graph, notes=contents.notes + notes)

    @property
    def _reader(self) -> Callable[[Path], Contents]:
        if self.format in ("safetensors", "torch"):
            return hf.read if self.path.is_dir() else hf.read_file
        return {"onnx": onnx.read, "frozen": frozen.read}[self.format]


def find(model: str | Path) -> Source:
    """The source behind a path or a hub id."""
    path = hub.resolve(model)
    name = path.resolve().name if path == Path(model).expanduser() else str(model)
    path = path.parent if path.name in INDEXES else path
    if not path.is_dir():
        return _file(path, name)
    layout = sentence.read(path)
    home = layout.transformer if layout else path
    format, weights = _in_folder(home)
    return Source(format, weights, home, layout, path, name)


def _file(path: Path, name: str) -> Source:
    """A file of weights, or a prefix; the layout is that of its folder."""
    prefix = tf1.find(path)
    weights, format = prefix or path, "tf1" if prefix else _format(path)
    layout = sentence.read(weights.parent)
    return Source(format, weights, weights.parent, layout, weights, name)


def _format(path: Path) -> str:
    """That of a file which is none of a TensorFlow checkpoint."""
    if why := tf1.damaged(path) or refusals.of_file(path):
        raise CheckpointError(why)
    if format := hf.sniff(path):
        return format
    if onnx.sniff(path):
        return "onnx"
    if frozen.known(path):  # its reader knows TensorFlow's other files too
        return "frozen"
    if format := CLAIMS.get(path.suffix):
        return format
    raise CheckpointError(
        f"{path} ({path.stat().st_size} bytes) is no checkpoint that is known here, or is damaged; "
        f"those are: {'; '.join(FORMATS.values())}"
    )


def _in_folder(folder: Path) -> tuple[str, Path]:
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
        return "frozen", folder  # whose reader says what to do with one
    for suffix, format in ((".onnx", "onnx"), (".pb", "frozen"), (".pbtxt", "frozen")):
        alone = [path for path in sorted(folder.glob(f"*{suffix}")) if path.is_file()]
        if len(alone) == 1:
            return format, alone[0]
        if alone:
            names = ", ".join(path.name for path in alone)
            raise CheckpointError(f"{folder} has several models ({names}); pass one of the files")
    if why := refusals.of_folder(folder) or damaged:
        raise CheckpointError(why)
    looked = "; ".join(FORMATS.values())
    raise CheckpointError(f"{folder}: there are no weights; looked for: {looked}")
