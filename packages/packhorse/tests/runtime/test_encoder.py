"""The encoder: every task over lists of any size, in order; what it refuses and what it says."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import packhorse
from packhorse.attention import KERNELS
from packhorse.attention import kernel as attention_kernel
from packhorse.errors import CheckpointError, InputError, KernelError
from packhorse.runtime.encoder import Encoder, TruncationWarning

pytestmark = pytest.mark.machine

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on a mat and saw one red hat . ? who what ##s"


@pytest.fixture(scope="module")
def encoder(minilm: Path) -> Encoder:
    return packhorse.load(minilm)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A tiny random model of any class of transformers, opened here."""
    import transformers

    def build(class_name: str, **options) -> Encoder:
        folder = tmp_path_factory.mktemp(class_name)
        config = transformers.BertConfig(
            vocab_size=len(WORDS.split()),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=48,
            max_position_embeddings=64,
            initializer_range=0.5,
            **options,
        )
        getattr(transformers, class_name)(config).eval().save_pretrained(folder)
        (folder / "vocab.txt").write_text("\n".join(WORDS.split()))
        return packhorse.load(folder)

    return build


def test_meaning_is_where_it_should_be(encoder: Encoder) -> None:
    texts = ["A man is eating food.", "Someone eats a meal.", "The stock market crashed today."]
    vectors = encoder.embed(texts)
    assert vectors.dtype == np.float32 and vectors.shape == (3, 384)
    cosines = vectors @ vectors.T
    assert cosines[0, 1] == pytest.approx(0.761, abs=1e-3)
    assert cosines[0, 2] == pytest.approx(0.009, abs=1e-3)
    assert cosines[1, 2] == pytest.approx(0.003, abs=1e-3)


def test_order_is_kept_and_batches_do_not_matter(minilm: Path, encoder: Encoder) -> None:
    texts = ["word " * (1 + 37 * i % 90) for i in range(60)]
    small = packhorse.load(minilm, budget=64)
    seen: list[tuple[int, int]] = []
    a = encoder.embed(texts)
    b = small.embed(texts, progress=lambda count, total: seen.append((count, total)))
    assert np.abs(a - b).max() <= 1e-5
    assert seen[-1] == (60, 60) and len(seen) > 5
    assert [count for count, _ in seen] == sorted(count for count, _ in seen)
    assert np.abs(encoder.embed(texts[7:8]) - a[7:8]).max() <= 1e-5


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "varlen"])
def test_every_kernel_gives_the_same_vectors(minilm: Path, encoder: Encoder, kernel: str) -> None:
    if refusal := attention_kernel(kernel).serves.refusal(torch.device("cpu"), torch.float32):
        pytest.skip(refusal)
    texts = ["short", "a somewhat longer text than that", "w " * 100, ""]
    loaded = packhorse.load(minilm, kernel=kernel)
    assert loaded.kernel == kernel
    assert np.abs(loaded.embed(texts) - encoder.embed(texts)).max() <= 1e-5


def test_bf16_stays_close(minilm: Path, encoder: Encoder) -> None:
    texts = ["short", "a somewhat longer text than that", "w " * 100]
    vectors = packhorse.load(minilm, dtype="bf16").embed(texts)
    assert (vectors * encoder.embed(texts)).sum(1).min() >= 0.9995


def test_auto_takes_a_format_that_stays_close(minilm: Path, encoder: Encoder) -> None:
    chosen = packhorse.load(minilm, dtype="auto")
    texts = ["one text", "and another text"]
    assert (chosen.embed(texts) * encoder.embed(texts)).sum(1).min() >= 0.999


def test_truncation_is_never_silent(encoder: Encoder) -> None:
    with pytest.warns(TruncationWarning, match="1 of 2 texts were cut to 256 tokens"):
        encoder.embed(["short", "long " * 400])
    with pytest.warns(TruncationWarning, match="cut to 8 tokens"):
        encoder.embed(["one two three four five six seven eight nine"], max_length=8)


def test_hidden_states_and_pooled_output(encoder: Encoder) -> None:
    first, second = encoder.hidden(["Hello world!", "Hi"])
    assert first.tokens == ("[CLS]", "hello", "world", "!", "[SEP]")
    assert first.states.shape == (5, 384) and second.states.shape == (3, 384)
    assert first.pooled is not None and np.abs(first.pooled).max() <= 1
    assert np.abs(encoder.hidden(["Hi"])[0].states - second.states).max() <= 1e-5


def test_no_texts_give_no_vectors(encoder: Encoder) -> None:
    assert encoder.embed([]).shape == (0, 384)
    assert encoder.hidden([]) == []


def test_a_missing_head_is_refused_by_name(encoder: Encoder) -> None:
    for call, head in [
        (lambda: encoder.classify(["x"]), "classify"),
        (lambda: encoder.answer([("q", "c")]), "span"),
        (lambda: encoder.fill(["x [MASK]"]), "mlm"),
        (lambda: encoder.label(["x"]), "tokens"),
        (lambda: encoder.rerank("q", ["d"]), "classify"),
    ]:
        with pytest.raises(CheckpointError, match=f"no '{head}' head .it has: pooled, embed"):
            call()


def test_classify_and_rerank(make) -> None:
    three = make("BertForSequenceClassification", num_labels=3)
    texts = ["the cat", ("the cat sat", "on a mat"), "a red hat ."]
    results = three.classify(texts)
    for result, text in zip(results, texts, strict=True):
        assert sum(result.scores.values()) == pytest.approx(1)
        assert result.label == max(result.scores, key=lambda k: result.scores[k])
        assert three.classify([text])[0].score == pytest.approx(result.score, abs=1e-5)
    with pytest.raises(CheckpointError, match="needs a head with one output"):
        three.rerank("cat", ["the cat"])

    result = make("BertForSequenceClassification", num_labels=1)
    documents = ["the cat", "a red hat", "one mat saw a cat", "who ?"]
    ranking = result.rerank("what cat", documents)
    scores = [r.score for r in ranking]
    assert scores == sorted(scores, reverse=True)
    assert sorted(r.index for r in ranking) == [0, 1, 2, 3]
    assert all(documents[r.index] == r.text for r in ranking)
    assert result.rerank("what cat", documents, top_k=2) == ranking[:2]


def test_answers_come_from_the_context(make) -> None:
    model = make("BertForQuestionAnswering")
    # A question that leaves little room: windows are small, and share what they can.
    tight = model.answer([("what ? " * 26, "one red hat and a cat . " * 4)])
    assert len(tight[0]) == 1
    short = "the cat sat on a mat"
    long = "one red hat and the cat saw a mat . " * 12
    answers = model.answer([("who sat ?", short), ("what ?", long)], top_k=3)
    for group, context in zip(answers, (short, long), strict=True):
        assert 1 <= len(group) <= 3
        assert [a.score for a in group] == sorted((a.score for a in group), reverse=True)
        for answer in group:
            assert context[answer.start : answer.end] == answer.text != ""
    alone = model.answer([("what ?", long)], top_k=3)[0]
    assert [a.text for a in alone] == [a.text for a in answers[1]]


def test_fill_puts_words_for_masks(make) -> None:
    model = make("BertForMaskedLM")
    (first, second), (single,) = model.fill(["the [MASK] sat on a [MASK] .", "a [MASK]"], top_k=3)
    assert len(first) == len(second) == len(single) == 3
    assert first[0].text == f"the {first[0].word} sat on a [MASK] ."
    assert second[0].text == f"the [MASK] sat on a {second[0].word} ."
    assert first[0].score >= first[1].score
    with pytest.raises(InputError, match=r"text 1 has no \[MASK\] to fill"):
        model.fill(["a [MASK]", "the cat"])


def test_labels_mark_stretches_of_text(make) -> None:
    names = {0: "O", 1: "B-CAT", 2: "I-CAT"}
    model = make(
        "BertForTokenClassification", id2label=names, label2id={v: k for k, v in names.items()}
    )
    text = "the cat sat on a mat and saw one red hat"
    for entity in model.label([text])[0]:
        assert entity.label == "CAT"
        assert text[entity.start : entity.end] == entity.text


def test_it_says_why_it_is_not_copied(encoder: Encoder) -> None:
    for way in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"cannot be pickled or copied; load it where"):
            way(encoder)


def test_bad_choices_get_clear_errors(minilm: Path, encoder: Encoder) -> None:
    for options, kind, message in [
        ({"device": "cuda:99"}, InputError, "not available|does not exist"),
        ({"device": "moon"}, InputError, "unknown device"),
        ({"dtype": "int7"}, InputError, "unknown dtype 'int7'"),
        ({"dtype": torch.int16}, InputError, "unknown dtype"),
        ({"budget": 0}, InputError, "budget"),
        ({"kernel": "repack", "graphs": True}, KernelError, "'repack' makes a new plan"),
        ({"kernel": "magic"}, KernelError, "there are"),
        ({"kernel": "varlen"}, KernelError, "it runs on cuda, not on cpu; use"),
    ]:
        with pytest.raises(kind, match=message):
            packhorse.load(minilm, **options)
    with pytest.raises(InputError, match="takes 256 tokens"):
        encoder.embed(["x"], max_length=300)
    with pytest.raises(InputError, match="no prompt 'query'"):
        encoder.embed(["x"], prompt="query")


def test_repr_says_how_it_runs(encoder: Encoder) -> None:
    assert "cpu (" in repr(encoder) and "fp32" in repr(encoder) and encoder.kernel in repr(encoder)


@pytest.mark.slow
def test_sts_benchmark(shared_data: Path, encoder: Encoder) -> None:
    """The published quality of the model survives: Spearman 0.867 on STS-B dev."""
    import csv

    from scipy.stats import spearmanr

    text = (shared_data / "glue" / "stsb-en-dev.csv").read_text(encoding="utf-8")
    rows = list(csv.reader(text.splitlines()))
    first_vectors = encoder.embed([row[0] for row in rows])
    right = encoder.embed([row[1] for row in rows])
    correlation = spearmanr((first_vectors * right).sum(1), [float(row[2]) for row in rows])
    assert correlation.statistic == pytest.approx(0.8672, abs=5e-4)


def test_a_tokenizer_outside_the_folder_is_not_read(minilm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (folder / name).write_bytes((minilm / name).read_bytes())
    (folder / "tokenizer.json").symlink_to(minilm / "tokenizer.json")
    with pytest.raises(CheckpointError, match="outside the model's folder"):
        packhorse.load(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_bytes((minilm / "tokenizer.json").read_bytes())
    assert packhorse.load(folder).embed(["x"]).shape == (1, 384)


def test_auto_works_under_a_named_kernel(minilm: Path) -> None:
    chosen = packhorse.load(minilm, dtype="auto", kernel="bucketed")
    assert chosen.kernel == "bucketed"
