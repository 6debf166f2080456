"""Sources to packed shards: the driver of the corpus builder.

    build(Config((Path("enwiki.xml.bz2"),), Path("corpus"), Path("vocab.txt")))

Chunks of the sources become parts (`parts.work`), parts become groups with a plan, groups become
shards (`planning`), and with a manifest OUT is whole. Each step is a plain function that makes one
file, whole or not at all, from what lies on the disk; this module only says which are to be called
and leaves the calling to an engine. So a build can be killed anywhere and run again, on any number
of workers, and the result is the same, byte for byte. The price is disk: parts and shards are there
together at the end, about twice the size of the result.

Input that cannot be used is counted, and more of it than `max_bad` ends the build: nothing is
dropped silently.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from packhorse.atomic import new_file
from packhorse.data.corpus import fingerprint
from packhorse.data.corpus.cluster import ray_cluster
from packhorse.data.corpus.parts import (
    EVAL_PART,
    HASHES,
    TOKENIZER,
    Found,
    Piece,
    counts,
    eval_folder,
    found_in,
    make_eval,
    part_path,
    pieces,
    read_hashes,
    special_tokens,
    work,
)
from packhorse.data.corpus.planning import GROUP, grouped, pack, plan_group
from packhorse.data.corpus.workers import GO_ON, Engine, Run, local
from packhorse.data.corpus.workfolder import claim, publish, refuse_depth, refuse_inside
from packhorse.data.packed.manifest import Manifest, ShardInfo, read_manifest, write_manifest
from packhorse.data.packed.masking import Recipe, specials_of
from packhorse.data.packed.packs import Layout
from packhorse.data.packed.shards import SHARD_BYTES, rows_a_shard, shard_name
from packhorse.data.sources.chunking import BZ2_RATIO
from packhorse.data.sources.documents import CHUNK_BYTES, Chunk, Source, chunks, find
from packhorse.errors import InputError
from packhorse.tokens import Tokenizer
from packhorse.tokens import files as tokenizer_files

ENGINES = ("local", "ray")
EVAL_COUNT = 10_000  # MLPerf's


@dataclass(frozen=True, slots=True)
class Config:
    """What to build, of what, and how."""

    sources: tuple[Path, ...]
    out: Path
    tokenizer: Path  # vocab.txt, tokenizer.json, or a folder with one of them
    recipe: Recipe = Recipe()  # noqa: RUF009 (frozen)
    max_per_pack: int | None = 3  # sequences a row; None: as many as fit
    kind: str | None = None  # of the sources; None: told by each
    column: str | None = None
    eval_hashes: Path | None = None
    eval_count: int = EVAL_COUNT
    max_bad: int = 0
    chunk_bytes: int = CHUNK_BYTES
    shard_bytes: int = SHARD_BYTES
    group: int = GROUP  # sequences that are planned together, about
    overwrite: bool = False
    engine: str = "local"  # or "ray"
    workers: int | None = None  # None: one for each core
    ray_address: str | None = None  # of a cluster; None: Ray is started here


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a build is; `done` and `total` are bytes of the sources, then plans, then shards."""

    stage: str  # "reading", "planning", "writing"
    done: int
    total: int
    found: Found
    megabytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Built:
    """What a build made."""

    train: Manifest
    eval: Manifest | None
    already: bool = False  # by an earlier run, of the same


Watch = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class _Site:
    """What every step of one build needs."""

    config: Config
    made_by: dict[str, Any]
    folder: Path
    run: Run
    watch: Watch


@dataclass(frozen=True, slots=True)
class _Split:
    """The parts of one of the two datasets."""

    name: str
    home: Path  # where it is made
    parts: Sequence[Path]
    found: Sequence[Found]
    recipe: Recipe
    facts: dict[str, int]


def build(config: Config, watch: Watch = lambda progress: None) -> Built:
    """Build the dataset, or the rest of it; `watch` is told how far it is."""
    sources = _sources(config)
    stamps = fingerprint.stamps(sources)
    made_by = _made_by(config, fingerprint.of_sources(sources, stamps))
    begun_by = _begun_by(made_by)
    with claim(config.out, made_by, config.overwrite, begun_by, stamps) as folder:
        if folder is not None:
            folder = folder.absolute()  # for who works elsewhere
            with _kept(), _engine(config, folder, sources) as run:
                _make(_Site(config, made_by, folder, run, watch), sources)
                publish(folder, config.out, eval_folder(folder, config.eval_count))
        eval = read_manifest(config.out / "eval") if config.eval_hashes else None
        return Built(read_manifest(config.out / "train"), eval, already=folder is None)


def _sources(config: Config) -> list[Source]:
    """The files to read; what cannot be meant is refused before anything is made."""
    if config.engine not in ENGINES:
        raise InputError(f"there is no engine {config.engine!r}; use {' or '.join(ENGINES)}")
    if config.ray_address and config.engine != "ray":
        raise InputError("--ray-address is for --engine ray")
    least = dict.fromkeys(("eval_count", "chunk_bytes", "shard_bytes", "group"), 1)
    for name, bound in (least | {"max_bad": 0}).items():
        if getattr(config, name) < bound:
            raise InputError(f"{name} is {getattr(config, name)}; it must be {bound} or more")
    refuse_depth(config.max_per_pack)
    refuse_inside(config.out, config.sources)
    sources, out = find(config.sources, config.kind, config.column), config.out.resolve()
    for source in sources:
        if source.path.resolve().is_relative_to(out):
            raise InputError(f"{source.path} lies in {config.out}; build into another folder")
    return [replace(source, path=source.path.absolute()) for source in sources]


def _engine(config: Config, folder: Path, sources: Sequence[Source]) -> Engine:
    if config.engine == "local":
        return local(config.workers)
    reads = {source.path: source.size for source in sources}
    return ray_cluster(folder, reads, config.ray_address, config.workers)


def _made_by(config: Config, sources: dict[str, object]) -> dict[str, Any]:
    """All that decides the result."""
    specials = specials_of(Tokenizer.load(config.tokenizer))
    if config.recipe.whole_words and specials.continues is None:
        raise InputError(f"{config.tokenizer} has no ## pieces, so whole_words means nothing")
    held_out = None
    if config.eval_hashes:
        held_out = {
            "hashes": len(read_hashes(config.eval_hashes)),
            "count": config.eval_count,
            "sha256": fingerprint.of_files([config.eval_hashes]),
        }
    return {
        "sources": sources,
        "tokenizer": fingerprint.of_files(tokenizer_files.all_files(config.tokenizer).values()),
        "recipe": asdict(config.recipe),
        "max_per_pack": config.max_per_pack,
        "eval": held_out,
        "chunk_bytes": config.chunk_bytes,
        "shard_bytes": config.shard_bytes,
        "group": config.group,
        "versions": fingerprint.of_libraries(),
    }


def _begun_by(made_by: dict[str, Any]) -> dict[str, Any]:
    """What decides the parts: how many held-out sequences are wanted can be changed on the way."""
    held_out = made_by["eval"]
    return made_by | {"eval": held_out and {**held_out, "count": None}}


def _make(site: _Site, sources: Sequence[Source]) -> None:
    """Everything into the work folder."""
    config, folder = site.config, site.folder
    for name, path in tokenizer_files.all_files(config.tokenizer).items():
        _copy(path, folder / TOKENIZER / name)
    if config.eval_hashes:
        _copy(config.eval_hashes, folder / HASHES)
    found = _read(site, sources)
    total = sum(found, Found())
    if not total.sequences:
        raise InputError(
            f"nothing to learn from in the sources: {total.documents:,} documents, of which"
            f" {total.held_out:,} are held out; {total.redirects:,} redirects,"
            f" {total.not_articles:,} pages that are no articles, {total.empty:,} without text"
        )
    parts = [part_path(folder, number) for number in range(len(found))]
    if config.eval_hashes:
        _refuse_unmatched(config.eval_hashes, total)
        home = eval_folder(folder, config.eval_count)
        home.mkdir(exist_ok=True)
        recipe = replace(config.recipe, static_masks=True)
        held = [*site.run(make_eval, [(parts, config.eval_count, recipe, folder)])]
        facts = {"documents": total.held_out}
        _pack(site, _Split("eval", home, [home / EVAL_PART], held, recipe, facts))
    _pack(site, _Split("train", folder, parts, found, config.recipe, counts(total)))


def _refuse_unmatched(hashes: Path, total: Found) -> None:
    if not total.held_out:
        raise InputError(
            f"none of the {len(read_hashes(hashes)):,} hashes of {hashes} is that of one of the"
            f" {total.documents:,} documents; a hash fits only the very text that it was made of"
            " (MLPerf's list fits MLPerf's own text alone); leave --eval-hashes out, or name hashes"
            " of these documents"
        )


def _read(site: _Site, sources: Sequence[Source]) -> list[Found]:
    """What the parts hold, in their order."""
    found: dict[int, Found] = {}
    total, size = Found(), sum(source.size for source in sources)
    start, done, fresh = time.perf_counter(), 0, 0

    def take(part: _Part) -> None:
        nonlocal total, done, fresh
        found[part.number] = part.found
        total += part.found
        done, fresh = done + part.bytes, fresh + part.made_now * part.bytes
        speed = fresh / 1e6 / (time.perf_counter() - start)
        site.watch(Progress("reading", done, size, total, speed))
        if total.bad > site.config.max_bad:
            _refuse_bad(sum((found[number] for number in sorted(found)), Found()), done < size)

    asked: deque[tuple[int, int]] = deque()
    for each in site.run(work, _missing(site, sources, asked, take)):
        take(_Part(*asked.popleft(), each, True))
    return [found[number] for number in range(len(found))]


class _Part(NamedTuple):
    number: int
    bytes: int  # of the sources
    found: Found
    made_now: bool


def _missing(
    site: _Site,
    sources: Sequence[Source],
    asked: deque[tuple[int, int]],
    take: Callable[[_Part], None],
) -> Iterator[tuple[Piece, Recipe, Path]]:
    """The pieces whose part is to be made; one that is there is taken at once, not in its turn."""
    config, left = site.config, {}
    for piece in pieces(chunks(sources, config.chunk_bytes), config.chunk_bytes):
        path = part_path(site.folder, piece.number)
        size = sum(_bytes_of(chunk, left, config.chunk_bytes) for chunk in piece.chunks)
        if path.exists():
            take(_Part(piece.number, size, found_in(path), False))
        else:
            asked.append((piece.number, size))
            yield piece, config.recipe, site.folder


def _bytes_of(chunk: Chunk, left: dict[Path, int], size: int) -> int:
    """What a chunk is of the sources: guessed if it counts otherwise, made good by the last."""
    have = left.setdefault(chunk.source.path, chunk.source.size)
    guess = chunk.end - chunk.begin
    if chunk.counts_rows:
        guess = size
    elif chunk.data is not None:
        guess //= BZ2_RATIO
    taken = have if chunk.last else min(guess, have)
    left[chunk.source.path] -= taken
    return taken


def _refuse_bad(found: Found, so_far: bool) -> None:
    """Nothing is dropped silently."""
    places = "; ".join(f"{where}: {why}" for where, why in found.places)
    more = f"; and {found.bad - len(found.places):,} more" * (found.bad > len(found.places))
    raise InputError(
        f"{found.bad:,} documents or places{' so far' * so_far} cannot be used: {places}{more};"
        f" mend them, or pass --max-bad {found.bad} (or more) to leave them out"
    )


def _pack(site: _Site, split: _Split) -> None:
    """Parts into the dataset of that name."""
    specials, longest = special_tokens(site.folder), split.recipe.max_length
    depth, static = site.config.max_per_pack, split.recipe.static_masks
    layout = Layout(longest, specials.vocab_size, depth, static, split.recipe.next_sentence)
    groups = grouped(
        split.parts,
        [each.sequences for each in split.found],
        lambda number: split.home / f"{split.name}-plan-{number:05d}.arrow",
        split.recipe.seed,
        site.config.group,
    )
    items = ((group, longest, depth) for group in groups)
    plans = _watched(site, "planning", split, site.run(plan_group, items), len(groups))
    histogram = tuple(map(sum, zip(*(plan["histogram"] for plan in plans), strict=True)))
    size = rows_a_shard(layout, site.config.shard_bytes)
    pieces = [
        (group, range(begin, min(begin + size, plan["rows"])))
        for group, plan in zip(groups, plans, strict=True)
        for begin in range(0, plan["rows"], size)
    ]
    target = split.home / split.name
    target.mkdir(exist_ok=True)
    items = (
        (*piece, layout, target / shard_name(n), split.home / f"{split.name}-{n:05d}.json")
        for n, piece in enumerate(pieces)
    )
    infos: list[ShardInfo] = _watched(site, "writing", split, site.run(pack, items), len(pieces))
    bound = sum(plan["lower_bound"] for plan in plans)
    config = {"made_by": site.made_by, "found": split.facts, "lower_bound": bound}
    told = layout, specials, histogram, tuple(infos), config, split.recipe
    write_manifest(target, Manifest(*told))


def _watched(
    site: _Site, stage: str, split: _Split, results: Iterator[Any], total: int
) -> list[Any]:
    """All results; whoever watches sees them come."""
    done, found = [], sum(split.found, Found())
    for result in results:
        done.append(result)
        site.watch(Progress(f"{stage} {split.name}", len(done), total, found))
    return done


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    with source.open("rb") as there, new_file(target) as file:
        shutil.copyfileobj(there, file)


@contextmanager
def _kept() -> Iterator[None]:
    """Where the disk was the trouble, say that nothing is lost."""
    try:
        yield
    except InputError as error:
        if not isinstance(error.__cause__, OSError) or GO_ON in str(error):
            raise
        raise InputError(f"{error}; {GO_ON}") from error
