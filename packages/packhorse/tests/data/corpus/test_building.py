"""Building a corpus: every format, any number of workers, and whatever can go wrong on the way."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from packhorse.data.corpus import arrays, workfolder
from packhorse.data.corpus.building import BuildOptions, CorpusProgress, build, pieces
from packhorse.data.packed import shards
from packhorse.data.packed.loader import Loader
from packhorse.data.packed.masking import Recipe
from packhorse.data.sources.chunking import chunks
from packhorse.data.sources.files import find
from packhorse.errors import InputError
from packhorse.tokens import Tokenizer

from .. import corpora
from ..corpora import documents, md5, sequences_of, tree, write_source

pytest.importorskip("pyarrow", reason="no pyarrow: pip install 'packhorse[data]'")
pytest.importorskip("nupunkt", reason="no nupunkt: pip install 'packhorse[data]'")

CORPUS = documents(120)
SMALL = {"chunk_bytes": 4000, "shard_bytes": 4000, "group": 100, "workers": 1}


class Stop(Exception):
    """Thrown by who watches, in the middle of a build."""


def stop_after(number: int, stage: str = "reading"):
    """Watch so many steps of a stage, and throw."""
    seen = 0

    def watch(progress: CorpusProgress) -> None:
        nonlocal seen
        seen += progress.stage.startswith(stage)
        if seen >= number:
            raise Stop

    return watch


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary and a corpus."""
    folder = tmp_path_factory.mktemp("home")
    corpora.write_vocabulary(folder / "vocab.txt")
    write_source(folder / "source", CORPUS)
    return folder


@pytest.fixture
def config(home: Path, tmp_path: Path) -> BuildOptions:
    """Of the corpus, in several parts, groups and shards."""
    recipe = Recipe(max_length=64)
    return BuildOptions((home / "source",), tmp_path / "out", home / "vocab.txt", recipe, **SMALL)


@pytest.fixture(scope="module")
def whole(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What `config` builds when nothing disturbs it."""
    out = tmp_path_factory.mktemp("whole") / "out"
    build(BuildOptions((home / "source",), out, home / "vocab.txt", Recipe(max_length=64), **SMALL))
    return tree(out)


# What comes out --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", corpora.FORMATS)
def test_every_format(kind: str, home: Path, tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", CORPUS[:40], kind)
    column = "body" if kind == "parquet" else None
    recipe = Recipe(max_length=64)
    out = tmp_path / "out"
    config = BuildOptions((source,), out, home / "vocab.txt", recipe, column=column, workers=1)
    steps: list[CorpusProgress] = []
    built = build(config, steps.append)
    result = built.train.config["found"]
    assert (result["documents"], result["bad"]) == (40, 0)
    assert result["sentences"] == sum(map(len, CORPUS[:40]))
    assert {path.name for path in out.iterdir()} == {"train", "tokenizer"}
    assert {step.stage for step in steps} == {"reading", "planning train", "writing train"}
    assert all(step.done <= step.total for step in steps)
    assert steps[0].done == steps[0].total == source.stat().st_size
    words = {token for ids, *_ in sequences_of(out / "train") for token in ids}
    tokenizer = Tokenizer.load(out / "tokenizer")
    assert {tokenizer.id(corpora.own_word(n)) for n in range(40)} <= words
    assert not built.already and built.eval is None


def test_no_sequence_is_lost_or_doubled(config: BuildOptions) -> None:
    """What lies in the parts before packing is what lies in the shards after it."""
    before: Counter[corpora.Known] = Counter()

    def watch(progress: CorpusProgress) -> None:
        if progress.stage == "writing train" and not before:
            for part in sorted(config.out.glob(".build/*/part-*.arrow")):
                before.update(_sequences_in(part))

    built = build(config, watch)
    assert sum(before.values()) == built.train.sequences > 200
    assert sequences_of(config.out / "train") == before
    assert len(built.train.shards) > 3
    assert built.train.config["lower_bound"] <= built.train.rows
    item = next(iter(before))
    assert sequences_of(config.out / "train") != before - Counter([item])  # it would be seen


def _sequences_in(part: Path) -> Counter[corpora.Known]:
    held, _ = arrays.read(part)
    ends = np.cumsum(held["lengths"], dtype=np.int64)
    return Counter(
        (tuple(held["ids"][end - length : end].tolist()), int(first), int(label))
        for end, length, first, label in zip(
            ends, held["lengths"], held["first"], held["random_next"], strict=True
        )
    )


def test_groups_cost_nothing_but_a_little_room(config: BuildOptions) -> None:
    several = build(config).train
    item = build(replace(config, group=1 << 20, overwrite=True)).train
    assert sequences_of(config.out / "train") and item.sequences == several.sequences
    assert item.rows <= several.rows <= 1.1 * item.rows


def test_a_loader_reads_all_of_it(config: BuildOptions) -> None:
    built = build(config).train
    dataset = shards.open_dataset(config.out / "train")
    batches = [*Loader(dataset, rows=8, epochs=1, masking=config.recipe)]
    assert sum(batch.sequences for batch in batches) == built.sequences
    assert sum(batch.tokens for batch in batches) == built.tokens
    masked = sum(len(batch.masked_at) for batch in batches)
    assert masked == pytest.approx(0.15 * built.tokens, rel=0.1)
    random_next = sum(int(batch.next_labels.sum()) for batch in batches)
    assert random_next == sum(label for *_, label in sequences_of(dataset.folder).elements())


def test_small_files_share_a_piece(home: Path, tmp_path: Path) -> None:
    """A document a file: without other documents there would be no random next sentence."""
    (tmp_path / "source").mkdir()
    for number, document in enumerate(CORPUS[:50]):
        (tmp_path / "source" / f"{number:03d}.txt").write_text(" ".join(document))
    sources = find([tmp_path / "source"])
    created = [*pieces(chunks(sources, 4000), 4000)]
    assert 1 < len(created) < 20
    assert [piece.number for piece in created] == [*range(len(created))]
    assert [chunk.number for piece in created for chunk in piece.chunks] == [*range(50)]
    config = BuildOptions((tmp_path / "source",), tmp_path / "out", home / "vocab.txt", **SMALL)
    built = build(replace(config, recipe=Recipe(max_length=64)))
    labels = [label for _, _, label in sequences_of(tmp_path / "out" / "train").elements()]
    assert built.train.config["found"]["documents"] == 50
    assert 0.2 < sum(labels) / len(labels) < 0.8


# Held-out documents ----------------------------------------------------------------------------


@pytest.fixture
def held_out(config: BuildOptions, tmp_path: Path) -> BuildOptions:
    """Every fourth document is for evaluation."""
    path = tmp_path / "eval.md5"
    path.write_text("".join(f"{md5(document)}  x.txt\n" for document in CORPUS[::4]))
    return replace(config, eval_hashes=path, eval_count=25)


def test_exactly_so_many_are_held_out_and_none_is_seen_in_training(held_out: BuildOptions) -> None:
    built = build(held_out)
    assert built.eval is not None
    assert built.eval.sequences == 25 and built.eval.layout.static_masks
    assert built.train.config["found"]["held_out"] == 30 == built.eval.config["found"]["documents"]
    tokenizer = Tokenizer.load(held_out.out / "tokenizer")
    unique_ids = [tokenizer.id(corpora.own_word(number)) for number in range(120)]
    seen = {id for ids, *_ in sequences_of(held_out.out / "train") for id in ids}
    assert (
        not seen & {*unique_ids[::4]} and {id for i, id in enumerate(unique_ids) if i % 4} <= seen
    )
    dataset = shards.open_dataset(held_out.out / "eval", verify=True)
    rows = dataset.take(range(len(dataset)))
    assert rows.masked_ids is not None and len(rows.masked_ids) > 25
    words = {*rows.ids.tolist(), *rows.masked_ids.tolist()} & {*unique_ids}
    # A token may be exchanged for any word; the sequences come from many of the documents.
    assert len(words & {*unique_ids[::4]}) > 10 > len(words - {*unique_ids[::4]})


@pytest.mark.parametrize("static", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_any_number_of_workers_gives_the_same_bytes(static: bool, held_out: BuildOptions) -> None:
    recipe = replace(held_out.recipe, static_masks=static, duplicates=2)
    trees = []
    for workers in (1, 2):
        out = held_out.out.with_name(f"of-{workers}")
        build(replace(held_out, recipe=recipe, out=out, workers=workers))
        trees.append(tree(out))
    assert trees[0] == trees[1]
    second = replace(held_out, recipe=replace(recipe, seed=7), out=out, overwrite=True)
    build(second)
    for name in ("train/shard-00000.arrow", "eval/shard-00000.arrow"):
        assert tree(out)[name] != trees[0][name]


def test_too_few_are_an_error_that_counts_them(held_out: BuildOptions) -> None:
    with pytest.raises(InputError, match=r"make [\d,]+ sequences, but --eval-count is 5,000"):
        build(replace(held_out, eval_count=5000))
    parts = {path: path.stat().st_ino for path in held_out.out.glob(".build/*/part-*.arrow")}
    assert len(parts) > 3
    with pytest.raises(Stop):  # another count goes on, and changes its mind in the middle
        build(replace(held_out, eval_count=7), stop_after(1, "writing eval"))
    assert all(path.stat().st_ino == number for path, number in parts.items())
    built = build(replace(held_out, eval_count=3), stop_after(10**6))
    assert built.eval is not None and built.eval.sequences == 3
    build(fresh := replace(held_out, eval_count=3, out=held_out.out.with_name("fresh")))
    assert tree(held_out.out) == tree(fresh.out)
    with pytest.raises(InputError, match=r"made with another eval.count \(3, now 7\)"):
        build(replace(held_out, eval_count=7))


def test_hashes_of_other_texts(held_out: BuildOptions) -> None:
    assert held_out.eval_hashes is not None
    held_out.eval_hashes.write_text(f"{'0' * 32}\n{'1' * 32}\n")
    with pytest.raises(InputError, match=r"none of the 2 hashes .* 120 documents.*MLPerf"):
        build(held_out)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no md5"),
        ("abc\n", "line 1"),
        (f"{'0' * 32}\n{'g' * 32}\n", "line 2"),
        ("\u00e9", "md5"),
    ],
)
def test_a_list_of_hashes_that_is_none(text: str, complaint: str, config: BuildOptions) -> None:
    path = config.out.with_name("eval.md5")
    path.write_text(text, "utf-8")
    with pytest.raises(InputError, match=complaint):
        build(replace(config, eval_hashes=path))
    assert not config.out.exists()


# Stopped and continued ---------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["reading", "planning", "writing"])
def test_what_is_done_is_not_done_again(stage: str, config: BuildOptions, whole: dict) -> None:
    with pytest.raises(Stop):
        build(config, stop_after(3, stage))
    remaining = {path: path.stat().st_ino for path in config.out.glob(".build/*/*.arrow")}
    assert len(remaining) >= 3 and not (config.out / "train").exists()
    checked = 0

    def watch(progress: CorpusProgress) -> None:
        nonlocal checked
        checked += 1
        assert all(path.stat().st_ino == number for path, number in remaining.items())

    build(config, watch)
    assert checked > 3
    assert tree(config.out) == whole


def test_what_is_there_is_reported_at_once(config: BuildOptions) -> None:
    """Before anything new is made, and as a share of all."""
    with pytest.raises(Stop):
        build(config, stop_after(4))
    there = len([*config.out.glob(".build/*/part-*.arrow")])
    steps: list[tuple[int, int]] = []

    def watch(progress: CorpusProgress) -> None:
        created = len([*config.out.glob(".build/*/part-*.arrow")])
        steps.append((created, progress.done))
        if len(steps) == there:
            raise Stop

    with pytest.raises(Stop):
        build(config, watch)
    assert {created for created, _ in steps} == {there} and there >= 4
    assert steps[-1][1] >= (there - 1) * config.chunk_bytes


def test_other_workers_may_go_on(config: BuildOptions, whole: dict) -> None:
    with pytest.raises(Stop):
        build(replace(config, workers=2), stop_after(2))
    build(config)
    assert tree(config.out) == whole


def command(config: BuildOptions, *more: object) -> list[str]:
    """`config` on the command line."""
    flags = {
        "tokenizer": config.tokenizer,
        "max-length": config.recipe.max_length,
        "chunk-bytes": config.chunk_bytes,
        "shard-bytes": config.shard_bytes,
        "workers": config.workers,
    }
    fields = [f"--{name}={value}" for name, value in flags.items()]
    words = ["data", "build", *config.sources, config.out, *fields, *more]
    return [sys.executable, "-m", "packhorse", *map(str, words)]


def run(config: BuildOptions, *more: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(config, *more), capture_output=True, text=True, **options)  # type: ignore[call-overload]


def kill_and_go_on(config: BuildOptions, times: int, seed: int) -> None:
    """Kill a build with two workers after a few files, again and again; then let it end."""
    config = replace(config, group=1 << 20)
    build(undisturbed := replace(config, out=config.out.with_name("undisturbed"), workers=1))
    rng, killed = random.Random(seed), 0
    while killed < times:
        with subprocess.Popen(
            command(replace(config, workers=2)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            until = _files(config.out) + rng.randint(0, 6)
            while process.poll() is None and _files(config.out) <= until:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.02))
            process.kill()
            message = process.stderr.read().decode() if process.stderr else ""
        if process.returncode == 0:
            shutil.rmtree(config.out)
        else:
            assert process.returncode == -signal.SIGKILL, message
            killed += 1
    build(config)
    assert tree(config.out) == tree(undisturbed.out)


def _files(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


def test_killed_at_random_and_continued(config: BuildOptions) -> None:
    kill_and_go_on(config, 2, seed=os.getpid())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_thirty_times(config: BuildOptions) -> None:
    kill_and_go_on(config, 30, seed=1)


# A process that kills itself at its n-th renaming of a file or folder, before or after it.
KILLER = """
import os, pathlib, shutil, signal, sys
at, after = int(sys.argv[1]), int(sys.argv[2])
steps = 0
def counted(function):
    def step(*given, **more):
        global steps
        steps += 1
        if steps == at and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*given, **more)
        if steps == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return step
for name in ("replace", "rename", "unlink", "mkdir"):
    setattr(pathlib.Path, name, counted(getattr(pathlib.Path, name)))
os.rmdir = counted(os.rmdir)
from packhorse.cli import main
code = main(sys.argv[3:])
print(steps)
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("after", [0, 1])
def test_killed_at_every_step(after: int, held_out: BuildOptions, tmp_path: Path) -> None:
    """Each step changes a name on the disk; nothing else can be seen of it from outside."""
    config = replace(held_out, chunk_bytes=20_000, shard_bytes=40_000, group=1 << 20)
    eval = (f"--eval-hashes={config.eval_hashes}", "--eval-count=25")
    undisturbed = replace(config, out=tmp_path / "undisturbed")
    counted = subprocess.run(
        [sys.executable, "-c", KILLER, "0", "0", *command(undisturbed, *eval)[3:]],
        capture_output=True,
        text=True,
    )
    steps = int(counted.stdout.splitlines()[-1])
    assert counted.returncode == 0 and steps > 30
    for at in range(1 + after, steps + 1, 2):  # half of them before, the others after
        killer = [sys.executable, "-c", KILLER, str(at), str(after), *command(config, *eval)[3:]]
        assert subprocess.run(killer, capture_output=True).returncode == -signal.SIGKILL
        assert (finished := run(config, *eval)).returncode == 0, finished.stderr
        assert tree(config.out) == tree(undisturbed.out), at
        shutil.rmtree(config.out)


def test_ctrl_c_keeps_what_is_done(config: BuildOptions, tmp_path: Path) -> None:
    corpus = documents(400)
    config = replace(config, sources=(write_source(tmp_path / "more", corpus, "jsonl"),), workers=2)
    process = subprocess.Popen(
        command(config), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    with process:
        for _ in range(6000):
            if [*config.out.glob(".build/*/part-*.arrow")]:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "run the same command to resume" in message and "Traceback" not in message
    assert [*config.out.glob(".build/*/part-*.arrow")]


# Refused -----------------------------------------------------------------------------------------


def test_two_builders_on_one_folder(config: BuildOptions, whole: dict) -> None:
    with (
        workfolder.claim(config.out, {"other": 1}) as folder,
        pytest.raises(InputError, match="being written by another process"),
    ):
        build(replace(config, overwrite=True))
    assert folder is not None and folder.exists()  # untouched
    build(replace(config, overwrite=True))
    assert tree(config.out) == whole


def test_the_first_ends_while_the_second_comes(
    config: BuildOptions, whole: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening the lock and having it, its folder is taken away."""
    real, calls = workfolder.lock, []

    def late(file: BinaryIO, path: Path) -> None:
        if not calls:
            shutil.rmtree(config.out / ".build")
        calls.append(path)
        real(file, path)

    monkeypatch.setattr(workfolder, "lock", late)
    build(config)
    assert len(calls) == 2 and tree(config.out) == whole


def test_another_config_is_refused_by_name(config: BuildOptions, home: Path) -> None:
    with pytest.raises(Stop):
        build(config, stop_after(2))
    second = replace(config, recipe=replace(config.recipe, seed=1))
    with pytest.raises(
        InputError, match=r"another recipe\.seed \(12345, now 1\); pass --overwrite"
    ):
        build(second)
    with pytest.raises(InputError, match="another chunk_bytes"):
        build(replace(config, chunk_bytes=5000))
    vocabulary = config.out.with_name("vocab.txt")
    vocabulary.write_text((home / "vocab.txt").read_text() + "more\n")
    with pytest.raises(InputError, match="another tokenizer"):
        build(replace(config, tokenizer=vocabulary))
    build(replace(second, overwrite=True))
    assert not (config.out / ".build").exists()
    with pytest.raises(InputError, match=r"was made with another recipe\.seed \(1, now 12345\)"):
        build(config)


def test_a_source_that_changes(config: BuildOptions, tmp_path: Path) -> None:
    source = write_source(tmp_path / "changing", CORPUS)
    config = replace(config, sources=(source,))
    with pytest.raises(Stop):
        build(config, stop_after(1))
    text = source.read_bytes()
    source.write_bytes(text[:9000] + b"x" + text[9001:])  # far from its ends, and as long
    with pytest.raises(InputError, match=rf"source {source.name} is not what .*--overwrite"):
        build(config)
    source.write_bytes(text)  # as it was, if at another time
    with pytest.raises(Stop):
        build(config, stop_after(1, "writing"))
    source.write_bytes(text[:9000] + b"x" + text[9001:])
    build(replace(config, overwrite=True))
    with pytest.raises(InputError, match=r"made with another sources\.sha256"):
        source.write_bytes(text)
        build(config)


def test_a_large_source_that_changes(
    config: BuildOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its edges are hashed, so on the way its time counts; in what is made it does not."""
    monkeypatch.setattr(workfolder, "EDGE_BYTES", 1000)
    source = write_source(tmp_path / "changing", CORPUS)
    config = replace(config, sources=(source,))
    with pytest.raises(Stop):
        build(config, stop_after(1))
    text = source.read_bytes()
    source.write_bytes(text[:9000] + b"x" + text[9001:])
    with pytest.raises(InputError, match=rf"source {source.name} is not what"):
        build(config)
    source.write_bytes(text)
    build(replace(config, overwrite=True))
    os.utime(source, (0, 0))
    assert build(config).already


def test_a_copy_of_the_sources_gives_the_same(
    config: BuildOptions, whole: dict, tmp_path: Path
) -> None:
    shutil.copytree(config.sources[0], tmp_path / "source", copy_function=shutil.copyfile)
    for path in (tmp_path / "source").iterdir():
        os.utime(path, (0, 0))
    build(replace(config, sources=(tmp_path / "source",)))
    assert tree(config.out) == whole


def test_built_already(config: BuildOptions, whole: dict) -> None:
    assert not build(config).already
    assert build(config, stop_after(1)).already
    assert tree(config.out) == whole
    (config.out / "train" / "shard-00000.arrow").write_bytes(b"damaged")
    assert not build(replace(config, overwrite=True)).already
    assert tree(config.out) == whole


def test_overwriting_leaves_the_old_until_the_new_is_whole(
    config: BuildOptions, whole: dict
) -> None:
    build(config)
    second = replace(config, recipe=replace(config.recipe, seed=1), overwrite=True)
    with pytest.raises(Stop):
        build(second, stop_after(2, "writing"))
    assert {n: b for n, b in tree(config.out).items() if not n.startswith(".build")} == whole
    build(second)
    assert not (config.out / ".build").exists() and tree(config.out) != whole
    shards.open_dataset(config.out / "train", verify=True)


@pytest.mark.parametrize("name", ["train", "eval", "tokenizer"])
def test_what_no_build_made_is_left_alone(name: str, config: BuildOptions) -> None:
    (config.out / name).mkdir(parents=True)
    (config.out / name / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="not from a build"):
        build(replace(config, overwrite=True))
    assert tree(config.out) == {f"{name}/mine.txt": b"mine"}


def test_places_that_cannot_be(config: BuildOptions, home: Path) -> None:
    with pytest.raises(InputError, match="lies in"):
        build(replace(config, out=home))
    for inside in (home / "source", home / "source" / "deep" / "out"):
        with pytest.raises(InputError, match=r"lies in the source folder .* outside"):
            build(replace(config, out=inside))
    assert [path.name for path in (home / "source").iterdir()] == ["part-00000-of-00001"]
    config.out.write_text("a file")
    with pytest.raises(InputError, match="cannot be written"):
        build(config)


@pytest.mark.parametrize(
    "field", ["eval_count", "chunk_bytes", "shard_bytes", "group", "max_per_pack", "engine"]
)
def test_numbers_that_cannot_be(field: str, config: BuildOptions) -> None:
    with pytest.raises(InputError, match=field):
        build(replace(config, **{field: 0}))
    with pytest.raises(InputError, match="max_bad is -1"):
        build(replace(config, max_bad=-1))
    assert not config.out.exists()


def test_whole_words_of_no_pieces(config: BuildOptions, tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join([*corpora.SPECIAL, ".", *corpora.WORDS]) + "\n")
    recipe = replace(config.recipe, whole_words=True)
    with pytest.raises(InputError, match="no ## pieces"):
        build(replace(config, tokenizer=vocabulary, recipe=recipe))


# Bad input ---------------------------------------------------------------------------------------


def test_bad_documents_are_counted_never_dropped(config: BuildOptions, tmp_path: Path) -> None:
    lines = write_source(tmp_path / "bad", CORPUS, "jsonl").read_bytes().split(b"\n")
    for number in range(10, 80, 10):
        lines[number] = b'{"text": "broken \xff\xfe"}'
    (tmp_path / "bad" / "texts.jsonl").write_bytes(b"\n".join(lines))
    config = replace(config, sources=(tmp_path / "bad",))
    with pytest.raises(InputError) as caught:
        build(config)
    assert "so far" in str(caught.value) and "not UTF-8" in str(caught.value)
    assert "--max-bad" in str(caught.value) and "texts.jsonl, byte" in str(caught.value)
    with pytest.raises(InputError, match=r"7 documents.*and 2 more.*--max-bad 7"):
        build(replace(config, max_bad=6))
    built = build(replace(config, max_bad=7))  # goes on with what was done
    assert built.train.config["found"]["bad"] == 7
    assert built.train.config["found"]["documents"] == 113


def test_nothing_to_learn_from(config: BuildOptions, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": " "}\n' * 3)
    with pytest.raises(InputError, match=r"nothing to learn from.*3 without text"):
        build(replace(config, sources=(tmp_path / "empty.jsonl",)))


def test_a_damaged_part_is_named(config: BuildOptions, whole: dict) -> None:
    with pytest.raises(Stop):
        build(config, stop_after(3))
    part = next(config.out.glob(".build/*/part-00001.arrow"))
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(InputError, match=r"part-00001.arrow is damaged.*remove it"):
        build(config)
    part.unlink()
    with pytest.raises(Stop):
        build(config, stop_after(1, "planning"))
    data = bytearray(part.read_bytes())
    data[len(data) // 3] ^= 1
    part.write_bytes(data)
    with pytest.raises(InputError, match=r"part-00001.arrow is damaged: its checksum is wrong"):
        build(config)
    part.unlink()
    build(config)
    assert tree(config.out) == whole


def test_no_room_for_a_file(config: BuildOptions) -> None:
    """A limit on the size of files does what a full disk does, and needs no rights."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))

    config = replace(config, chunk_bytes=20_000, group=1 << 20, workers=2)
    message = run(config, preexec_fn=limited)
    assert message.returncode == 2 and message.stderr.count("packhorse: ") == 1
    assert "cannot be written: File too large" in message.stderr
    assert "run the same command to resume" in message.stderr
    config = replace(config, workers=1)
    build(config)
    build(undisturbed := replace(config, out=config.out.with_name("undisturbed")))
    assert tree(config.out) == tree(undisturbed.out)


@pytest.mark.parametrize("room", ["40k", "100k", "160k"])
def test_a_full_disk(room: str, config: BuildOptions, whole: dict, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted: that needs root")
    config = replace(config, out=disk / "out")
    try:
        with pytest.raises(InputError, match=r"No space left on device.*same command to resume"):
            build(config)
        assert not (disk / "out" / "train").exists()
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        build(config)
        assert tree(disk / "out") == whole
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_manifest_tells_how_it_was_made(config: BuildOptions) -> None:
    build(config)
    fields = json.loads((config.out / "train" / "manifest.json").read_text())["config"]
    assert fields["made_by"]["recipe"]["max_length"] == 64
    assert fields["made_by"]["sources"]["names"] == ["part-00000-of-00001"]
    assert str(config.sources[0]) not in json.dumps(fields)  # a corpus may be moved


def test_real_wikipedia(shared_data: Path, tmp_path: Path) -> None:
    """206 pages of a dump, 100 of them redirects, and 153 articles by WikiExtractor."""
    vocabulary = shared_data / "vocab" / "bert-base-uncased-vocab.txt"
    config = BuildOptions((shared_data / "wiki",), tmp_path / "out", vocabulary, workers=1)
    built = build(config).train
    result = built.config["found"]
    assert result["redirects"] == 100 and result["bad"] == 0
    assert result["documents"] + result["empty"] == 106 + 153 and result["empty"] < 5
    best = built.tokens / (built.config["lower_bound"] * built.layout.capacity)
    assert built.efficiency >= 0.995 or built.efficiency >= best - 0.003
    shards.open_dataset(tmp_path / "out" / "train", verify=True)
    hashes = shared_data / "packing" / "mlperf_bert_eval.md5"
    item = replace(config, sources=(shared_data / "wiki" / "mlperf_wiki_00",), overwrite=True)
    with pytest.raises(InputError, match=r"none of the 9,941 hashes.*37 documents"):
        build(replace(item, eval_hashes=hashes))
