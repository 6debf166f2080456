"""Sparse vectors are those of sentence-transformers' SparseEncoder, without all scores at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import packhorse
from packhorse import attention, results
from packhorse.errors import CheckpointError, InputError
from packhorse.model import retrieval
from packhorse.model.retrieval import Splade
from packhorse.packing.batch import Packed
from packhorse.results import SparseVector
from packhorse.runtime.bulk import MOST_SPARSE
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.runner import PackRunner

from . import retrieval_models as models
from .retrieval_models import TEXTS, VOCABULARY


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """What other libraries warn of is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers").logging.disable_progress_bar()
        pytest.importorskip("sentence_transformers")
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.bert(tmp_path_factory.mktemp("mlm") / "model")


@pytest.fixture(scope="module")
def routed(base: Path) -> tuple[Any, Encoder]:
    """A model with weights of words in queries: the library's, and ours."""
    folder = base.parent / "routed"
    return models.inference_free(base, folder), packhorse.load(folder)


@pytest.fixture(scope="module")
def ours(routed: tuple[Any, Encoder]) -> Encoder:
    return routed[1]


def theirs(model: Any, side: str) -> np.ndarray:
    encode = getattr(model, f"encode_{side}")
    return encode(TEXTS, convert_to_sparse_tensor=False, show_progress_bar=False).numpy()


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_the_same_as_the_library(
    base: Path, pooling: str, activation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.splade(base, tmp_path / "model", pooling, activation)
    encoder = packhorse.load(tmp_path / "model")
    assert encoder.heads == ("mlm", "sparse") and not encoder.embedder
    want = theirs(model, "document")
    vectors = encoder.sparse(TEXTS)
    assert vectors.shape == want.shape == (len(TEXTS), len(VOCABULARY))
    assert 0 < vectors.nnz < want.size, "else nothing is sparse"
    limit = 1e-5 * max(1.0, want.max())
    assert abs(vectors.toarray() - want).max() < limit
    # In blocks that cut sequences in the middle.
    monkeypatch.setattr(retrieval, "BLOCK_TOKENS", 5)
    assert abs(encoder.sparse(TEXTS).toarray() - want).max() < limit
    # The control: the other pooling and the other activation give other vectors.
    for other in (("sum", activation), ("max", activation)):
        head = Splade(encoder.backend.model.heads["mlm"], *other)  # type: ignore[attr-defined]
        encoder.backend.model.heads["sparse"] = head  # type: ignore[attr-defined]
        same = other[0] == pooling
        assert (abs(encoder.sparse(TEXTS).toarray() - want).max() < limit) == same


def test_queries_without_a_model(routed: tuple[Any, Encoder]) -> None:
    model, encoder = routed
    want = theirs(model, "query")
    vectors = encoder.sparse(TEXTS, query=True)
    assert np.array_equal(vectors.toarray(), want)
    assert want.any() and abs(want - theirs(model, "document")).max() > 0.1, "the control"
    assert abs(encoder.sparse(TEXTS).toarray() - theirs(model, "document")).max() < 1e-5

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("the model ran")

    idle = replace(encoder, backend=refuse)
    assert np.array_equal(idle.sparse(TEXTS, query=True).toarray(), want)
    with pytest.raises(AssertionError, match="the model ran"):
        idle.sparse(TEXTS)


def test_weights_of_words_in_a_file_of_words(base: Path, tmp_path: Path) -> None:
    model = models.inference_free(base, tmp_path / "model")
    table = tmp_path / "model" / "query_0_SparseStaticEmbedding"
    want = theirs(model, "query")
    weights = model[0].sub_modules["query"][0].weight.tolist()
    (table / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        packhorse.load(tmp_path / "model")
    import json

    words = {word: weights[i] for i, word in enumerate(VOCABULARY)}
    (tmp_path / "model" / "idf.json").write_text(json.dumps(words))
    vectors = packhorse.load(tmp_path / "model").sparse(TEXTS, query=True)
    assert abs(vectors.toarray() - want).max() < 1e-6


def test_words_with_their_weights(ours: Encoder) -> None:
    vectors = ours.sparse(TEXTS[:2])
    rows = ours.words(vectors)
    for row, dense in zip(rows, vectors.toarray(), strict=True):
        assert row == {VOCABULARY[i]: pytest.approx(dense[i]) for i in np.flatnonzero(dense)}
        assert list(row.values()) == sorted(row.values(), reverse=True)
    assert ours.words(vectors, top_k=3) == [dict(list(row.items())[:3]) for row in rows]
    top = ours.sparse(TEXTS[:2], top_k=3)
    assert ours.words(top) == ours.words(vectors, top_k=3)
    assert top.nnz == 6 and (np.diff(top.indices[:3]) > 0).all()
    assert ours.sparse([]).shape == (0, len(VOCABULARY))


def test_a_row_of_the_table_without_a_word_has_its_number(ours: Encoder) -> None:
    beyond = SparseVector(np.array([7, 500], np.int32), np.ones(2, np.float32))
    assert results.words(beyond, ours.tokenizer) == ["the", "#500"]


def test_refusals(ours: Encoder, base: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="top_k is 0"):
        ours.sparse(["mule"], top_k=0)
    with pytest.raises(CheckpointError, match="no 'multi' head"):
        ours.multi(["mule"])
    with pytest.raises(CheckpointError, match=r"no 'sparse' head .it has: mlm, embed"):
        packhorse.load(base).sparse(["mule"])
    models.splade(base, tmp_path / "model", "max", "relu")
    settings = tmp_path / "model" / "1_SpladePooling" / "config.json"
    settings.write_text(settings.read_text().replace("max", "mean"))
    with pytest.raises(CheckpointError, match="pooling_strategy 'mean' does not run"):
        packhorse.load(tmp_path / "model")


def test_chunks_of_a_text_give_their_largest_weights(ours: Encoder) -> None:
    long = " ".join(TEXTS * 3)
    windows = ours.tokenizer.windows([long], ours.max_length)[0]
    spans = [window.offsets[window.spans[0]] for window in windows]
    parts = [long[span[0][0] : span[-1][1]] for span in spans]
    assert len(parts) > 2
    want = ours.sparse(parts).toarray().max(0)
    assert np.allclose(ours.sparse([long], long="chunk").toarray()[0], want, atol=1e-6)
    assert not np.allclose(ours.sparse([long], long="truncate").toarray()[0], want, atol=1e-3)


def test_all_scores_never_exist_at_once(ours: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the head allocates does not grow with the tokens of a batch."""
    monkeypatch.setattr(retrieval, "BLOCK_TOKENS", 64)
    head = ours.backend.model.heads["sparse"]  # type: ignore[attr-defined]

    def largest(tokens: int) -> int:
        packed = Packed.build([[7] * tokens] * 2)
        hidden = torch.randn(2 * tokens, 32)
        sizes: list[int] = []

        class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
                out = func(*args, **(kwargs or {}))
                if isinstance(out, torch.Tensor) and out.ndim == 2:
                    sizes.append(out.shape[0] * (out.shape[1] == len(VOCABULARY)))
                return out

        with torch.inference_mode(), Sizes():
            head(hidden, packed)
        return max(sizes)

    assert largest(100) == largest(1000) == 64
    monkeypatch.setattr(retrieval, "BLOCK_TOKENS", 4096)
    assert largest(1000) == 2000, "the control"


def test_lists_hold_only_words_with_a_weight(
    ours: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the whole vocabulary live no longer than their batch, and batches are bounded."""
    sizes: list[int] = []
    backend = ours.backend

    def count(packed: Packed, heads: Any, at: Any = None) -> Any:
        sizes.append(len(packed))
        return backend(packed, heads, at)

    encoder = replace(ours, backend=count, budget=100_000, side_by_side=False)
    texts = ["mule"] * (2 * MOST_SPARSE + 1)
    sequences = encoder.tokenizer.encode(texts)
    rows = encoder.run(sequences, "sparse")
    assert sizes == [MOST_SPARSE, MOST_SPARSE, 1]
    assert {row[0].dtype.names for row in rows} == {("index", "weight")}
    encoder.run(sequences, "mlm")
    assert sizes[3:] == [len(texts)], "the control"


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_both_ways_to_reduce_a_block(pooling: str, make_model: Callable[..., Any]) -> None:
    """A CPU takes sequence by sequence, CUDA all at once: here both on the CPU."""
    model = make_model(torch.float64)
    head = Splade(model.heads["mlm"], pooling)
    lengths = torch.tensor([3, 1, 0, 7, 2])
    scores = torch.randn(13, 97, dtype=torch.float64)
    scores[5] = float("nan")  # of the fourth sequence
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    total = scores.new_zeros(5, 97)
    head._add(total, scores.clone(), ends)
    reduced = torch.segment_reduce(scores, pooling, lengths=lengths, axis=0, initial=0)
    assert torch.equal(total.isnan(), reduced.isnan())
    assert total[3].isnan().all() and not total[[0, 1, 2, 4]].isnan().any()
    assert torch.allclose(total.nan_to_num(), reduced.nan_to_num(), atol=1e-12)


def test_neighbors_change_nothing(ours: Encoder) -> None:
    alone = np.concatenate([ours.sparse([text]).toarray() for text in TEXTS])
    assert np.allclose(ours.sparse(TEXTS).toarray(), alone, atol=1e-6)
    bert = ours.backend.model.bert  # type: ignore[attr-defined]
    kernel = bert.kernel
    from packhorse.runtime.proof import _UnboundedKernel

    bert.use(_UnboundedKernel(attention.kernel("reference")))  # type: ignore[arg-type]
    try:
        assert not np.allclose(ours.sparse(TEXTS).toarray(), alone, atol=1e-3), "the control"
    finally:
        bert.use(kernel)


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_invariant_results_are_equal_bit_by_bit(base: Path, tmp_path: Path, pooling: str) -> None:
    models.splade(base, tmp_path / "model", pooling, "relu")
    encoder = packhorse.load(tmp_path / "model", invariant=True, budget=64)
    together = encoder.sparse(TEXTS * 3)
    for i, text in enumerate(TEXTS):
        alone = encoder.sparse([text])
        for copy in range(i, len(TEXTS) * 3, len(TEXTS)):
            assert (together[[copy]] != alone).nnz == 0


def test_the_runner_gives_the_same(ours: Encoder, quiet_runtime: Any) -> None:
    want = ours.sparse(TEXTS).toarray()
    with PackRunner(ours, timeout=0) as runner:
        for text, row in zip(TEXTS, want, strict=True):
            vector = runner.submit(text, "sparse").result(300)
            assert np.allclose(row[vector.indices], vector.weights, atol=1e-6)
            assert len(vector.indices) == (row > 0).sum()


ODD: list[Any] = [None, True, -1, 1e999, "x", [[]], {"x": [1]}]


@pytest.mark.slow
def test_odd_values_in_any_file_of_settings(base: Path, tmp_path: Path) -> None:
    """The model loads, or a `CheckpointError` says why not."""
    import json

    bare = models.bert(tmp_path / "bare", "BertModel")
    models.inference_free(base, tmp_path / "routed")
    models.late(bare, tmp_path / "late", query_expansion={"strategy": "fixed", "length": 12})
    models.pylate(bare, tmp_path / "pylate")
    models.stanford(bare, tmp_path / "stanford")
    outcomes = {True: 0, False: 0}
    names = ("router_config.json", "config_sentence_transformers.json", "artifact.metadata")
    names += ("1_Dense/config.json", "2_MultiVectorMask/config.json", "sentence_bert_config.json")
    names += ("document_1_SpladePooling/config.json", "query_0_SparseStaticEmbedding/config.json")
    for folder in ("routed", "late", "pylate", "stanford"):
        for path in filter(Path.exists, (tmp_path / folder / name for name in names)):
            original = path.read_text()
            settings = json.loads(original)
            for key in settings:
                for value in ODD:
                    path.write_text(json.dumps(settings | {key: value}))
                    try:
                        packhorse.load(tmp_path / folder)
                        outcomes[True] += 1
                    except CheckpointError:
                        outcomes[False] += 1
            path.write_text(original)
    assert min(outcomes.values()) > 20, outcomes
