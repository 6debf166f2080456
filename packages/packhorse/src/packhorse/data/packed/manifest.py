"""The manifest of a folder of packed rows: manifest.json.

It is written last and as a whole, so a folder without one is unfinished. It names every shard with
its counts, size and crc32c, so that every file can be verified. Sums (rows, sequences, tokens,
efficiency) are there for human readers; they follow from the shards and the histogram and are
checked against them. `masking` is the intended masking if masks are not stored; a loader may use
another. `config` holds whatever the maker wants to keep and has no effect.

The format number grows only when an older Packhorse would misread a folder; that one then refuses
it and names the version that wrote it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packhorse import __version__
from packhorse.atomic import new_file
from packhorse.data.packed.masking import Recipe, Specials
from packhorse.data.packed.packs import RowLayout
from packhorse.errors import InputError
from packhorse.json_types import is_list, is_object

FORMAT = 2  # 1 had no masking and did not state whether there are second segments
NAME = "manifest.json"
LARGEST = 64 << 20  # bytes of manifest; 400,000 shards fit
AGAIN = "build or import it again"  # the end of messages about a damaged manifest
SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.arrow", re.ASCII)
LEFTOVER = re.compile(r"shard-\d+\.arrow|\.shard-\d+\.arrow\.\w+\.partial", re.ASCII)
IDS = ("cls", "sep", "mask", "pad")
MASKING = ("mask_probability", "max_predictions", "whole_words")  # the fields of a Recipe used


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One file of rows: its counts, and its size and checksum to verify it."""

    name: str
    rows: int
    sequences: int
    tokens: int
    bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that is known about a dataset without opening its shards."""

    layout: RowLayout
    specials: Specials
    histogram: tuple[int, ...]  # entry i counts the sequences of length i+1
    shards: tuple[ShardInfo, ...]
    config: dict[str, Any]
    masking: Recipe = Recipe()  # noqa: RUF009 (frozen); not used if masks are stored

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def sequences(self) -> int:
        return sum(shard.sequences for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def efficiency(self) -> float:
        """The share of all slots that hold a token."""
        return self.tokens / (self.rows * self.layout.capacity)

    @property
    def fingerprint(self) -> str:
        """The same for two folders if and only if they give the same batches."""
        shards = [(shard.rows, shard.bytes, shard.crc32c) for shard in self.shards]
        content = [
            asdict(self.layout),
            _specials_json(self.specials),
            _masking_json(self),
            shards,
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Finish the dataset in a folder whose shards are written; leftover shards are removed."""
    _check(manifest, folder / NAME)
    _remove_leftovers(folder, {shard.name for shard in manifest.shards})
    fields = {"format": FORMAT, "written_by": __version__, **asdict(manifest.layout)}
    fields |= _sums(manifest)
    fields["specials"] = _specials_json(manifest.specials)
    fields["masking"] = _masking_json(manifest)
    fields["shards"] = [asdict(s) | {"crc32c": f"{s.crc32c:08x}"} for s in manifest.shards]
    fields["config"] = manifest.config
    fields["histogram"] = list(manifest.histogram)
    lines = (f" {json.dumps(key)}: {_json(value)}" for key, value in fields.items())
    with new_file(folder / NAME) as file:
        file.write(("{\n" + ",\n".join(lines) + "\n}\n").encode())


def _remove_leftovers(folder: Path, current: set[str]) -> None:
    """Remove shards of an unfinished attempt."""
    for path in folder.iterdir():
        if path.name not in current and LEFTOVER.fullmatch(path.name):
            path.unlink()


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a finished dataset in a format known here."""
    path = folder / NAME
    fields = _read_json(folder, path)
    _check_format(fields, path)
    try:
        manifest = _manifest(fields, str(path))
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is damaged: {error}; {AGAIN}") from error
    _check(manifest, path)
    for key, value in _sums(manifest).items():
        if fields.get(key) != value:
            raise InputError(
                f"{path} contradicts itself: {key} is {fields.get(key)!r:.40}, but its shards make"
                f" {value}; it was edited or damaged; {AGAIN}"
            )
    return manifest


def _json(value: Any) -> str:
    """The value on one line; a list of objects with one line per object."""
    if is_list(value) and value and is_object(value[0]):
        return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"
    return json.dumps(value)


def _sums(manifest: Manifest) -> dict[str, int | float]:
    sums = {name: getattr(manifest, name) for name in ("rows", "sequences", "tokens")}
    return sums | {"efficiency": round(manifest.efficiency, 6)}


def _read_json(folder: Path, path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST)  # a longer file is cut here, and then is no valid JSON
    except FileNotFoundError as error:
        raise InputError(_no_manifest(folder)) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {error}; {AGAIN}") from error
    if not is_object(fields):
        raise InputError(f"{path} is not a manifest of packed rows; {AGAIN}")
    return fields


def _no_manifest(folder: Path) -> str:
    """The message about a folder that has no manifest."""
    if not folder.is_dir():
        return f"{folder} is not a folder of packed rows; name one that was built or imported"
    inside = sorted(path.parent.name for path in folder.glob(f"*/{NAME}"))
    if inside:
        return f"{folder} is no dataset, but holds some: {', '.join(inside)[:80]}; name one of them"
    return (
        f"{folder} has no {NAME}, so it is unfinished or no dataset; finish its build, or make one "
        "of MLPerf's or Graphcore's files with `packhorse data import`"
    )


def _check_format(fields: dict[str, Any], path: Path) -> None:
    number = fields.get("format")
    if type(number) is not int or number < 1:
        raise InputError(f"{path} has no format number: it is not a manifest of packed rows")
    if number > FORMAT:
        newer = str(fields.get("written_by", "of a later date"))[:20]
        raise InputError(
            f"{path} is of format {number}, written by Packhorse {newer}; this is Packhorse"
            f" {__version__} and reads format {FORMAT}: install packhorse>={newer}"
        )
    if number < FORMAT:
        raise InputError(
            f"{path} is of format {number}, which lacks information that loading needs; this"
            f" Packhorse reads format {FORMAT}: {AGAIN}"
        )


def _manifest(fields: dict[str, Any], place: str) -> Manifest:
    depth = fields["max_per_pack"]
    layout = RowLayout(
        _count(fields, "capacity"),
        _count(fields, "vocab_size"),
        None if depth is None else _count(fields, "max_per_pack"),
        _field(fields, "static_masks", bool),
        _field(fields, "next_sentence", bool),
    )
    histogram = _field(fields, "histogram", list)
    return Manifest(
        layout,
        _specials(_field(fields, "specials", dict), layout.vocab_size),
        tuple(_count({"histogram": count}, "histogram", least=0) for count in histogram),
        tuple(_shard(shard, place) for shard in _field(fields, "shards", list)),
        _field(fields, "config", dict),
        Recipe() if layout.static_masks else _masking(_field(fields, "masking", dict)),
    )


def _shard(fields: Any, place: str) -> ShardInfo:
    name = _field(fields, "name", str)
    if not SHARD_NAME.fullmatch(name):
        raise InputError(f"{place} names {name!r:.60}: not a plain name of a shard; {AGAIN}")
    counts = (_count(fields, key) for key in ("rows", "sequences", "tokens", "bytes"))
    return ShardInfo(name, *counts, crc32c=int(_field(fields, "crc32c", str), 16))


def _field(fields: Any, key: str, kind: type) -> Any:
    """The value of a key, which must be of exactly this type."""
    value = fields[key]
    # Compared by `type`, because True is an instance of int.
    if type(value) is not kind:
        raise TypeError(f"{key!r} is {value!r:.40}, not of type {kind.__name__}")
    return value


def _count(fields: Any, key: str, least: int = 1) -> int:
    value = _field(fields, key, int)
    if not least <= value < 1 << 63:
        raise ValueError(f"{key!r} is {value}")
    return value


def _check(manifest: Manifest, path: Path) -> None:
    """Refuse a manifest that contradicts itself."""
    counts = np.array(manifest.histogram, dtype=object)
    lengths = np.arange(1, len(counts) + 1)
    names = [shard.name for shard in manifest.shards]
    problems = {
        "it has no rows": not names,
        "two shards have one name": len(set(names)) < len(names),
        "the histogram counts other sequences than the shards": counts.sum() != manifest.sequences,
        "the histogram counts other tokens": (counts * lengths).sum() != manifest.tokens,
        "a sequence is longer than a row": len(counts) > manifest.layout.capacity,
        "more tokens than slots": manifest.tokens > manifest.rows * manifest.layout.capacity,
    }
    for problem, present in problems.items():
        if present:
            raise InputError(f"{path} contradicts itself: {problem}; {AGAIN}")


def _specials_json(specials: Specials) -> dict[str, Any]:
    fields: dict[str, Any] = {name: int(getattr(specials, name)) for name in IDS}
    if specials.continues is not None:
        # One bit per token of the vocabulary: does it continue a word (## in WordPiece)?
        fields["continues"] = base64.b64encode(np.packbits(specials.continues).tobytes()).decode()
    return fields


def _specials(fields: dict[str, Any], vocab_size: int) -> Specials:
    ids = {name: _count(fields, name, least=0) for name in IDS}
    if max(ids.values()) >= vocab_size:
        raise ValueError(f"a special token is outside the vocabulary of {vocab_size}: {ids}")
    continues = None
    if "continues" in fields:
        packed = np.frombuffer(
            base64.b64decode(_field(fields, "continues", str), validate=True), "u1"
        )
        if len(packed) != -(-vocab_size // 8):
            raise ValueError(f"'continues' is not for a vocabulary of {vocab_size}")
        continues = np.unpackbits(packed, count=vocab_size).astype(bool)
    return Specials(**ids, vocab_size=vocab_size, continues=continues)


def _masking_json(manifest: Manifest) -> dict[str, Any] | None:
    if manifest.layout.static_masks:
        return None
    return {name: getattr(manifest.masking, name) for name in MASKING}


def _masking(fields: dict[str, Any]) -> Recipe:
    max_predictions = fields["max_predictions"]
    try:
        return Recipe(
            mask_probability=_field(fields, "mask_probability", float),
            max_predictions=None if max_predictions is None else _count(fields, "max_predictions"),
            whole_words=_field(fields, "whole_words", bool),
        )
    except InputError as error:  # the caller adds the path
        raise ValueError(error) from error
