"""Which task a body without one means, and the forms of answers that clients do not request."""

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
    from packhorse.serve.dialects.huggingface import TASK_NAMES, InferenceRequest, choose

    model, chosen = choose(server.models, name or None, InferenceRequest.model_validate(body))
    assert chosen == task and TASK_NAMES[task] in model.tasks


def test_both_paths_name_the_task(post):
    response = post("/pipeline/feature-extraction/tiny", {"inputs": "the cat"})
    assert response == post("/models/tiny/pipeline/feature-extraction", {"inputs": "the cat"})
    assert response[0] == 200 and len(response[1]) == 96
    same = post("/models/tiny/pipeline/sentence-similarity", {"inputs": "the cat"})
    assert same[0] == 422 and set(same[1]) == {"error"}
    assert post("/pipeline/translation/tiny", {"inputs": "the cat"})[0] == 422
    assert post("/pipeline/fill-mask/tiny", {"inputs": "the [MASK]"})[0] == 424
    assert post("/models/nobody", {"inputs": "the cat"})[0] == 404


def test_lists_are_answered_with_lists(post, server):
    labels = post("/models/judge", {"inputs": ["a cat", "a hat"], "parameters": {"top_k": 2}})[1]
    assert [len(scores) for scores in labels] == [2, 2]
    answers = post("/models/reader", {"inputs": [QUESTION, QUESTION]})[1]
    assert len(answers) == 2 and answers[0]["answer"] == answers[1]["answer"]
    nothing = post("/models/reader", {"inputs": {"question": "who ?", "context": ""}})[1]
    assert nothing == {"answer": "", "start": 0, "end": 0, "score": 0.0}
    names = post("/models/tagger", {"inputs": ["the cat", "a hat"]})[1]
    assert len(names) == 2 and names[0][0]["entity_group"] in ("CAT", "MAT")
    long = {"inputs": "the cat " * 60, "parameters": {"stride": 0}}
    assert post("/models/tagger", long)[1][-1]["end"] > 400


def write_tagger(folder, names):
    """Write a tiny token classification model that transformers and Packhorse can load."""
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


# The second piece of a split word never begins a name here; labeled "B-" it does in transformers.
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
    pipeline = transformers.pipeline("token-classification", model=folder, device="cpu")
    texts = [" ".join(random.choices(words.split(), k=12)) for _ in range(20)]
    joined = 0
    for strategy in ("none", "simple", "first", "average", "max"):
        kind = "entity" if strategy == "none" else "entity_group"
        body = {"inputs": texts, "parameters": {"aggregation_strategy": strategy}}
        expected = pipeline(texts, aggregation_strategy=strategy)
        for entities, reference in zip(served.post("/", body).json(), expected, strict=True):
            keys = (kind, "start", "end")
            assert [[e[k] for k in keys] for e in entities] == [
                [e[k] for k in keys] for e in reference
            ]
            scores = [float(entity["score"]) for entity in reference]
            assert [entity["score"] for entity in entities] == pytest.approx(scores, abs=1e-5)
            joined += sum(" " in entity["word"] for entity in entities)
    assert joined > 5, "where nothing is joined nothing is shown"


def test_unknown_aggregation_is_refused(post):
    body = {"inputs": "the cat", "parameters": {"aggregation_strategy": "median"}}
    status, error = post("/models/tagger", body)
    assert status == 422
    assert "parameters.aggregation_strategy: Input should be 'none', 'simple'" in error["error"]


def test_masks_of_one_text_nest(post):
    one_mask = post("/models/filler", {"inputs": "the [MASK]"})[1]
    two_masks = post("/models/filler", {"inputs": "the [MASK] [MASK]"})[1]
    assert isinstance(one_mask[0], dict) and [len(words) for words in two_masks] == [5, 5]
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
    status, error = post("/", body)
    assert status == 422 and set(error) == {"error"}
    assert post("/", {"inputs": []})[0] == 400
