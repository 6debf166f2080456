"""Cohere's embed, classify and tokenize: its own clients, and what they cannot send."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from packhorse.runtime.precision import quantize, unit_ranges

TEXTS = ["The horse carries the sacks to market.", "A mule, with no load.", "naïve café 日本 🐴"]
LONG = "the cat sat on a red mat " * 20
TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]


@pytest.fixture(scope="module")
def cohere(server):
    """Make a client of the class of that name; its sockets are closed afterwards."""
    import httpx

    module = pytest.importorskip("cohere")
    with httpx.Client() as http:
        yield lambda name: getattr(module, name)(
            api_key="none", base_url=server.url, httpx_client=http
        )


def close(values: Any, expected: Any) -> bool:
    return np.allclose(np.asarray(values, np.float64), np.asarray(expected), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pydantic, in the client
def test_embed_by_the_clients(cohere, server) -> None:
    encoder = server.encoder("mini")
    expected = encoder.embed(TEXTS)
    old = cohere("Client").embed(texts=TEXTS)
    assert old.response_type == "embeddings_floats" and old.texts == TEXTS
    assert close(old.embeddings, expected)
    typed = cohere("Client").embed(texts=TEXTS, model="mini", embedding_types=["float", "int8"])
    assert typed.response_type == "embeddings_by_type"
    assert close(typed.embeddings.float_, expected) and len(typed.embeddings.int8[0]) == 384
    new = cohere("ClientV2").embed(
        model="mini", input_type="search_document", texts=TEXTS, embedding_types=["float"]
    )
    assert close(new.embeddings.float_, expected)
    tokens = sum(map(len, encoder.tokenize(TEXTS)))
    assert new.meta.billed_units.input_tokens == tokens
    # The types are the default of v2 too.
    default = cohere("ClientV2").embed(model="mini", input_type="clustering", texts=TEXTS)
    assert close(default.embeddings.float_, expected) and default.embeddings.int8 is None


def test_every_type(cohere, server) -> None:
    vectors = server.encoder("mini").embed(TEXTS)
    response = cohere("ClientV2").embed(
        model="mini", input_type="classification", texts=TEXTS, embedding_types=TYPES
    )
    embeddings = response.embeddings
    assert close(embeddings.float_, vectors)
    decoded = [np.frombuffer(base64.b64decode(text), "<f4") for text in embeddings.base64]
    assert close(decoded, vectors)
    sent = np.array(embeddings.float_, np.float32)
    ranges = unit_ranges(384)
    for name in TYPES[1:5]:
        assert np.array_equal(getattr(embeddings, name), quantize(sent, name, ranges)), name


def test_inputs_of_parts(cohere, server) -> None:
    from cohere.errors import UnprocessableEntityError

    def embed(*parts: dict[str, Any]) -> Any:
        return cohere("ClientV2").embed(
            model="tiny", input_type="search_query", inputs=[{"content": list(parts)}]
        )

    response = embed({"type": "text", "text": "the cat"}, {"type": "text", "text": "a hat"})
    encoder = server.encoder("tiny")
    assert close(
        response.embeddings.float_, encoder.embed(["the cat\na hat"], prompt="query", max_length=48)
    )
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(UnprocessableEntityError, match="models read texts only"):
        embed(image)
    with pytest.raises(UnprocessableEntityError, match="models read texts only"):
        embed({"type": "text"})
    with pytest.raises(UnprocessableEntityError, match="models read texts only"):
        cohere("Client").embed(images=["data:image/png;base64,AAAA"], input_type="image")


def test_purposes_are_prompts(post, server) -> None:
    """The model has a prompt for queries, and none for documents."""
    encoder = server.encoder("tiny")
    plain, query = encoder.embed(["the cat"]), encoder.embed(["the cat"], prompt="query")
    assert not close(plain, query)
    for purpose, expected in [
        ("search_query", query),
        ("search_document", plain),
        ("classification", plain),
        (None, plain),
    ]:
        body = {"model": "tiny", "texts": ["the cat"], "input_type": purpose}
        assert close(post("/v1/embed", body)[1]["embeddings"], expected), purpose
        assert close(post("/v2/embed", body)[1]["embeddings"]["float"], expected), purpose


def test_lengths(post, server) -> None:
    encoder = server.encoder("tiny")
    body = {"model": "tiny", "texts": [LONG]}
    ends = {None: "truncate", "END": "truncate", "START": "truncate_left"}
    for truncate, long in ends.items():
        answer = post("/v1/embed", body | {"truncate": truncate})[1]
        assert close(answer["embeddings"], encoder.embed([LONG], long=long)), truncate
    for path in ("/v1/embed", "/v2/embed"):
        status, error = post(path, body | {"truncate": "NONE"})
        assert status == 413 and set(error) == {"message", "detail"}
    few = post("/v2/embed", body | {"max_tokens": 3, "output_dimension": 8})[1]
    expected = encoder.embed(["the cat sat"])[:, :8]
    expected /= np.linalg.norm(expected)
    assert close(few["embeddings"]["float"], expected)
    many = post("/v2/embed", body | {"max_tokens": 4096})[1]
    assert close(many["embeddings"]["float"], encoder.embed([LONG], long="truncate"))
    assert post("/v2/embed", body | {"max_tokens": 3, "truncate": "NONE"})[0] == 413


def test_classify(cohere, server) -> None:
    from cohere.errors import UnprocessableEntityError

    texts = ["the cat sat", "a bad hat"]
    response = cohere("Client").classify(inputs=texts, model="judge")
    for text, item, expected in zip(
        texts, response.classifications, server.encoder("judge").classify(texts), strict=True
    ):
        assert (item.input, item.prediction, item.predictions) == (
            text,
            expected.label,
            [expected.label],
        )
        assert item.confidence == pytest.approx(expected.score, abs=1e-6)
        scores = {label: value.confidence for label, value in item.labels.items()}
        assert scores == pytest.approx(expected.scores, abs=1e-6)
    from cohere import ClassifyExample

    examples = [ClassifyExample(text="the cat", label="good")]
    with pytest.raises(UnprocessableEntityError, match="serve a model that was trained with them"):
        cohere("Client").classify(inputs=texts, examples=examples, model="judge")


def test_tokens_and_back(cohere, server) -> None:
    """By the client's default, which first asks the server for the model's tokenizer."""
    tokenizer = server.encoder("mini").tokenizer
    tokens = cohere("Client").tokenize(text=TEXTS[2], model="mini")
    (encoding,) = tokenizer.encode([TEXTS[2]])
    assert tokens.tokens == encoding.ids[1:-1].tolist()
    assert tokens.token_strings == [tokenizer.token(id) for id in tokens.tokens]
    text = cohere("Client").detokenize(tokens=tokens.tokens, model="mini")
    assert text.text == tokenizer.decode(tokens.tokens) != ""


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/embed", {}, 400),
        ("/v1/embed", {"texts": []}, 400),
        ("/v1/embed", {"texts": [""]}, 400),
        ("/v1/embed", {"texts": ["a"], "embedding_types": []}, 422),
        ("/v1/embed", {"texts": ["a"], "embedding_types": ["int4"]}, 422),
        ("/v1/embed", {"texts": ["a"], "input_type": "image"}, 422),
        ("/v1/embed", {"texts": ["a"], "model": "embed-v4.0"}, 404),
        ("/v1/embed", {"texts": ["a"], "model": "judge"}, 424),
        ("/v2/embed", {"texts": ["a"], "inputs": []}, 422),
        ("/v2/embed", {"inputs": []}, 400),
        ("/v2/embed", {"texts": ["a"], "output_dimension": 5000}, 422),
        ("/v2/embed", {"texts": ["\ud800"]}, 422),
        ("/v1/classify", {"inputs": []}, 400),
        ("/v1/classify", {"inputs": ["a"], "model": "ranker"}, 424),
        ("/v1/classify", {"inputs": ["a"], "preset": "mine"}, 422),
        ("/v1/tokenize", {"text": ""}, 400),
        ("/v1/detokenize", {"tokens": []}, 400),
        ("/v1/detokenize", {"tokens": [99999]}, 422),
    ],
)
def test_refusals(http, path, body, status) -> None:
    headers = {"content-type": "application/json"}
    response = http.post(path, content=json.dumps(body), headers=headers)
    assert response.status_code == status, response.text
    assert set(response.json()) == {"message", "detail"}
