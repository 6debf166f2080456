"""Duplicates, languages and lengths: what is left out is what should be, and is counted."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packhorse.data.corpus import cleaning
from packhorse.data.corpus.building import BuildOptions, CorpusProgress, build
from packhorse.data.corpus.cleaning import BAND_ROWS, BANDS, SHINGLE, Cleaning, signatures
from packhorse.data.packed.examples import TokenizedDocuments, select
from packhorse.data.packed.masking import Recipe
from packhorse.errors import InputError
from packhorse.tokens import Tokenizer

from .. import corpora
from ..corpora import sequences_of, tree

pytest.importorskip("nupunkt", reason="no nupunkt: pip install 'packhorse[data]'")
pytest.importorskip("rensa", reason="no rensa: pip install 'packhorse[clean]'")
pytest.importorskip("py3langid", reason="no py3langid: pip install 'packhorse[clean]'")

LENGTH = 120  # words of a document


def make_documents(number: int, seed: int = 0) -> list[list[str]]:
    rng = random.Random(seed)
    documents = [rng.choices(corpora.WORDS, k=LENGTH) for _ in range(number)]
    for i, words in enumerate(documents):
        words[::6] = [corpora.own_word(i)] * len(words[::6])
    return documents


def changed(words: list[str], count: int, seed: int) -> list[str]:
    """The document with that many of its words replaced."""
    rng = random.Random(seed)
    words = list(words)
    for place in rng.sample(range(len(words)), count):
        words[place] = corpora.WORDS[seed % 7]
    return words


def similarity(first: list[str], second: list[str]) -> float:
    """The share of shingles that two documents have in common, counted out."""
    sets = [
        {tuple(d[i : i + SHINGLE]) for i in range(len(d) - SHINGLE + 1)} for d in (first, second)
    ]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def tokenized(documents: list[list[int]]) -> TokenizedDocuments:
    sizes = np.cumsum([0, *map(len, documents)])
    ids = np.array([token for document in documents for token in document], np.uint16)
    return TokenizedDocuments(ids, sizes, np.arange(len(documents) + 1))


@pytest.fixture
def options(tmp_path: Path) -> BuildOptions:
    corpora.write_vocabulary(tmp_path / "vocab.txt")
    return BuildOptions(
        (tmp_path / "a.txt",),
        tmp_path / "out",
        tmp_path / "vocab.txt",
        Recipe(max_length=64),
        documents="lines",
        chunk_bytes=20_000,
        shard_bytes=20_000,
        workers=1,
    )


def write(options: BuildOptions, documents: list[list[str]]) -> None:
    text = "".join(f"{' '.join(words)} .\n" for words in documents)
    options.sources[0].write_text(text)


# Signatures --------------------------------------------------------------------------------------


def test_signatures_estimate_the_share_of_common_shingles() -> None:
    """Against sets that are counted out; the standard error of 112 numbers is 0.05."""
    rng = random.Random(0)
    documents = [rng.choices(range(1000), k=300) for _ in range(60)]
    pairs = []
    for number, words in enumerate(documents[:]):
        other = list(words)
        for place in rng.sample(range(300), number // 2):
            other[place] = 2000
        pairs.append((number, len(documents)))
        documents.append(other)
    rows = signatures(tokenized(documents))
    assert rows.shape == (120, BANDS * BAND_ROWS)
    estimated = np.array([(rows[a] == rows[b]).mean() for a, b in pairs])
    counted = np.array([similarity(documents[a], documents[b]) for a, b in pairs])  # pyright: ignore[reportArgumentType]
    assert np.abs(estimated - counted).max() < 0.2
    assert np.abs(estimated - counted).mean() < 0.05
    assert (rows[0] == rows[1]).mean() < 0.1, "the control: other documents are not alike"


def test_a_signature_is_of_its_document_alone() -> None:
    documents = [[1, 2, 3, 4, 5, 6, 7], [8], [1, 2], [1, 2, 3, 4, 5, 6, 7], [2, 1]]
    together = signatures(tokenized(documents))
    for number, document in enumerate(documents):
        assert (signatures(tokenized([document])) == together[number]).all()
    assert (together[0] == together[3]).all()
    assert not (together[2] == together[4]).all()


def test_selected_documents_are_laid_end_to_end() -> None:
    documents = TokenizedDocuments(
        np.arange(10), np.array([0, 2, 3, 7, 8, 10]), np.array([0, 2, 3, 5])
    )
    chosen = select(documents, np.array([True, False, True]))
    assert chosen.ids.tolist() == [0, 1, 2, 7, 8, 9]
    assert chosen.sentences.tolist() == [0, 2, 3, 4, 6]
    assert chosen.documents.tolist() == [0, 2, 4]


# Duplicates --------------------------------------------------------------------------------------


def words_in(options: BuildOptions, part: str = "train") -> set[int]:
    """Tokens that stand there often: masking puts any token anywhere, but seldom."""
    tokens = Counter(token for ids, *_ in sequences_of(options.out / part) for token in ids)
    return {token for token, count in tokens.items() if count > 2}


def test_documents_that_repeat_others_are_left_out(options: BuildOptions) -> None:
    unique = make_documents(100)
    exact = unique[10:30]
    near = [changed(words, 1, seed) for seed, words in enumerate(unique[40:60])]
    different = [changed(words, 25, seed) for seed, words in enumerate(unique[70:80])]
    for original, copy in zip(unique[40:60], near, strict=True):
        assert similarity(original, copy) > 0.9
    for original, copy in zip(unique[70:80], different, strict=True):
        assert similarity(original, copy) < 0.4
    write(options, [*unique, *exact, *near, *different])
    plain = build(replace(options, out=options.out.with_name("plain"))).train
    counts = {}
    for kind in ("exact", "near"):
        cleaned = replace(options, cleaning=Cleaning(duplicates=kind))
        cleaned = replace(cleaned, out=options.out.with_name(kind))
        counts[kind] = build(cleaned).train.config["found"]
    assert plain.config["found"]["documents"] == 150
    assert (counts["exact"]["duplicates"], counts["exact"]["near_duplicates"]) == (20, 0)
    assert (counts["near"]["duplicates"], counts["near"]["near_duplicates"]) == (20, 20)
    assert counts["near"]["tokens"] < counts["exact"]["tokens"] < plain.tokens
    samples = counts["near"]["duplicate_samples"]
    assert len(samples) == 20
    assert all(similarity(a.split(), b.split()) > 0.4 for a, b in samples)


def test_duplicates_are_found_across_parts_for_any_number_of_workers(options: BuildOptions) -> None:
    unique = make_documents(100)
    write(options, [*unique, *unique[::-1], *[changed(words, 1, 0) for words in unique]])
    cleaned = replace(options, cleaning=Cleaning(duplicates="near"), chunk_bytes=5000)
    counts = build(cleaned).train.config["found"]
    assert (counts["duplicates"], counts["near_duplicates"]) == (100, 100)
    other = replace(cleaned, workers=2, out=options.out.with_name("two"))
    build(other)
    assert tree(other.out) == tree(cleaned.out)


def test_an_archive_without_a_file_has_no_duplicates(options: BuildOptions) -> None:
    with tarfile.open(options.sources[0], "w") as archive:
        archive.addfile(tarfile.TarInfo(".hidden"))
    cleaning = Cleaning(duplicates="exact")
    with pytest.raises(InputError, match="nothing to learn from"):
        build(replace(options, cleaning=cleaning))


def test_the_first_stays(options: BuildOptions) -> None:
    """And what is held out shares no near duplicate with what is trained on."""
    unique = make_documents(60)
    copies = [changed(words, 1, seed) for seed, words in enumerate(unique)]
    write(options, [*unique, *copies])
    cleaned = replace(options, cleaning=Cleaning(duplicates="near"), eval_fraction=0.3)
    found = build(cleaned).train.config["found"]
    assert found["duplicates"] + found["near_duplicates"] == 60 and 8 < found["held_out"] < 30
    own = range(60)
    tokenizer = Tokenizer.load(options.tokenizer)
    ids = {tokenizer.id(corpora.own_word(number)): number for number in own}
    train = {ids[token] for token in words_in(cleaned) if token in ids}
    held_out = {ids[token] for token in words_in(cleaned, "eval") if token in ids}
    assert not train & held_out and len(held_out) == found["held_out"]


@pytest.mark.parametrize("stage", ["reading", "finding", "making", "planning", "writing"])
def test_interrupted_and_resumed_to_the_same_bytes(options: BuildOptions, stage: str) -> None:
    unique = make_documents(80)
    write(options, [*unique, *unique[:30]])
    cleaned = replace(options, cleaning=Cleaning(duplicates="near"), eval_fraction=0.1)
    build(undisturbed := replace(cleaned, out=options.out.with_name("undisturbed")))

    def stop(progress: CorpusProgress) -> None:
        if progress.stage.startswith(stage):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(cleaned, stop)
    build(cleaned)
    assert tree(cleaned.out) == tree(undisturbed.out)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_fifteen_times(options: BuildOptions) -> None:
    unique = make_documents(100)
    write(options, [*unique, *unique])
    cleaned = replace(options, cleaning=Cleaning(duplicates="near"), eval_fraction=0.1)
    build(undisturbed := replace(cleaned, out=options.out.with_name("undisturbed")))
    flags = ["--tokenizer", options.tokenizer, "--max-length=64", "--documents=lines"]
    flags += ["--chunk-bytes=20000", "--shard-bytes=20000", "--workers=2"]
    flags += ["--dedup=near", "--eval-fraction=0.1"]
    words = ["-m", "packhorse", "data", "build", options.sources[0], cleaned.out, *flags]
    killed = 0
    for wait in np.linspace(1, 6, 15):
        with subprocess.Popen([sys.executable, *map(str, words)], stderr=subprocess.DEVNULL) as run:
            try:
                run.wait(float(wait))
            except subprocess.TimeoutExpired:
                run.send_signal(signal.SIGKILL)
                killed += 1
    build(cleaned)
    assert killed and tree(cleaned.out) == tree(undisturbed.out)


# Held out by a fraction --------------------------------------------------------------------------


def test_a_fraction_is_held_out_by_the_text_alone(options: BuildOptions) -> None:
    documents = make_documents(200)
    write(options, documents)
    held = replace(options, eval_fraction=0.2)
    result = build(held)
    found = result.train.config["found"]
    assert 20 < found["held_out"] < 60 and result.eval is not None
    assert result.eval.layout.static_masks
    write(options, documents[::-1])
    turned = replace(held, out=options.out.with_name("turned"))
    assert build(turned).train.config["found"]["held_out"] == found["held_out"]
    own = {number for number in words_in(held, "eval") if number > 150}
    assert own == {number for number in words_in(turned, "eval") if number > 150}


def test_a_count_of_held_out_sequences_is_exact(options: BuildOptions) -> None:
    write(options, make_documents(200))
    held = replace(options, eval_fraction=0.2, eval_count=30)
    result = build(held)
    assert result.eval is not None and result.eval.sequences == 30
    with pytest.raises(InputError, match="held-out documents make"):
        build(replace(held, eval_count=100_000, overwrite=True))
    with pytest.raises(InputError, match="eval_fraction is 1"):
        build(replace(held, eval_fraction=1))


# Filters -----------------------------------------------------------------------------------------

LANGUAGES = {
    "en": "The mule carries the sacks to the market, and the farmer walks beside it all day long.",
    "de": "Das Maultier trägt die Säcke zum Markt, und der Bauer geht stets neben ihm her.",
    "fr": "Le mulet porte les sacs au marché, et le fermier marche à côté de lui toute la journée.",
    "ja": "ラバは袋を市場へ運び、農夫は一日中その横を歩きます。雨が降っても休みません。",
}


def test_languages_are_told_and_kept(options: BuildOptions) -> None:
    options.sources[0].write_text("".join(f"{text}\n" * 3 for text in LANGUAGES.values()))
    reported = replace(options, cleaning=Cleaning(report_languages=True))
    found = build(reported).train.config["found"]
    assert (
        found["languages"] == dict.fromkeys(sorted(LANGUAGES), 3) and not found["other_languages"]
    )
    kept = replace(options, cleaning=Cleaning(languages=("de", "fr")), out=options.out / "kept")
    found = build(replace(kept, out=options.out.with_name("kept"))).train.config["found"]
    assert found["other_languages"] == 6 and found["documents"] == 12
    with pytest.raises(InputError, match=r"no language is called 'english'; known: .* en "):
        Cleaning(languages=("english",))


def test_lengths_are_counted_and_filtered(options: BuildOptions) -> None:
    lines = ["word " * count for count in (1, 2, 4, 8, 16, 32, 64)]
    options.sources[0].write_text("".join(f"{line.strip()}.\n" for line in lines))
    bounds = Cleaning(min_characters=20, max_characters=100)
    found = build(replace(options, cleaning=bounds)).train.config["found"]
    lengths = [len(line.strip()) + 1 for line in lines]
    assert found["too_short"] == sum(length < 20 for length in lengths)
    assert found["too_long"] == sum(length > 100 for length in lengths)
    expected = [sum(2**i <= length < 2 ** (i + 1) for length in lengths) for i in range(9)]
    assert found["document_lengths"] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_characters": -1}, "must be 0 or more"),
        ({"min_characters": 5, "max_characters": 4}, "not less than min_characters"),
        ({"duplicates": "all"}, "use 'exact' or 'near'"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Cleaning(**arguments)  # pyright: ignore[reportArgumentType]


def test_a_band_differs_where_one_of_its_numbers_does() -> None:
    rows = np.random.default_rng(0).integers(0, 2**32, (50, BANDS * BAND_ROWS), np.uint32)
    keys = [cleaning._band_keys(rows, band) for band in range(BANDS)]
    rows[:, 3] += np.uint32(1)
    again = [cleaning._band_keys(rows, band) for band in range(BANDS)]
    assert (keys[0] != again[0]).all()
    assert all((a == b).all() for a, b in zip(keys[1:], again[1:], strict=True))
