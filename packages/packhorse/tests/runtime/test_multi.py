"""Vectors of tokens are those of sentence-transformers and PyLate; bge-m3 by FlagEmbedding's rules.

PyLate's own numbers are checked where it is installed; its folders are written here by hand, and
sentence-transformers reads those too.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import packhorse
from packhorse import attention
from packhorse.attention.hidden_keys import HiddenKeys
from packhorse.attention.scope import AttentionScope
from packhorse.errors import CheckpointError, InputError
from packhorse.packing.batch import Packed
from packhorse.results import maxsim
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.runner import PackRunner
from packhorse.runtime.tasks import TruncationWarning, task_prompt

from . import retrieval_models as models
from .retrieval_models import TEXTS

SIDES = ("query", "document")


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
    return models.bert(tmp_path_factory.mktemp("bert") / "model", "BertModel")


@pytest.fixture(scope="module")
def colbert(base: Path) -> tuple[Any, Encoder]:
    """An original ColBERT: as sentence-transformers reads it, and ours."""
    folder = base.parent / "stanford"
    return models.stanford(base, folder), packhorse.load(folder)


@pytest.fixture(scope="module")
def ours(colbert: tuple[Any, Encoder]) -> Encoder:
    return colbert[1]


def theirs(model: Any, side: str) -> list[np.ndarray]:
    encode = getattr(model, f"encode_{side}")
    return [np.asarray(vectors) for vectors in encode(TEXTS, show_progress_bar=False)]


def difference(first: list[np.ndarray], second: list[np.ndarray]) -> float:
    """The largest; infinite if a text has another number of tokens."""
    if [x.shape for x in first] != [x.shape for x in second]:
        return np.inf
    return max(abs(a - b).max(initial=0) for a, b in zip(first, second, strict=True))


def check(model: Any, encoder: Encoder) -> None:
    """Both sides are equal, and the one is not the other."""
    multi = {side: encoder.multi(TEXTS, query=side == "query", long="truncate") for side in SIDES}
    for side, other in (SIDES, SIDES[::-1]):
        want = theirs(model, side)
        assert difference(multi[side], want) < 1e-5
        assert difference(multi[other], want) > 0.01, "the control"


@pytest.mark.parametrize("attends", [False, True])
def test_an_original_colbert(base: Path, tmp_path: Path, attends: bool) -> None:
    model = models.stanford(base, tmp_path / "model", attends)
    encoder = packhorse.load(tmp_path / "model")
    assert encoder.heads == ("pooled", "multi")
    queries = encoder.multi(TEXTS, query=True, long="truncate")
    assert {len(vectors) for vectors in queries} == {12}
    check(model, encoder)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"query_expansion": {"strategy": "fixed", "attend": False, "length": 12}},
        {"query_expansion": {"strategy": "fixed", "attend": True, "length": 12}},
        {"query_length": 6, "document_length": 9},
    ],
    ids=["plain", "hidden", "attended", "lengths"],
)
def test_a_model_of_sentence_transformers(
    base: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    model = models.late(base, tmp_path / "model", **settings)
    check(model, packhorse.load(tmp_path / "model"))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attend_to_expansion_tokens": True},
        {"do_query_expansion": False, "query_length": 6, "skiplist_words": ["mule"]},
    ],
    ids=["hidden", "attended", "plain"],
)
def test_a_model_of_pylate(base: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    from sentence_transformers import MultiVectorEncoder

    models.pylate(base, tmp_path / "model", **settings)
    encoder = packhorse.load(tmp_path / "model")
    check(MultiVectorEncoder(str(tmp_path / "model"), device="cpu"), encoder)
    if settings.get("do_query_expansion") is False:
        return
    pylate = pytest.importorskip("pylate.models")
    model = pylate.ColBERT(str(tmp_path / "model"), device="cpu")
    for side in SIDES:
        want = model.encode(TEXTS, is_query=side == "query", show_progress_bar=False)
        assert difference(encoder.multi(TEXTS, query=side == "query", long="truncate"), want) < 1e-5


def test_a_text_that_is_cut_is_told(ours: Encoder) -> None:
    with pytest.warns(TruncationWarning, match="1 of 6 texts were cut to 13 tokens"):
        ours.multi(TEXTS)
    with pytest.raises(InputError, match="text 1 is too long"):
        ours.multi(TEXTS, long="error")
    with pytest.raises(InputError, match="not made in chunks"):
        ours.multi(TEXTS, long="chunk")
    with pytest.raises(InputError, match="multi takes single texts"):
        ours.multi([[2, 7, 3]])  # type: ignore[list-item]
    assert ours.multi([]) == []


def reference(query: np.ndarray, document: np.ndarray) -> float:
    """The paper's score: per token of the query its best match in the document, summed."""
    total = 0.0
    for token in query.astype(np.float64):
        total += max(float(token @ other) for other in document.astype(np.float64))
    return total


def test_maxsim(colbert: tuple[Any, Encoder], monkeypatch: pytest.MonkeyPatch) -> None:
    model, encoder = colbert
    queries = encoder.multi(TEXTS, query=True, long="truncate")
    documents = encoder.multi(TEXTS, long="truncate")
    scores = maxsim(queries, documents)
    want = model.similarity(model.encode_query(TEXTS), model.encode_document(TEXTS)).numpy()
    assert abs(scores - want).max() < 1e-4
    expected = [[reference(q, d) for d in documents] for q in queries]
    assert abs(scores - expected).max() < 1e-4
    assert abs(maxsim(documents, queries).T - expected).max() > 0.01, "the control"
    monkeypatch.setattr("packhorse.results.MAXSIM_NUMBERS", 100)
    assert np.allclose(maxsim(queries, documents), scores, atol=1e-5)
    none = np.empty((0, 12), np.float32)
    with_none = maxsim([none, *queries], [documents[0], none, *documents[1:], none])
    assert not with_none[0].any() and not with_none[:, 1].any() and not with_none[:, -1].any()
    assert np.allclose(with_none[1:, [0, *range(2, len(documents) + 1)]], scores, atol=1e-5)
    assert maxsim([none], documents).shape == (1, len(documents))


def test_rerank_by_tokens(ours: Encoder, quiet_runtime: Any) -> None:
    documents = ours.multi(TEXTS, long="truncate")
    scores = maxsim(ours.multi(["two sacks"], query=True), documents)[0]
    ranking = ours.rerank("two sacks", TEXTS, long="truncate")
    assert [r.index for r in ranking] == np.argsort(-scores, kind="stable").tolist()
    assert [r.score for r in ranking] == pytest.approx(sorted(scores, reverse=True), abs=1e-4)
    assert ours.rerank("two sacks", TEXTS, long="truncate", top_k=2) == ranking[:2]
    with PackRunner(ours, timeout=0) as runner:
        options: dict[str, Any] = {"documents": TEXTS, "long": "truncate"}
        ranked = runner.submit("two sacks", "rerank", **options).result(300)
        assert [r.index for r in ranked] == [r.index for r in ranking]


def test_filled_and_plain_sequences_share_batches(ours: Encoder, quiet_runtime: Any) -> None:
    """Queries with hidden tokens run beside documents without any, and each is as alone."""
    alone = [ours.multi([text], query=True, long="truncate")[0] for text in TEXTS]
    assert difference(ours.multi(TEXTS, query=True, long="truncate"), alone) < 1e-5
    plain = [ours.multi([text], long="truncate")[0] for text in TEXTS]
    with PackRunner(ours, timeout=0.5) as runner:
        asked = [runner.submit(text, "multi", query=True, long="truncate") for text in TEXTS]
        read = [runner.submit(text, "multi", long="truncate") for text in TEXTS]
        assert difference([future.result(300) for future in asked], alone) < 1e-5
        assert difference([future.result(300) for future in read], plain) < 1e-5
    bert = ours.backend.model.bert  # type: ignore[attr-defined]
    kernel = bert.kernel
    bert.use(kernel.inner)  # which lets all tokens be attended to
    try:
        assert difference(ours.multi(TEXTS, query=True, long="truncate"), alone) > 0.01, (
            "the control"
        )
    finally:
        bert.use(kernel)


@pytest.mark.parametrize("name", ["native", "bucketed", "reference", "mask", "repack"])
def test_hidden_keys_over_every_kernel(name: str) -> None:
    """Against torch's own attention with a mask, in float64 where the kernel has it."""
    kernel = attention.kernel(name)
    support = kernel.serves
    dtype = torch.float64 if support.dtypes is None else torch.float32
    lengths, keys = [9, 4, 12, 5], [6, 4, 1, 5]
    packed = Packed.build([[5] * length for length in lengths])
    packed = replace(packed, key_lengths=torch.tensor(keys))
    torch.manual_seed(0)
    qkv = torch.randn(sum(lengths), 3, 2, 8, dtype=dtype)
    scopes = [AttentionScope()]
    if support.windows and support.biases:
        scopes.append(AttentionScope(window=3, bias=torch.randn(2, 9, dtype=dtype)))
    for scope in scopes:
        hidden = HiddenKeys(kernel)
        if support.rows:
            packed = replace(packed, capacity=0)
        actual = hidden(qkv, hidden.plan(packed, scope=scope))
        for begin, length, count in zip(packed.starts.tolist(), lengths, keys, strict=True):
            q, k, v = qkv[begin : begin + length].permute(1, 2, 0, 3)
            mask = scope.bias_matrix(length)
            mask = torch.zeros(1, length, length, dtype=dtype) if mask is None else mask
            seen = torch.arange(length).expand(length, length) < count
            if (near := scope.visible(length, qkv.device)) is not None:
                seen = seen & near
            rows = seen.any(1)  # a token that sees none has no result
            mask = mask.masked_fill(~seen, float("-inf"))
            want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)
            got = actual[begin : begin + length]
            limit = 1e-10 if dtype == torch.float64 else 1e-5
            assert abs(got - want)[rows].max() < limit
            free = F.scaled_dot_product_attention(q, k, v).transpose(0, 1)
            assert count == length or abs(got - free)[rows].max() > 1e-3, "the control"


def test_a_neighbor_that_is_not_finite_stays_away(ours: Encoder) -> None:
    sequences = [
        job.sequences[0] for job in ours.prepare("multi", TEXTS[:3], query=True, long="truncate")
    ]
    packed = Packed.build(sequences)
    bert = ours.backend.model.bert  # type: ignore[attr-defined]

    def spoil(module: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        out[packed.cu_seqlens[1] : packed.cu_seqlens[2]] = float("nan")
        return out

    (clean,) = ours.backend(packed, ("multi",))
    hook = bert.embed.register_forward_hook(spoil)
    try:
        (spoiled,) = ours.backend(packed, ("multi",))
    finally:
        hook.remove()
    rows = packed.split(spoiled)
    assert rows[1].isnan().all()
    assert torch.equal(torch.cat([rows[0], rows[2]]), torch.cat([clean[:12], clean[24:]]))


def test_what_is_not_supported_is_refused(base: Path, tmp_path: Path) -> None:
    models.pylate(base, tmp_path / "model")
    with pytest.raises(InputError, match="that is not invariant"):
        packhorse.load(tmp_path / "model", invariant=True)
    models.pylate(base, tmp_path / "other", query_prefix="[Q] ")
    with pytest.raises(CheckpointError, match=r"marker '\[Q\] ' is not a token"):
        packhorse.load(tmp_path / "other")
    models.pylate(base, tmp_path / "third", document_length=-1)
    with pytest.raises(CheckpointError, match="document_length is -1"):
        packhorse.load(tmp_path / "third")


# bge-m3: dense, sparse and multi-vector outputs ----------------------------------------------


@pytest.fixture(scope="module")
def m3(base: Path) -> tuple[Encoder, torch.nn.Linear, torch.nn.Linear]:
    folder = base.parent / "m3"
    linears = models.m3(base, folder)
    return packhorse.load(folder), *linears


def by_rule(encoder: Encoder, base: Path, sparse: Any, vectors: Any) -> list[tuple[Any, Any, Any]]:
    """FlagEmbedding's public formulas, one text at a time, over transformers' hidden states."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = transformers.AutoModel.from_pretrained(base).double()
    unused = {tokenizer.cls_token_id, tokenizer.sep_token_id}
    unused |= {tokenizer.pad_token_id, tokenizer.unk_token_id}
    found: list[tuple[Any, Any, Any]] = []
    with torch.inference_mode():
        for text in TEXTS:
            ids = tokenizer(text, return_tensors="pt")
            states = model(**ids).last_hidden_state[0]
            dense = F.normalize(states[0], dim=0)
            weights = torch.relu(F.linear(states, sparse.weight.double(), sparse.bias.double()))
            row = np.zeros(len(models.VOCABULARY))
            for id, weight in zip(ids["input_ids"][0].tolist(), weights[:, 0], strict=True):
                if id not in unused:
                    row[id] = max(row[id], float(weight))
            tokens = F.linear(states[1:], vectors.weight.double(), vectors.bias.double())
            found.append((dense.numpy(), row, F.normalize(tokens, dim=-1).numpy()))
    return found


def test_three_outputs_of_one_pass(
    m3: tuple[Encoder, torch.nn.Linear, torch.nn.Linear], base: Path
) -> None:
    encoder, sparse, vectors = m3
    assert encoder.heads == ("pooled", "embed", "lexical", "multi")
    want = by_rule(encoder, base, sparse, vectors)
    runs: list[tuple[str, ...]] = []
    backend = encoder.backend

    def count(packed: Packed, heads: Any, at: Any = None) -> Any:
        runs.append(tuple(heads))
        return backend(packed, heads, at)

    found = replace(encoder, backend=count).outputs(TEXTS)
    assert runs == [("embed", "lexical", "multi")], "one pass"
    for i, (dense, row, tokens) in enumerate(want):
        assert abs(found["embed"][i] - dense).max() < 1e-5
        assert abs(found["sparse"].toarray()[i] - row).max() < 1e-5 * max(1.0, row.max())
        assert abs(found["multi"][i] - tokens).max() < 1e-5
    assert any(row.any() for _, row, _ in want) and found["sparse"].nnz < len(TEXTS) * 40
    # Each output by itself is the same, and none is that of another text.
    assert np.allclose(found["embed"], encoder.embed(TEXTS), atol=1e-6)
    assert abs(found["sparse"] - encoder.sparse(TEXTS)).max() < 1e-6
    assert difference(found["multi"], encoder.multi(TEXTS)) < 1e-6
    assert difference(found["multi"], encoder.multi(TEXTS[::-1])) > 0.01, "the control"
    assert set(encoder.outputs(TEXTS, ("sparse",))) == {"sparse"}
    with pytest.raises(InputError, match="no output 'dense'"):
        encoder.outputs(TEXTS, ("dense",))


def test_outputs_pool_a_prompt_as_each_does_by_itself(
    m3: tuple[Encoder, torch.nn.Linear, torch.nn.Linear],
) -> None:
    encoder = replace(m3[0], prompts={"document": f"{TEXTS[0]} "})
    head = copy.copy(encoder.embedder)
    assert head is not None
    head.include_prompt = False
    encoder = replace(encoder, embedder=head)
    expected = encoder.embed(TEXTS, prompt="document")
    for names in (("embed", "sparse"), ("sparse", "embed")):
        assert np.allclose(encoder.outputs(TEXTS, names)["embed"], expected, atol=1e-6)
    head.include_prompt = True
    assert abs(encoder.embed(TEXTS, prompt="document") - expected).max() > 1e-3, "the control"


@pytest.mark.parametrize("query", [True, False])
def test_the_prompt_that_is_told_is_the_one_that_runs(
    m3: tuple[Encoder, torch.nn.Linear, torch.nn.Linear], query: bool
) -> None:
    prompts = {"query": f"{TEXTS[1]} ", "document": f"{TEXTS[2]} "}
    encoder = replace(m3[0], prompts=prompts, default_prompt="document")
    for task in ("sparse", "multi"):
        told = task_prompt(encoder, task, TEXTS[:1], None, query)
        assert told == prompts["query" if query else "document"]
        (job,) = encoder.prepare(task, TEXTS[:1], query=query)
        (by_hand,) = encoder.prepare(task, [told + TEXTS[0]], query=query, prompt="")
        assert np.array_equal(job.sequences[0].ids, by_hand.sequences[0].ids)


def test_outputs_that_read_texts_differently_run_one_by_one(ours: Encoder) -> None:
    with pytest.raises(CheckpointError, match="no 'embed' head"):
        ours.outputs(TEXTS)
    (multi,) = ours.outputs(TEXTS, ("multi",), query=True, long="truncate").values()
    assert difference(multi, ours.multi(TEXTS, query=True, long="truncate")) < 1e-6


def test_a_head_whose_file_is_damaged_is_refused(
    m3: tuple[Encoder, torch.nn.Linear, torch.nn.Linear], base: Path, tmp_path: Path
) -> None:
    models.m3(base, tmp_path / "model")
    torch.save({"weight": torch.zeros(2, 32)}, tmp_path / "model" / "sparse_linear.pt")
    with pytest.raises(CheckpointError, match=r"sparse_linear\.pt"):
        packhorse.load(tmp_path / "model")
