"""Each field of a request is honored, refused, or ignored and named in a header.

The fields of a dialect are read from its official client, if installed: the parameters of `openai`,
`cohere` and `huggingface_hub`. Those of other servers are from their API references:
text-embeddings-inference 1.8, Jina, Voyage, Mistral, vLLM, Infinity, NVIDIA NIM.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import warnings
from base64 import b64decode
from typing import Any

import numpy as np
import pytest

from packhorse.runtime.precision import quantize, unit_ranges
from packhorse.serve import calls

from .. import bodies

HEADER = "x-packhorse-ignored-fields"
QUESTION = {"question": "who sat ?", "context": "the cat sat"}
SIMILAR = {"source_sentence": "the cat", "sentences": ["a mat"]}
RANKED = {"query": "who sat", "documents": ["the cat", "a mat", "a red hat"]}
LONG = "the cat sat on a red mat " * 20
BODIES: dict[str, dict[str, Any]] = {
    "/embed": {"inputs": "the cat"},
    "/embed_all": {"inputs": "the cat"},
    "/embed_sparse": {"inputs": "the cat"},
    "/predict": {"inputs": "the cat"},
    "/rerank": {"query": "who sat", "texts": ["the cat", "a mat", "a red hat"]},
    "/similarity": {"inputs": SIMILAR},
    "/tokenize": {"inputs": "the cat"},
    "/decode": {"ids": [5, 6]},
    "/v1/embeddings": {"input": "the cat", "model": "tiny"},
    "/v1/embed": {"texts": ["the cat"], "model": "tiny"},
    "/v2/embed": {"texts": ["the cat"], "model": "tiny"},
    "/v1/classify": {"inputs": ["the cat"]},
    "/v1/tokenize": {"text": "the cat"},
    "/v1/detokenize": {"tokens": [5, 6]},
    "/v1/rerank": RANKED,
    "/v2/rerank": RANKED,
    "/pooling": {"input": "the cat"},
    "/score": {"text_1": "who sat", "text_2": "the cat"},
    "/v1/score": {"text_1": "who sat", "text_2": "the cat"},
    "/detokenize": {"tokens": [5, 6]},
    "/embeddings": {"input": "the cat", "model": "tiny"},
    "/invocations": {"inputs": "the cat"},
    "/vertex": {"instances": [{"inputs": "the cat"}]},
    "/": {"inputs": "the cat"},
    "/models/judge": {"inputs": "the cat"},
    "/pipeline/feature-extraction/tiny": {"inputs": "the cat"},
    "/models/tiny/pipeline/feature-extraction": {"inputs": "the cat"},
}


@pytest.fixture(scope="module")
def strict(listen, encoders) -> Any:
    return listen(encoders, strict_fields=True)


def ask(http: Any, path: str, **fields: Any) -> Any:
    return http.post(path, json=BODIES[path] | fields)


def test_every_route_of_a_dialect_is_here(server) -> None:
    """And no other route: our own routes refuse unknown fields."""
    paths = {
        path
        for path, item in server.app.openapi()["paths"].items()
        if "post" in item and item["post"]["tags"] != ["Packhorse"]
    }
    templates = {"/pipeline/{task}/{name}", "/models/{name}/pipeline/{task}", "/models/{name}"}
    assert paths == {path for path in BODIES if path.count("/") == 1 or path[1] == "v"} | templates


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_named_and_changes_nothing(http, path) -> None:
    plain = ask(http, path)
    response = ask(http, path, flavor="sweet", color=None)
    assert response.headers[HEADER] == "flavor, color" and HEADER not in plain.headers
    assert response.status_code == plain.status_code == (424 if path == "/embed_sparse" else 200)
    assert without_id(response.json()) == without_id(plain.json())


def without_id(document: Any) -> Any:
    """Return the document without random ids and times."""
    if isinstance(document, list):
        return [without_id(part) for part in document]
    if not isinstance(document, dict):
        return document
    names = document.keys() - {"id", "created"}
    return {name: without_id(document[name]) for name in names}


@pytest.mark.parametrize("path", BODIES)
def test_strict_fields_refuse_it(strict, path) -> None:
    import httpx

    url = strict.url + path
    refused = httpx.post(url, json=BODIES[path] | {"flavor": "sweet"})
    assert refused.status_code == 422 and "flavor" in refused.text
    assert httpx.post(url, json=BODIES[path]).status_code != 422


def test_our_own_routes_always_refuse_it(server, http) -> None:
    paths = [
        path
        for path, item in server.app.openapi()["paths"].items()
        if "post" in item and item["post"]["tags"] == ["Packhorse"]
    ]
    assert {"/answer", "/fill", "/classify", "/ner"} <= set(paths)
    for path in paths:
        refused = http.post(path, json=bodies.BODIES[path] | {"flavor": "sweet"})
        assert refused.status_code == 422 and "flavor" in refused.text, path


def test_inner_fields_are_named_by_their_path(http) -> None:
    response = http.post("/similarity", json={"inputs": SIMILAR | {"a": 1}, "parameters": {"b": 2}})
    assert response.headers[HEADER] == "inputs.a, parameters.b"
    questions = [QUESTION, QUESTION | {"hint": "cat"}, QUESTION | {"hint": "mat"}]
    response = http.post("/models/reader", json={"inputs": questions})
    assert (response.status_code, response.headers[HEADER]) == (200, "inputs.hint")


def test_names_cannot_break_the_header(http) -> None:
    names = ["a\r\nset-cookie: x", "é", "", "x" * 65, " ", "ok"]
    response = ask(http, "/embed", **dict.fromkeys(names, 1))
    assert response.headers[HEADER] == "ok, and 5 more" and "set-cookie" not in response.headers
    response = ask(http, "/embed", **{f"f{number}": 1 for number in range(500)})
    assert response.headers[HEADER].endswith("f15, and 484 more")


OF_THE_CLIENT = ("self", "request_options", "batching", "offline")  # never sent


def documented() -> list[tuple[str, str]]:
    """Return routes with the fields that official clients can send there."""
    import cohere
    import openai.types
    from huggingface_hub.inference._generated import types

    rows = [("/v1/embeddings", name) for name in openai.types.EmbeddingCreateParams.__annotations__]
    for path, client in (("/v1/rerank", cohere.Client), ("/v2/rerank", cohere.ClientV2)):
        names = inspect.signature(client.rerank).parameters
        rows += [(path, name) for name in names if name not in OF_THE_CLIENT]
    for path, method in {
        "/v1/embed": cohere.Client.embed,
        "/v2/embed": cohere.ClientV2.embed,
        "/v1/classify": cohere.Client.classify,
        "/v1/tokenize": cohere.Client.tokenize,
        "/v1/detokenize": cohere.Client.detokenize,
    }.items():
        names = inspect.signature(method).parameters
        rows += [(path, name) for name in names if name not in OF_THE_CLIENT]
    for kind, path in {
        "FeatureExtractionInput": "/models/tiny/pipeline/feature-extraction",
        "FillMaskParameters": "/models/filler",
        "QuestionAnsweringParameters": "/models/reader",
        "TextClassificationParameters": "/models/judge",
        "TokenClassificationParameters": "/models/tagger",
        "ZeroShotClassificationParameters": "/models/judge",
    }.items():
        rows += [(path, field.name) for field in dataclasses.fields(getattr(types, kind))]
    return rows


def test_what_the_clients_can_send_is_known(server) -> None:
    """No field that an official client can send is ignored as unknown."""
    from packhorse.serve.dialects import cohere, cohere_embed, huggingface, openai

    bodies = {
        "/v1/embeddings": openai.EmbeddingsRequest,
        "/v1/embed": cohere_embed.EmbedV1,
        "/v2/embed": cohere_embed.EmbedV2,
        "/v1/classify": cohere_embed.CohereClassifyRequest,
        "/v1/tokenize": cohere_embed.CohereTokenizeRequest,
        "/v1/detokenize": cohere_embed.CohereDetokenizeRequest,
        "/v1/rerank": cohere.RerankV1,
        "/v2/rerank": cohere.RerankV2,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = documented()
    assert len(rows) > 30
    for path, name in rows:
        assert name in bodies.get(path, huggingface.InferenceRequest).model_fields, (path, name)


# Fields that other servers document for a route: values that change nothing, and values refused.
HARMLESS = {
    "/v1/embeddings": [
        {"user": "me"},
        {"late_chunking": False},
        {"return_multivector": False},
        {"add_special_tokens": True},
        {"output_dtype": "float"},
        {"embed_dtype": "float32", "endianness": "little"},
        {"modality": "text"},
        {"input_type": None, "task": None},
        {"input_type": "document"},
        {"task": "text-matching"},
        {"embedding_type": ["float"]},
        {"embed_dtype": "float16", "endianness": "big"},
        {"input": [{"text": "the cat"}]},
        {"priority": 1, "request_id": "a"},
        {"embedding_type": "float"},
        {"encoding_format": "float"},
        {"normalize": True},
        {"normalized": True},
        {"truncation": True},
        {"truncate": "END"},
    ],
    "/rerank": [{"top_n": 9}, {"return_documents": False}, {"documents": None}],
    "/v1/rerank": [{"max_chunks_per_doc": 10}, {"truncation": True}, {"rank_fields": ["text"]}],
    "/v2/rerank": [{"use_activation": True}, {"priority": 1}, {"return_embeddings": False}],
    "/models/judge": [{"options": {"wait_for_model": True}}, {"parameters": {"padding": True}}],
}
REFUSED = {
    "/v1/embeddings": [
        {"encoding_format": "ubinary"},
        {"embedding_type": ["float", "binary"]},
        {"embedding_type": "binary", "output_dtype": "int8"},
        {"output_dtype": "int4"},
        {"embed_dtype": "fp8_e4m3"},
        {"endianness": "middle"},
        {"modality": "image"},
        {"input": [{"image": "data:image/png;base64,AAAA"}]},
        {"input": [{}]},
        {"return_multivector": True},
        {"add_special_tokens": False},
        {"truncate_prompt_tokens": 0},
        {"prompt_name": "nobody"},
    ],
    "/rerank": [{"documents": ["the cat"]}],
    "/v1/rerank": [{"max_doc_length": 9}, {"return_embeddings": True}],
    "/v2/rerank": [
        {"rank_fields": ["text"]},
        {"max_chunks_per_doc": 2},
        {"relevant_spans": {}},
        {"use_activation": False},
        {"truncate_prompt_tokens": 5},
    ],
    "/models/judge": [
        {"parameters": {"max_length": 9}},
        {"parameters": {"return_all_scores": False}},
    ],
    "/pipeline/feature-extraction/tiny": [
        {"parameters": {"candidate_labels": ["a"]}},
        {"parameters": {"function_to_apply": "none"}},
        {"parameters": {"top_k": 3}},
        {"encoding_format": "base64"},
    ],
}


def rows(table: dict[str, list[dict[str, Any]]]) -> list[Any]:
    return [
        pytest.param(path, fields, id=f"{path} {json.dumps(fields)}")
        for path, cases in table.items()
        for fields in cases
    ]


@pytest.mark.parametrize(("path", "fields"), rows(HARMLESS))
def test_what_changes_nothing_is_taken(http, path, fields) -> None:
    plain = without_id(ask(http, path).json())
    response = ask(http, path, **fields)
    assert response.status_code == 200 and HEADER not in response.headers
    document = without_id(response.json())
    # To rounding: a vector that is normalized twice may differ in its last digit.
    assert without_numbers(document) == without_numbers(plain)
    np.testing.assert_allclose(numbers(document), numbers(plain), rtol=1e-5, atol=1e-7)


def numbers(document: Any) -> list[float]:
    """Return all floats in a document, in order."""
    if isinstance(document, float):
        return [document]
    if isinstance(document, dict | list):
        parts = document.values() if isinstance(document, dict) else document
        return [number for part in parts for number in numbers(part)]
    return []


def without_numbers(document: Any) -> Any:
    """Return the document with a placeholder for each float."""
    if isinstance(document, dict):
        return {name: without_numbers(part) for name, part in document.items()}
    if isinstance(document, list):
        return [without_numbers(part) for part in document]
    return "float" if isinstance(document, float) else document


@pytest.mark.parametrize(("path", "fields"), rows(REFUSED))
def test_what_would_change_the_answer_is_refused(http, path, fields) -> None:
    refused = ask(http, path, **fields)
    assert refused.status_code == 422, refused.text
    if "parameters" not in fields:
        assert next(iter(fields)) in refused.text or "prompt" in refused.text


def vector(response: Any) -> np.ndarray:
    return np.array(response.json()["data"][0]["embedding"])


def test_honored_by_openai(http, server) -> None:
    encoder = server.encoder("tiny")
    route = "/v1/embeddings"
    whole = encoder.embed(["the cat"])[0]
    plain = encoder.embed(["the cat"], normalize=False)[0]
    assert abs(np.linalg.norm(plain) - 1) > 0.01
    for name in ("normalize", "normalized"):
        assert np.allclose(vector(ask(http, route, **{name: False})), plain, atol=1e-6)
    short = whole[:5] / np.linalg.norm(whole[:5])
    for name in ("dimensions", "output_dimension"):
        assert np.allclose(vector(ask(http, route, **{name: 5})), short, atol=1e-6)
    assert isinstance(ask(http, route, embedding_type="base64").json()["data"][0]["embedding"], str)
    query = encoder.embed(["the cat"], prompt="query")[0]
    assert np.allclose(vector(ask(http, route, prompt_name="query")), query, atol=1e-6)


def test_number_types_of_openai(http) -> None:
    whole = vector(ask(http, "/v1/embeddings")).astype(np.float32)
    for fields, precision in [
        ({"output_dtype": "int8"}, "int8"),
        ({"output_dtype": "uint8"}, "uint8"),
        ({"output_dtype": "binary"}, "binary"),
        ({"output_dtype": "ubinary", "embedding_type": "ubinary"}, "ubinary"),
        ({"embedding_type": "binary"}, "binary"),
        ({"embedding_type": ["ubinary"]}, "ubinary"),
    ]:
        expected = quantize(whole[None], precision, unit_ranges(len(whole)))[0]
        answer = ask(http, "/v1/embeddings", **fields)
        assert np.array_equal(vector(answer), expected), fields
        encoded = ask(http, "/v1/embeddings", encoding_format="base64", **fields).json()
        content = b64decode(encoded["data"][0]["embedding"])
        assert np.array_equal(np.frombuffer(content, expected.dtype), expected), fields
    halves = {"encoding_format": "base64", "embed_dtype": "float16", "endianness": "big"}
    encoded = ask(http, "/v1/embeddings", **halves).json()["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(b64decode(encoded), ">f2"), whole.astype(np.float16))


def test_purposes_of_openai(http, server) -> None:
    query = server.encoder("tiny").embed(["the cat"], prompt="query")[0]
    for fields in (
        {"task": "retrieval.query"},
        {"input_type": "query"},
        {"input_type": "search_query"},
        {"task": "retrieval.passage", "prompt_name": "query"},
    ):
        assert np.allclose(vector(ask(http, "/v1/embeddings", **fields)), query, atol=1e-6)


def test_late_chunking(http, server, monkeypatch) -> None:
    monkeypatch.setattr(calls, "GROUP_CHARACTERS", 8)  # other requests are tokenized in groups
    texts = ["the cat sat", "on a red mat .", "who saw"]
    body = {
        "model": "mini",
        "input": [{"text": text} for text in texts],
        "late_chunking": True,
        "dimensions": 8,
    }
    answer = ask(http, "/v1/embeddings", **body).json()
    encoder = server.encoder("mini")
    expected = encoder.embed(texts, late_chunking=True)[:, :8]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    actual = np.array([row["embedding"] for row in answer["data"]])
    assert np.allclose(actual, expected, atol=1e-6)
    tokens = len(encoder.tokenize([" ".join(texts)])[0])
    assert answer["usage"]["total_tokens"] == tokens
    for wrong in ([LONG] * 2, [[101, 5, 102]], ["a", " "]):
        refused = ask(http, "/v1/embeddings", **body | {"input": wrong})
        assert refused.status_code == 422, refused.text
    other = ask(http, "/v1/embeddings", late_chunking=True)
    assert other.status_code == 424 and "mean pooling" in other.text


def test_truncation_in_every_dialect_of_openai(http, server) -> None:
    encoder = server.encoder("tiny")
    route = "/v1/embeddings"
    right = encoder.embed([LONG], long="truncate")[0]
    from_left = encoder.embed([LONG], long="truncate_left")[0]
    assert not np.allclose(from_left, right, atol=1e-3)
    for fields, expected in [
        ({}, right),
        ({"truncate": True}, right),
        ({"truncate": "END"}, right),
        ({"truncation": True}, right),
        ({"truncate_prompt_tokens": -1}, right),
        ({"truncate_prompt_tokens": 7}, encoder.embed([LONG], max_length=7, long="truncate")[0]),
        ({"truncate": "START"}, from_left),
        ({"truncate": True, "truncation_direction": "Left"}, from_left),
    ]:
        response = ask(http, route, input=LONG, **fields)
        assert np.allclose(vector(response), expected, atol=1e-6), fields
    for fields in ({"truncate": False}, {"truncate": "NONE"}, {"truncation": False}):
        assert ask(http, route, input=LONG, **fields).status_code == 413


def test_honored_by_the_rankings(http, server) -> None:
    expected = server.encoder("ranker").rerank(RANKED["query"], RANKED["documents"], raw=True)
    logits = [ranked.score for ranked in expected]
    order = [ranked.index for ranked in expected]
    for path in ("/v1/rerank", "/v2/rerank"):
        results = ask(http, path, top_n=2, raw_scores=True).json()["results"]
        assert [result["index"] for result in results] == order[:2]
        assert np.allclose([result["relevance_score"] for result in results], logits[:2], atol=1e-5)
        long = ask(http, path, documents=[LONG, "a mat"], truncation=False)
        assert long.status_code == 413
        assert ask(http, path, documents=[LONG, "a mat"]).status_code == 200
    chunks = ask(http, "/v1/rerank", documents=[LONG], max_chunks_per_doc=2)
    assert chunks.status_code == 413
    shortened = ask(http, "/v1/rerank", documents=["the cat sat", "x"], max_tokens_per_doc=1)
    alone = ask(http, "/v1/rerank", documents=["the", "x"])
    assert [r["relevance_score"] for r in shortened.json()["results"]] == pytest.approx(
        [r["relevance_score"] for r in alone.json()["results"]], abs=1e-6
    )
    results = ask(http, "/rerank", top_n=1, return_documents=True).json()
    assert [(result["index"], result["text"]) for result in results] == [
        (order[0], RANKED["documents"][order[0]])
    ]


def test_honored_by_hugging_face(http, server) -> None:
    encoder = server.encoder("tiny")
    path = "/pipeline/feature-extraction/tiny"
    plain = encoder.embed(["the cat"], normalize=False)[0]
    for fields in ({"normalize": False}, {"parameters": {"normalize": False}}):
        assert np.allclose(ask(http, path, **fields).json(), plain, atol=1e-6)
    judged = http.post("/models/judge", json={"inputs": LONG})
    refused = http.post("/models/judge", json={"inputs": LONG, "parameters": {"truncation": False}})
    assert (judged.status_code, refused.status_code) == (200, 413)
    question = {"inputs": QUESTION, "parameters": {"max_question_len": 2}}
    assert http.post("/models/reader", json=question).status_code == 413
    question["parameters"]["max_question_len"] = 3
    assert http.post("/models/reader", json=question).status_code == 200
    overlapping = {"inputs": "the cat", "parameters": {"stride": 4}}
    assert http.post("/models/tagger", json=overlapping).status_code == 200
    names = http.post("/models/tagger", json=overlapping | {"inputs": LONG}).json()
    assert [(name["entity_group"], name["start"], name["end"]) for name in names] == [
        (entity.label, entity.start, entity.end)
        for entity in server.encoder("tagger").label([LONG], stride=4)[0]
    ]
    cut = http.post("/models/tagger", json={"inputs": LONG}).json()
    assert names[-1]["end"] > cut[-1]["end"]
    too_many = {"inputs": QUESTION, "parameters": {"top_k": 101}}
    assert http.post("/models/reader", json=too_many).status_code == 422
