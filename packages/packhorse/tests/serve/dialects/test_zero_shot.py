"""Zero-shot classification gives the scores of transformers' pipeline for the same model."""

from __future__ import annotations

from typing import Any

import pytest

VOCABULARY = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on a mat and saw one red hat . ? who what poison"
    " horse mule carries sacks to market is good bad old brown with no load this example text about"
)
TEXT = "the old brown horse carries sacks to market"
LABELS = ["horse", "red hat", "poison", "market"]
ORDERS = [
    ("contradiction", "neutral", "entailment"),
    ("entailment", "neutral", "contradiction"),
    ("CONTRADICTION", "ENTAILMENT", "NEUTRAL"),
    ("entailment", "not_entailment"),
]


def write(folder: Any, labels: tuple[str, ...]) -> str:
    """Write a tiny language inference model that transformers and Packhorse can load."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=len(VOCABULARY.split()),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.4,
        id2label=dict(enumerate(labels)),
        label2id={name: i for i, name in enumerate(labels)},
    )
    transformers.set_seed(3)
    transformers.BertForSequenceClassification(config).eval().save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY.split()))
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=64)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=ORDERS, ids="-".join)
def pair(request, tmp_path_factory, listen) -> tuple[Any, Any]:
    """Our server and transformers' pipeline for the same model."""
    import transformers

    import packhorse

    folder = write(tmp_path_factory.mktemp("nli"), request.param)
    server = listen({"nli": packhorse.load(folder, device="cpu")})
    return server, transformers.pipeline("zero-shot-classification", model=folder, device="cpu")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"multi_label": True},
        {"hypothesis_template": "this text is about a {} ."},
        {"hypothesis_template": "{} ?", "multi_label": True},
        {"candidate_labels": ["horse"]},
        {"candidate_labels": "horse, red hat ,market"},
    ],
    ids=str,
)
@pytest.mark.parametrize("text", [TEXT, TEXT + " and saw one mat" * 30], ids=["short", "long"])
def test_scores_are_those_of_transformers(pair, options, text) -> None:
    import httpx

    server, pipeline = pair
    options = {"candidate_labels": LABELS} | options
    expected = pipeline(text, **options)
    labels = httpx.post(server.url, json={"inputs": text, "parameters": options}).json()
    assert [row["label"] for row in labels] == expected["labels"]
    assert [row["score"] for row in labels] == pytest.approx(expected["scores"], abs=1e-5)
    # Equal scores would make the comparison meaningless.
    assert len(labels) == 1 or labels[0]["score"] - labels[-1]["score"] > 1e-3


def test_the_official_client(pair, monkeypatch) -> None:
    from huggingface_hub import InferenceClient, close_session, constants

    server, pipeline = pair
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    client = InferenceClient(model=server.url)
    labels = client.zero_shot_classification(TEXT, LABELS, multi_label=True)
    close_session()
    expected = pipeline(TEXT, LABELS, multi_label=True)
    assert [element.label for element in labels] == expected["labels"]
    assert [element.score for element in labels] == pytest.approx(expected["scores"], abs=1e-5)


def test_several_texts_and_a_named_task(pair) -> None:
    import httpx

    server, pipeline = pair
    texts = [TEXT, "who saw a cat"]
    body = {"parameters": {"candidate_labels": LABELS}}
    url = f"{server.url}/pipeline/zero-shot-classification/nli"
    actual = httpx.post(url, json=body | {"inputs": texts}).json()
    for rows, expected in zip(actual, pipeline(texts, LABELS), strict=True):
        assert [row["label"] for row in rows] == expected["labels"]


def test_what_is_no_model_of_inference_refuses(post, server) -> None:
    body = {"inputs": TEXT, "parameters": {"candidate_labels": LABELS}}
    for path in ("/models/judge", "/pipeline/zero-shot-classification/judge", "/models/tiny", "/"):
        status, document = post(path, body)
        assert status == 424 and "entailment" in document["error"], path
    status, document = post("/pipeline/text-classification/judge", body)
    assert status == 422 and "candidate_labels" in document["error"]


@pytest.mark.parametrize(
    ("parameters", "status"),
    [
        ({"candidate_labels": []}, 400),
        ({"candidate_labels": " , "}, 400),
        ({"candidate_labels": ["horse", ""]}, 400),
        ({"multi_label": True}, 400),
        ({"candidate_labels": 5}, 422),
        ({"candidate_labels": LABELS, "hypothesis_template": "no hole"}, 422),
        ({"candidate_labels": LABELS, "hypothesis_template": "{} and {}"}, 422),
        ({"candidate_labels": LABELS, "hypothesis_template": "{0.__class__}"}, 422),
        ({"candidate_labels": LABELS, "hypothesis_template": "{!r} {}"}, 422),
        ({"candidate_labels": ["horse " * 40]}, 413),
        ({"candidate_labels": ["horse"] * 2049}, 413),
        ({"candidate_labels": LABELS, "top_k": 2}, 422),
    ],
)
def test_refusals(pair, parameters, status) -> None:
    import httpx

    body = {"inputs": TEXT, "parameters": parameters}
    assert httpx.post(pair[0].url, json=body).status_code == status
