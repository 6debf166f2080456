"""What a folder of packed rows says about itself: manifest.json.

It is written last and whole, so a folder without one is unfinished, and it names every shard with
its counts, size and crc32c, so that nothing in the folder is taken on trust. Sums (rows, sequences,
tokens, efficiency) stand in it for the reader's eye; they follow from the shards and the histogram
and are checked against them. `masking` is how the maker wants tokens masked where they are not
stored so; whoever loads the rows may do otherwise. `config` is whatever the maker wants to keep,
and decides nothing.

The format's number grows only when an older Packhorse would misread a folder; it then refuses and
names the version that wrote it.
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
from packhorse.data.packed.packs import Layout
from packhorse.errors import InputError

FORMAT = 2  # 1 did not say how to mask, nor whether there are second segments
NAME = "manifest.json"
LARGEST = 64 << 20  # bytes of manifest; 400,000 shards fit
AGAIN = "build or import it again"
SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.arrow", re.ASCII)
LEFT_BEHIND = re.compile(r"shard-\d+\.arrow|\.shard-\d+\.arrow\.\w+\.partial", re.ASCII)
IDS = ("cls", "sep", "mask", "pad")
MASKING = ("mask_probability", "max_predictions", "whole_words")  # of a Recipe, all that counts


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One file of rows, and how to tell that it is whole."""

    name: str
    rows: int
    sequences: int
    tokens: int
    bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that is known of a dataset without opening its shards."""

    layout: Layout
    specials: Specials
    histogram: tuple[int, ...]  # entry i counts the sequences of length i+1
    shards: tuple[ShardInfo, ...]
    config: dict[str, Any]
    masking: Recipe = Recipe()  # noqa: RUF009 (frozen); means nothing where masks are stored

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
        """The share of all places that hold a token."""
        return self.tokens / (self.rows * self.layout.capacity)

    @property
    def fingerprint(self) -> str:
        """The same for two folders if and only if they give the same batches."""
        shards = [(shard.rows, shard.bytes, shard.crc32c) for shard in self.shards]
        told = _specials_json(self.specials), _masking_json(self)
        decides = [asdict(self.layout), *told, shards]
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make the folder a dataset: its shards are there already, and no one writes to it any more.

    Shards that an unfinished attempt left behind go.
    """
    _check(manifest, folder / NAME)
    _sweep(folder, {shard.name for shard in manifest.shards})
    told = {"format": FORMAT, "written_by": __version__, **asdict(manifest.layout)}
    told |= _sums(manifest)
    told["specials"] = _specials_json(manifest.specials)
    told["masking"] = _masking_json(manifest)
    told["shards"] = [asdict(s) | {"crc32c": f"{s.crc32c:08x}"} for s in manifest.shards]
    told["config"] = manifest.config
    told["histogram"] = list(manifest.histogram)
    lines = (f" {json.dumps(key)}: {_json(value)}" for key, value in told.items())
    with new_file(folder / NAME) as file:
        file.write(("{\n" + ",\n".join(lines) + "\n}\n").encode())


def _sweep(folder: Path, wanted: set[str]) -> None:
    for path in folder.iterdir():
        if path.name not in wanted and LEFT_BEHIND.fullmatch(path.name):
            path.unlink()


def read_manifest(folder: Path) -> Manifest:
    """What the folder says of itself, if it is finished and of a format that is known here."""
    path = folder / NAME
    told = _parsed(folder, path)
    _refuse_other_format(told, path)
    try:
        manifest = _manifest(told, str(path))
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is damaged: {error}; {AGAIN}") from error
    _check(manifest, path)
    for key, value in _sums(manifest).items():
        if told.get(key) != value:
            raise InputError(
                f"{path} contradicts itself: {key} is {told.get(key)!r:.40}, but its shards make"
                f" {value}; it was edited or damaged; {AGAIN}"
            )
    return manifest


def _json(value: Any) -> str:
    """A line for each shard; all else on the line of its key."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"
    return json.dumps(value)


def _sums(manifest: Manifest) -> dict[str, int | float]:
    sums = {name: getattr(manifest, name) for name in ("rows", "sequences", "tokens")}
    return sums | {"efficiency": round(manifest.efficiency, 6)}


def _parsed(folder: Path, path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
    except FileNotFoundError as error:
        raise InputError(_why_none(folder)) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        told = json.loads(text[:LARGEST])
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {error}; {AGAIN}") from error
    if not isinstance(told, dict):
        raise InputError(f"{path} is not a manifest of packed rows; {AGAIN}")
    return told


def _why_none(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder of packed rows; name one that was built or imported"
    inside = sorted(path.parent.name for path in folder.glob(f"*/{NAME}"))
    if inside:
        return f"{folder} is no dataset, but holds some: {', '.join(inside)[:80]}; name one of them"
    return (
        f"{folder} has no {NAME}, so it is unfinished or no dataset; finish its build, or make one "
        "of MLPerf's or Graphcore's files with `packhorse data import`"
    )


def _refuse_other_format(told: dict[str, Any], path: Path) -> None:
    number = told.get("format")
    if type(number) is not int or number < 1:
        raise InputError(f"{path} has no format number: it is not a manifest of packed rows")
    if number > FORMAT:
        newer = str(told.get("written_by", "of a later date"))[:20]
        raise InputError(
            f"{path} is of format {number}, written by Packhorse {newer}; this is Packhorse"
            f" {__version__} and reads format {FORMAT}: install packhorse>={newer}"
        )
    if number < FORMAT:
        raise InputError(
            f"{path} is of format {number}, which says too little to load from; this Packhorse"
            f" reads format {FORMAT}: {AGAIN}"
        )


def _manifest(told: dict[str, Any], where: str) -> Manifest:
    depth = told["max_per_pack"]
    layout = Layout(
        _count(told, "capacity"),
        _count(told, "vocab_size"),
        None if depth is None else _count(told, "max_per_pack"),
        _of(told, "static_masks", bool),
        _of(told, "next_sentence", bool),
    )
    histogram = _of(told, "histogram", list)
    return Manifest(
        layout,
        _specials(_of(told, "specials", dict), layout.vocab_size),
        tuple(_count({"histogram": count}, "histogram", least=0) for count in histogram),
        tuple(_shard(each, where) for each in _of(told, "shards", list)),
        _of(told, "config", dict),
        Recipe() if layout.static_masks else _masking(_of(told, "masking", dict)),
    )


def _shard(told: Any, where: str) -> ShardInfo:
    name = _of(told, "name", str)
    if not SHARD_NAME.fullmatch(name):
        raise InputError(f"{where} names {name!r:.60}: not a plain name of a shard; {AGAIN}")
    counts = (_count(told, key) for key in ("rows", "sequences", "tokens", "bytes"))
    return ShardInfo(name, *counts, crc32c=int(_of(told, "crc32c", str), 16))


def _of(holder: Any, key: str, kind: type) -> Any:
    found = holder[key]
    # `type`, because True is an int as well.
    if type(found) is not kind:
        raise TypeError(f"{key!r} is {found!r:.40}, not of type {kind.__name__}")
    return found


def _count(holder: Any, key: str, least: int = 1) -> int:
    found = _of(holder, key, int)
    if not least <= found < 1 << 63:
        raise ValueError(f"{key!r} is {found}")
    return found


def _check(manifest: Manifest, path: Path) -> None:
    """What no maker writes and no reader can work with."""
    counts = np.array(manifest.histogram, dtype=object)
    lengths = np.arange(1, len(counts) + 1)
    names = [shard.name for shard in manifest.shards]
    trouble = {
        "it has no rows": not names,
        "two shards have one name": len(set(names)) < len(names),
        "the histogram counts other sequences than the shards": counts.sum() != manifest.sequences,
        "the histogram counts other tokens": (counts * lengths).sum() != manifest.tokens,
        "a sequence is longer than a row": len(counts) > manifest.layout.capacity,
        "more tokens than places": manifest.tokens > manifest.rows * manifest.layout.capacity,
    }
    if found := [what for what, is_so in trouble.items() if is_so]:
        raise InputError(f"{path} contradicts itself: {found[0]}; {AGAIN}")


def _specials_json(specials: Specials) -> dict[str, Any]:
    told: dict[str, Any] = {name: int(getattr(specials, name)) for name in IDS}
    if specials.continues is not None:
        told["continues"] = base64.b64encode(np.packbits(specials.continues).tobytes()).decode()
    return told


def _specials(told: dict[str, Any], vocab_size: int) -> Specials:
    ids = {name: _count(told, name, least=0) for name in IDS}
    if max(ids.values()) >= vocab_size:
        raise ValueError(f"a special token is outside the vocabulary of {vocab_size}: {ids}")
    continues = None
    if "continues" in told:
        packed = np.frombuffer(base64.b64decode(_of(told, "continues", str), validate=True), "u1")
        if len(packed) != -(-vocab_size // 8):
            raise ValueError(f"'continues' is not for a vocabulary of {vocab_size}")
        continues = np.unpackbits(packed, count=vocab_size).astype(bool)
    return Specials(**ids, vocab_size=vocab_size, continues=continues)


def _masking_json(manifest: Manifest) -> dict[str, Any] | None:
    if manifest.layout.static_masks:
        return None
    return {name: getattr(manifest.masking, name) for name in MASKING}


def _masking(told: dict[str, Any]) -> Recipe:
    most = told["max_predictions"]
    try:
        return Recipe(
            mask_probability=_of(told, "mask_probability", float),
            max_predictions=None if most is None else _count(told, "max_predictions"),
            whole_words=_of(told, "whole_words", bool),
        )
    except InputError as error:  # it does not say where
        raise ValueError(error) from error
