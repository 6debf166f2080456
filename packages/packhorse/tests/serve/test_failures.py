"""Errors about a body that does not fit the schema name the field and the item."""

from __future__ import annotations

import json
from typing import Any

import pytest

QUESTION = {"question": "what ?", "context": "the cat sat"}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/rerank", {"texts": ["a"]}, "query: Field required"),
        ("/rerank", {"query": 5, "texts": ["a"]}, "query: Input should be a valid string"),
        ("/rerank", {"query": "a", "texts": ["a", 5]}, "texts.1: Input should be a valid string"),
        ("/v1/rerank", {"documents": ["a"]}, "query: Field required"),
        ("/v1/rerank", {"query": 5, "documents": ["a"]}, "query: Input should be a valid string"),
        (
            "/v1/rerank",
            {"query": "a", "documents": ["a", {"text": 5}]},
            "documents.1.text: Input should be a valid string",
        ),
        ("/embed", {"inputs": ["a", 5]}, "inputs.1: Input should be a valid string"),
        ("/embed", {"inputs": [7, "a"]}, "inputs.1: Input should be a valid integer"),
        ("/embed", {"inputs": ["a", [7, "b"]]}, "inputs.1.1: Input should be a valid integer"),
        ("/embed", {"inputs": 5}, "inputs: Input should be a valid string"),
        ("/embed", [], "the body: Input should be a valid dictionary"),
        ("/v1/embeddings", {"input": [[7], "a"]}, "input.1: Input should be a valid list"),
        ("/predict", {"inputs": [["a"], ["b", 5]]}, "inputs.1.1: Input should be a valid string"),
        ("/classify", {"inputs": [["a", 5]]}, "inputs.0.1: Input should be a valid string"),
        ("/", {"inputs": {"question": "a"}}, "inputs.context: Field required"),
        ("/", {"inputs": {"question": 5}}, "inputs.question: Input should be a valid string"),
        ("/", {"inputs": [QUESTION, "a"]}, "inputs.1: Input should be a valid dictionary"),
        ("/pipeline/query/tiny", {"inputs": "a"}, "task: Input should be 'feature-extraction'"),
    ],
)
def test_what_is_wrong_is_named(served, path: str, body: Any, expected: str) -> None:
    answer = served.post(path, body)
    document = answer.json()
    message = document.get("message") or document["error"]
    message = message["message"] if isinstance(message, dict) else message
    assert answer.status_code == 422 and message.startswith(expected), document


@pytest.mark.parametrize(
    ("content", "status", "param"),
    [
        (b"{", 400, None),
        (b'{"input": ["a", 5]}', 422, "input"),
        (b'{"input": "a", "dimensions": "5"}', 422, "dimensions"),
    ],
)
def test_openai_errors_name_the_parameter(served, content: bytes, status: int, param: Any) -> None:
    headers = {"content-type": "application/json"}
    answer = served.post("/v1/embeddings", content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_errors_about_embeddings_have_what_clients_of_openai_and_of_jina_read(served) -> None:
    answer = served.post("/v1/embeddings", {"input": "a", "model": "none"}).json()
    assert answer["detail"] == answer["error"]["message"] and "served" in answer["detail"]
    assert "detail" not in served.get("/v1/models/none").json()


def test_a_client_that_names_no_content_type_is_read_and_told_what_is_wrong(served) -> None:
    def post(content: bytes, **headers: str) -> Any:
        return served.post("/v1/embeddings", content=content, headers=headers)

    assert post(b'{"input": "the cat"}').status_code == 200
    assert post(b'{"input": 5}').json()["error"]["param"] == "input"
    assert post(b'{"input": "the cat"}', origin="https://other.example").status_code == 415


def test_what_was_sent_is_not_repeated_at_length(served) -> None:
    documents = [{"brown mule " * 100 + str(i): i for i in range(500)}]
    answer = served.post("/v1/rerank", {"query": "a", "documents": documents})
    assert answer.status_code == 422 and len(json.dumps(answer.json())) < 500
