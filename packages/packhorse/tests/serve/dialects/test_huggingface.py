"""What a body to one URL is taken for, and the shapes of answers beyond those a client asks for."""

from __future__ import annotations

import random

import pytest

VOCABULARY = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on a mat and saw one red hat old horse ##s"
QUESTION = {"question": "what ?", "context": "the cat sat on the mat"}


@pytest.mark.parametrize(
    ("name", "body", "task"),
    [
        ("", {"inputs": "the cat"}, "feature-extraction"),
        ("", {"inputs": QUESTION}, "question-answering"),
        ("", {"inputs": [QUESTION]}, "question-answering"),
        ("", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, "sentence-similarity"),
        ("", {"inputs": "a", "parameters": {"function_to_apply": "none"}}, "text-classification"),
        ("", {"inputs": "a", "parameters": {"ignore_labels": ["O"]}}, "token-classification"),
        ("", {"inputs": "a [MASK]", "parameters": {"targets": ["cat"]}}, "fill-mask"),
        ("filler", {"inputs": "the [MASK]"}, "fill-mask"),
        ("filler", {"inputs": "the cat"}, "feature-extraction"),
        ("filler", {"inputs": "a [MASK]", "normalize": False}, "feature-extraction"),
        ("judge", {"inputs": "the [MASK]"}, "text-classification"),
        ("tagger", {"inputs": ["the", "cat"]}, "token-classification"),
    ],
)
def test_body_and_heads_choose(server, name, body, task):
    from packhorse.serve.dialects.huggingface import OURS, InferenceRequest, choose

    host, chosen = choose(server.hosts, name or None, InferenceRequest.model_validate(body))
    assert chosen == task and OURS[task] in host.tasks


def test_both_paths_name_the_task(post):
    found = post("/pipeline/feature-extraction/tiny", {"inputs": "the cat"})
    assert found == post("/models/tiny/pipeline/feature-extraction", {"inputs": "the cat"})
    assert found[0] == 200 and len(found[1]) == 96
    same = post("/models/tiny/pipeline/sentence-similarity", {"inputs": "the cat"})
    assert same[0] == 422 and set(same[1]) == {"error"}
    assert post("/pipeline/translation/tiny", {"inputs": "the cat"})[0] == 422
    assert post("/pipeline/fill-mask/tiny", {"inputs": "the [MASK]"})[0] == 424
    assert post("/models/nobody", {"inputs": "the cat"})[0] == 404


def test_lists_are_answered_with_lists(post, server):
    labels = post("/models/judge", {"inputs": ["a cat", "a hat"], "parameters": {"top_k": 2}})[1]
    assert [len(each) for each in labels] == [2, 2]
    answers = post("/models/reader", {"inputs": [QUESTION, QUESTION]})[1]
    assert len(answers) == 2 and answers[0]["answer"] == answers[1]["answer"]
    nothing = post("/models/reader", {"inputs": {"question": "who ?", "context": ""}})[1]
    assert nothing == {"answer": "", "start": 0, "end": 0, "score": 0.0}
    names = post("/models/tagger", {"inputs": ["the cat", "a hat"]})[1]
    assert len(names) == 2 and names[0][0]["entity_group"] in ("CAT", "MAT")
    long = {"inputs": "the cat " * 60, "parameters": {"stride": 0}}
    assert post("/models/tagger", long)[1][-1]["end"] > 400


def write_tagger(folder, names):
    """A tiny tagger that transformers and we open."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=len(VOCABULARY.split()),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.3,
        id2label=dict(enumerate(names)),
        label2id={name: i for i, name in enumerate(names)},
    )
    transformers.set_seed(2)
    transformers.BertForTokenClassification(config).eval().save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY.split()))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return str(folder)


# A split word's second piece never begins a name here; labelled "B-" it does in transformers.
@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("O", "B-CAT", "I-CAT", "I-MAT"), "the cat sat on a mat and saw one old horse"),
        (("O", "I-CAT", "I-MAT"), "the cat cats sat on a mats and one hats old horses"),
    ],
)
def test_names_are_those_of_transformers(names, words, tmp_path, serving):
    import transformers

    import packhorse

    folder = write_tagger(tmp_path, names)
    served = serving(encoders=[packhorse.load(folder, device="cpu")])
    theirs = transformers.pipeline("token-classification", model=folder, device="cpu")
    texts, joined = [" ".join(random.choices(words.split(), k=12)) for _ in range(20)], 0
    for strategy, kind in (("none", "entity"), ("simple", "entity_group")):
        body = {"inputs": texts, "parameters": {"aggregation_strategy": strategy}}
        expected = theirs(texts, aggregation_strategy=strategy)
        for ours, wanted in zip(served.post("/", body).json(), expected, strict=True):
            keys = (kind, "start", "end")
            assert [[e[k] for k in keys] for e in ours] == [[e[k] for k in keys] for e in wanted]
            scores = [float(each["score"]) for each in wanted]
            assert [each["score"] for each in ours] == pytest.approx(scores, abs=1e-5)
            joined += sum(" " in each["word"] for each in ours)
    assert joined > 5, "where nothing is joined nothing is shown"


@pytest.mark.parametrize("strategy", ["first", "average", "max"])
def test_what_words_would_be_weighed_by_is_refused(post, strategy):
    body = {"inputs": "the cat", "parameters": {"aggregation_strategy": strategy}}
    status, told = post("/models/tagger", body)
    assert status == 422
    assert told == {"error": "parameters.aggregation_strategy: Input should be 'none' or 'simple'"}


def test_masks_of_one_text_nest(post):
    one = post("/models/filler", {"inputs": "the [MASK]"})[1]
    two = post("/models/filler", {"inputs": "the [MASK] [MASK]"})[1]
    assert isinstance(one[0], dict) and [len(each) for each in two] == [5, 5]
    batch = post("/models/filler", {"inputs": ["the [MASK]", "the [MASK] [MASK]"]})[1]
    assert isinstance(batch[0][0], dict) and isinstance(batch[1][0], list)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"inputs": None},
        {"inputs": {"question": "a"}},
        {"inputs": [QUESTION, "a"]},
        {"inputs": "a", "parameters": {"top_k": 0}},
        {"inputs": "a", "encoding_format": "base64"},
        {"inputs": QUESTION, "parameters": {"doc_stride": 10**9}},
    ],
)
def test_refusals(post, body):
    status, told = post("/", body)
    assert status == 422 and set(told) == {"error"}
    assert post("/", {"inputs": []})[0] == 400
