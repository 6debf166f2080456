"""Sparse and multi-vector models on the command line: run, its files, and evaluate."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packhorse

from ..runtime import retrieval_models as models

Cli = Callable[..., Any]
TEXTS = ("the mule carries two sacks", "a dog barks", "the cat sat on a mat")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A sparse model, a multi-vector one and one with all three outputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers").logging.disable_progress_bar()
        pytest.importorskip("sentence_transformers")
        home = tmp_path_factory.mktemp("models")
        base = models.bert(home / "mlm")
        bare = models.bert(home / "bare", "BertModel")
        models.inference_free(base, home / "sparse")
        models.stanford(bare, home / "multi")
        models.m3(bare, home / "m3")
        yield {name: home / name for name in ("sparse", "multi", "m3", "mlm")}


def test_rows_of_words(cli: Cli, folders: dict[str, Path]) -> None:
    flags = ("-m", folders["sparse"], "--task", "sparse", "--top-k", 3, "--json")
    document = cli("run", *TEXTS, *flags).document
    encoder = packhorse.load(folders["sparse"])
    want = encoder.words(encoder.sparse(TEXTS, top_k=3))
    for row, words in zip(document["results"], want, strict=True):
        pairs = dict(zip(row["words"], row["weights"], strict=True))
        assert pairs == pytest.approx(words, abs=1e-6) and len(row["indices"]) == 3
    asked = cli("run", *TEXTS, *flags, "--as-query").document["results"]
    assert asked != document["results"] and "heaviest" in cli("run", *TEXTS, *flags[:4]).out


def test_a_matrix_of_words_that_scipy_reads(
    cli: Cli, folders: dict[str, Path], tmp_path: Path
) -> None:
    from scipy.sparse import load_npz

    out = tmp_path / "words.npz"
    result = cli("run", *TEXTS, "-m", folders["sparse"], "--task", "sparse", "--out", out)
    assert result.code == 0, result.err
    encoder = packhorse.load(folders["sparse"])
    matrix = load_npz(out)
    want = encoder.sparse(TEXTS)
    assert matrix.shape == want.shape and abs(matrix - want).max() < 1e-6
    assert json.loads((tmp_path / "words.npz.meta.json").read_text())["model"] == "sparse"
    # In chunks the same bytes.
    again = tmp_path / "again.npz"
    cli("run", *TEXTS, "-m", folders["sparse"], "--task", "sparse", "--out", again, "--chunk", 1)
    assert abs(load_npz(again) - matrix).max() < 1e-6


def test_vectors_of_tokens_for_an_index(cli: Cli, folders: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "vectors.npz"
    result = cli("run", *TEXTS, "-m", folders["multi"], "--task", "multi", "--out", out)
    assert result.code == 0, result.err
    want = packhorse.load(folders["multi"]).multi(TEXTS)
    arrays = np.load(out)
    assert arrays["embeddings"].dtype == np.float16
    assert arrays["doclens"].tolist() == [len(vectors) for vectors in want]
    assert abs(arrays["embeddings"] - np.concatenate(want)).max() < 1e-3
    rows = tmp_path / "vectors.jsonl"
    cli("run", *TEXTS, "-m", folders["multi"], "--task", "multi", "--as-query", "--out", rows)
    first = json.loads(rows.read_text().splitlines()[0])
    assert np.shape(first["vectors"]) == (12, 12)
    assert "vectors of tokens" in cli("run", *TEXTS, "-m", folders["multi"], "--task", "multi").out


def test_a_ranking_by_tokens(cli: Cli, folders: dict[str, Path]) -> None:
    flags = ("-m", folders["multi"], "--task", "rerank", "--query", "the cat", "--json")
    rows = cli("run", *TEXTS, *flags).document["results"]
    want = packhorse.load(folders["multi"]).rerank("the cat", TEXTS)
    assert [row["index"] for row in rows] == [ranked.index for ranked in want]


def test_parquet_and_refusals(cli: Cli, folders: dict[str, Path], tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "words.parquet"
    assert cli("run", *TEXTS, "-m", folders["sparse"], "--task", "sparse", "--out", out).code == 0
    columns = parquet.read_table(out).to_pydict()
    assert list(columns) == ["id", "text", "indices", "weights", "words"]
    assert len(columns["words"]) == 3
    flags: tuple[Any, ...]
    for flags, says in (
        (("--task", "embed", "--out", tmp_path / "x.npz"), "npz holds sparse vectors or"),
        (("--task", "sparse", "--out", tmp_path / "x.npy"), "npy holds one vector per text"),
        (("--task", "embed", "--as-query"), "--as-query is for"),
        (("--task", "multi"), "no 'multi' head"),
    ):
        result = cli("run", *TEXTS, "-m", folders["sparse"], *flags)
        assert result.code != 0 and says in result.err, result.err


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    """Documents of random words, and queries of three words of one of them."""
    source = random.Random(0)
    words = models.VOCABULARY[7:23]
    texts = {f"d{i}": source.choices(words, k=source.randint(3, 9)) for i in range(40)}
    rows = [json.dumps({"_id": id, "title": "", "text": " ".join(t)}) for id, t in texts.items()]
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows))
    asked = [
        json.dumps({"_id": f"q{i}", "text": " ".join(source.sample(texts[f"d{i}"], 3))})
        for i in range(12)
    ]
    (tmp_path / "queries.jsonl").write_text("\n".join(asked))
    (tmp_path / "qrels").mkdir()
    grades = "".join(f"q{i}\td{i}\t1\n" for i in range(12))
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + grades)
    return tmp_path


@pytest.mark.parametrize("name", ["sparse", "multi"])
def test_measures_are_those_of_the_other_library(
    cli: Cli, folders: dict[str, Path], collection: Path, name: str
) -> None:
    flags = ("--task", "retrieval", "--input", collection, "-m", folders[name], "--json")
    result = cli("evaluate", *flags, "--beside", "sentence-transformers")
    assert result.code == 0, result.err
    document = result.document
    assert [engine["engine"] for engine in document["engines"]][1] == "sentence-transformers"
    assert document["largest_difference"] < 1e-9
    assert 0 < document["engines"][0]["metrics"][f"{name} map"] < 1


def test_three_outputs_and_their_fusion(
    cli: Cli, folders: dict[str, Path], collection: Path
) -> None:
    flags = ("--task", "retrieval", "--input", collection, "-m", folders["m3"], "--json")
    together = ("--outputs", "dense,sparse,multi", "--beside", "none")
    document = cli("evaluate", *flags, *together).document
    metrics = document["engines"][0]["metrics"]
    assert {name.split()[0] for name in metrics} == {"dense", "sparse", "multi", "rrf"}
    dense = cli("evaluate", *flags, "--beside", "sentence-transformers").document
    for engine in dense["engines"]:  # both libraries' dense vectors
        assert engine["metrics"]["map"] == pytest.approx(metrics["dense map"], abs=1e-6)
    weighted = ("--fusion", "weighted", "--weights", "1,0,0")
    alone = cli("evaluate", *flags, *together, *weighted).document["engines"][0]["metrics"]
    assert alone["weighted map"] == pytest.approx(alone["dense map"], abs=1e-9)
    for extra, says in (
        (("--outputs", "dense,colbert"), "no output 'colbert'"),
        ((*together, "--weights", "1,2"), "one of at least 0 for each"),
        (("--weights", "1"), "--weights is for several outputs, and dense alone would be scored"),
        (("--outputs", "sparse", "--beside", "sentence-transformers"), "has no sparse output"),
        (("--outputs", "dense,sparse", "--precision", "int8"), "--precision is for dense vectors"),
    ):
        result = cli("evaluate", *flags, *extra)
        assert result.code != 0 and says in result.err, result.err
    lacks = ("-m", folders["sparse"], "--outputs", "dense")
    result = cli("evaluate", "--task", "retrieval", "--input", collection, *lacks)
    assert result.code != 0 and "makes no dense output; it makes sparse" in result.err
