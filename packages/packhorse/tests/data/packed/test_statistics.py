"""What is told of a dataset, against counting by hand."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from packhorse.data.corpus.building import BuildOptions, build
from packhorse.data.packed import shards, statistics
from packhorse.data.packed.loader import Loader
from packhorse.data.packed.masking import Recipe
from packhorse.errors import InputError
from packhorse.tokens import Tokenizer

from .. import corpora

pytest.importorskip("pyarrow", reason="no pyarrow: pip install 'packhorse[data]'")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training set with masks drawn later, and an evaluation set with stored ones."""
    home = tmp_path_factory.mktemp("built")
    corpus = corpora.documents(80)
    source = corpora.write_source(home / "source", corpus)
    (home / "eval.md5").write_text("\n".join(map(corpora.md5, corpus[:20])))
    vocabulary = corpora.write_vocabulary(home / "vocab.txt")
    config = BuildOptions(
        (source,), home / "out", vocabulary, Recipe(max_length=64), shard_bytes=4000
    )
    build(replace(config, eval_hashes=home / "eval.md5", eval_count=20, workers=1))
    return home / "out"


def test_counts_are_those_of_a_loop(built: Path) -> None:
    result = statistics.count("train", built / "train", top=3)
    dataset = shards.open_dataset(built / "train")
    rows = [dataset.row(number) for number in range(len(dataset))]
    kinds = Counter(tuple(sorted(row.lengths.tolist(), reverse=True)) for row in rows)
    assert dict(result.strategies).items() <= kinds.items()
    assert [count for _, count in result.strategies] == [n for _, n in kinds.most_common(3)]
    assert result.strategy_count == len(kinds)
    full = Counter(len(row.ids) for row in rows)
    assert {i + 1: n for i, n in enumerate(result.row_tokens.tolist()) if n} == full
    lengths = Counter(length for row in rows for length in row.lengths.tolist())
    assert {i + 1: n for i, n in enumerate(result.lengths.tolist()) if n} == lengths
    assert len(result.lengths) == len(result.row_tokens) == 64
    assert result.random_next == sum(int(row.random_next.sum()) for row in rows)
    assert result.bytes == sum(path.stat().st_size for path in (built / "train").glob("*.arrow"))
    assert result.lower_bound is not None and result.lower_bound <= result.manifest.rows


@pytest.mark.parametrize("name", ["train", "eval"])
def test_samples_show_what_stood_there(name: str, built: Path) -> None:
    tokenizer = Tokenizer.load(built / "tokenizer")
    shown = statistics.samples(built / name, tokenizer, 5, seed=1)
    assert shown == statistics.samples(built / name, tokenizer, 5, seed=1)
    assert len(shown) == 5 and len({sample.row for sample in shown}) == 5
    dataset = shards.open_dataset(built / name)
    for sample in shown:
        row = dataset.row(sample.row)
        assert sample.tokens == row.lengths[0]
        assert sample.next_label == ("random" if row.random_next[0] else "follows")
        assert sample.text.startswith("[CLS] ") and sample.text.count("[SEP]") == 2
        seen, stood = zip(*_marks(sample.text), strict=True)
        assert "MASK" in seen or len(seen) < 8
        if row.masked_ids is not None and row.masked_counts is not None:
            retained = row.masked_ids[: row.masked_counts[0]]
            assert [*stood] == [tokenizer.token(int(id)) for id in retained]
        plain = " ".join(tokenizer.token(int(id)) for id in row.ids[: sample.tokens])
        assert plain.count("[MASK]") == (0 if name == "train" else seen.count("MASK"))


def _marks(text: str) -> list[tuple[str, str]]:
    words = (word.strip("[]") for word in text.split() if "=" in word)
    return [(seen, stood) for seen, _, stood in (word.partition("=") for word in words)]


def test_damage_is_reported_with_the_shard(built: Path, tmp_path: Path) -> None:
    """Any byte of it, Arrow's frame included."""
    shutil.copytree(built / "train", tmp_path / "train")
    path = tmp_path / "train" / shards.shard_name(0)
    whole = path.read_bytes()
    for at in range(0, len(whole), 23):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :])
        with pytest.raises(InputError, match=rf"{path.name} is damaged.*build the dataset again"):
            statistics.count("train", tmp_path / "train", top=3)
    path.write_bytes(whole)
    assert statistics.count("train", tmp_path / "train", top=3).manifest.rows


def test_of_single_segments_no_label_is_reported(built: Path, tmp_path: Path) -> None:
    recipe = Recipe(max_length=64, next_sentence=False, mask_probability=0.5)
    home = built.parent
    build(BuildOptions((home / "source",), tmp_path / "out", home / "vocab.txt", recipe, workers=1))
    result = statistics.count("train", tmp_path / "out" / "train", top=3)
    assert result.random_next is None and not result.manifest.layout.next_sentence
    tokenizer = Tokenizer.load(tmp_path / "out" / "tokenizer")
    shown = statistics.samples(tmp_path / "out" / "train", tokenizer, 5, seed=1)
    assert {sample.next_label for sample in shown} == {None}
    # As the build was told to mask, so does a loader that is told nothing.
    (batch,) = Loader(
        shards.open_dataset(tmp_path / "out" / "train"), result.manifest.rows, epochs=1
    )
    assert 0.4 < len(batch.masked_at) / batch.tokens < 0.55


def test_more_samples_than_rows(built: Path) -> None:
    tokenizer = Tokenizer.load(built / "tokenizer")
    rows = len(shards.open_dataset(built / "eval"))
    assert len(statistics.samples(built / "eval", tokenizer, 10**6, 0)) == rows


def test_where_datasets_are(built: Path, tmp_path: Path) -> None:
    both = {"train": built / "train", "eval": built / "eval"}
    assert statistics.datasets(built) == both
    assert statistics.datasets(built / "eval") == {"eval": built / "eval"}
    with pytest.raises(InputError, match="no manifest"):
        statistics.datasets(tmp_path)
    with pytest.raises(InputError, match="not a folder"):
        statistics.datasets(tmp_path / "none")


@pytest.mark.parametrize(("size", "number"), [(10, 3), (512, 16), (4, 16), (7, 7)])
def test_bins_cover_all_lengths(size: int, number: int) -> None:
    counts = np.arange(size)
    result = statistics.bins(counts, number)
    assert len(result) <= number and sum(count for *_, count in result) == counts.sum()
    assert result[0][0] == 1 and result[-1][1] == size
    for (_, end, _), (begin, _, _) in pairwise(result):
        assert begin == end + 1
    for begin, end, count in result:
        assert count == counts[begin - 1 : end].sum()
