"""The front of a server of replicas: the same answers, and requests that outlive their replica.

The replicas are applications in this process, called without Ray, whose errors are scripted. Tests
with a real cluster are in test_cluster.py.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from packhorse.errors import RunnerStopped
from packhorse.serve import ingress
from packhorse.serve.app import guarded
from packhorse.serve.ingress import (
    ForwardedRequest,
    ForwardedResponse,
    ReplicaAway,
    ReplicaDied,
    ReplicaPool,
)
from packhorse.serve.metrics import runner_figures

from .conftest import Served

MINE = ForwardedResponse(200, (), b"mine")
ASKED = ForwardedRequest("POST", "/embed")
RANDOM = re.compile(rb'"(id|created)":("[-\w]*"|\d+)')  # of /v1/embeddings
TIMES = re.compile(r"x-.*-time|x-packhorse-pack|x-request-id|traceparent")


def front(replica: Served, ask: Any = None, **settings: Any) -> Served:
    """Make a server whose only replica is the application of another server."""

    async def straight(question: ForwardedRequest) -> ForwardedResponse:
        return await ingress.run_forwarded(replica.guard.app, question)

    pool = ReplicaPool(ask or straight, ask or straight)
    pool.figures = [runner_figures(model, replica="r1") for model in replica.models]
    chosen = replace(replica.settings, **settings)
    models = ingress.remote_models([ingress.model_card(model) for model in replica.models], pool)
    app, guard = guarded(ingress.create(chosen, models, pool))
    return Served(app, guard, models, chosen)


def script(
    *events: Any,
) -> tuple[Callable[[ForwardedRequest], Awaitable[ForwardedResponse]], list[ForwardedRequest]]:
    """Make replicas that answer or raise these, one after the other; the last is repeated."""
    requests: list[ForwardedRequest] = []

    async def ask(question: ForwardedRequest) -> ForwardedResponse:
        event = events[min(len(requests), len(events) - 1)]
        requests.append(question)
        await asyncio.sleep(0)
        if isinstance(event, ForwardedResponse):
            return event
        raise event

    return ask, requests


# The same as in one process --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/embed", {"inputs": ["the cat sat", "on a mat"]}),
        ("POST", "/v1/embeddings", {"input": "the cat", "model": "tiny"}),
        ("POST", "/v1/embeddings", {"input": "the cat", "model": "none"}),  # 404
        ("POST", "/predict", {"inputs": "the cat"}),
        ("POST", "/answer", {"question": "who sat ?", "context": "the cat sat"}),
        ("POST", "/rerank", {"query": "cat", "texts": ["a mat", "the cat"]}),
        ("POST", "/embed_sparse", {"inputs": "the cat"}),
        ("POST", "/embed_multi", {"inputs": "the cat"}),
        ("POST", "/ner", {"inputs": "the cat", "model": "tiny"}),  # 424
        ("POST", "/v1/embeddings", {"input": "the cat " * 40, "model": "tiny"}),  # truncated
        ("POST", "/embed", {"inputs": ["a"] * 2049}),  # 413
        ("POST", "/embed", {"inputs": ""}),  # 400
        ("POST", "/embed", {"text": "a"}),  # 422
        ("POST", "/nowhere", {}),  # 404
        ("POST", "/health", {}),  # 405
        ("GET", "/info", None),
        ("GET", "/version", None),
        ("GET", "/ready", None),
        ("GET", "/openapi.json", None),
        ("GET", "/", None),
    ],
)
def test_the_same_answer(served: Served, method: str, path: str, body: Any) -> None:
    near, far = (server.ask(method, path, json=body) for server in (served, front(served)))
    assert far.status_code == near.status_code
    assert RANDOM.sub(b"", far.content) == RANDOM.sub(b"", near.content)
    headers = [
        {name: value for name, value in response.headers.items() if not TIMES.fullmatch(name)}
        for response in (near, far)
    ]
    assert headers[0] == headers[1]
    assert set(near.headers) == set(far.headers)


def test_keys_and_limits_are_the_doors(served: Served) -> None:
    ask, requests = script(MINE)
    closed = front(served, ask, keys=("sesame",), max_body_bytes=30)
    assert closed.post("/embed", {"inputs": "a"}).status_code == 401
    assert closed.get("/nowhere").status_code == 401
    key = {"authorization": "Bearer sesame", "cookie": "a=b", "x-other": "kept"}
    assert closed.post("/embed", {"inputs": "a" * 30}, headers=key).status_code == 413
    assert not requests
    assert closed.post("/embed?a=b", {"inputs": "a"}, headers=key).content == b"mine"
    (question,) = requests
    assert (question.method, question.path, question.query) == ("POST", "/embed", b"a=b")
    assert question.body == b'{"inputs":"a"}'
    assert "sesame" not in str(question.headers) and b"cookie" not in dict(question.headers)
    assert dict(question.headers)[b"x-other"] == b"kept"


def test_what_a_replica_truncated_is_told_and_counted_here(served: Served, caplog) -> None:
    far = front(served, keys=("first", "second"))
    second = {"authorization": "Bearer second"}
    body = {"input": ["the cat " * 40, "a mat"], "model": "tiny"}
    for _ in range(2):
        response = far.post("/v1/embeddings", body, headers=second)
        assert (response.status_code, response.headers["x-packhorse-truncated"]) == (200, "1")
    metrics = far.get("/metrics", headers=second).text
    assert 'packhorse_truncated_inputs_total{key="key2",model="tiny"} 2.0' in metrics
    assert [record.message.count("key2 sent texts") for record in caplog.records] == [1]


def test_figures_are_counted_here_and_told_by_replica(served: Served) -> None:
    far = front(served)
    assert far.post("/embed", {"inputs": ["the cat", "a mat"]}).status_code == 200
    assert far.post("/embed", {"inputs": ""}).status_code == 400
    metrics = far.get("/metrics").text
    assert 'packhorse_requests_total{route="/embed",status="200"} 1.0' in metrics
    assert "packhorse_inputs_total 2.0" in metrics
    assert 'packhorse_errors_total{kind="Empty"} 1.0' in metrics
    assert 'packhorse_up{model="tiny",replica="r1"} 1.0' in metrics
    # Without the times at which a label was first used, which differ.
    kind = re.compile(r"^# TYPE (\w+(?<!_created)) ", re.MULTILINE)
    names = [set(kind.findall(text)) for text in _pages(served, far)]
    assert names[0] == names[1]


def _pages(*servers: Served) -> list[str]:
    return [server.get("/metrics").text for server in servers]


def test_what_a_mistake_in_a_replica_looks_like(served: Served, caplog) -> None:
    ask, _ = script(ZeroDivisionError("secret"))
    response = front(served, ask).post("/embed", {"inputs": "a"})
    assert (response.status_code, "secret" in response.text) == (500, False)


def test_busy_replicas_say_when_to_come_back(serving) -> None:
    replica = serving(max_concurrent_requests=1)
    far = front(replica)

    async def work(client: Any) -> list[Any]:
        return await asyncio.gather(
            *[client.post("/embed", json={"inputs": "the cat"}) for _ in range(5)]
        )

    responses = far.run(work)
    assert sorted({response.status_code for response in responses}) == [200, 429]
    assert all(
        "retry-after" in response.headers for response in responses if response.status_code == 429
    )
    assert far.guard.in_flight == 0


# Replicas that die -----------------------------------------------------------------------------


def test_a_request_outlives_its_replica() -> None:
    ask, requests = script(ReplicaDied("one"), ReplicaDied("two"), MINE)
    assert asyncio.run(ReplicaPool(ask, ask).send(ASKED)) is MINE
    assert requests == [ASKED] * 3


def test_but_does_not_kill_them_all(served: Served) -> None:
    ask, requests = script(ReplicaDied("again"))
    response = front(served, ask).post("/embed", {"inputs": "a"})
    assert (response.status_code, len(requests)) == (503, ingress.MAX_DEATHS)
    assert "replicas died" in response.json()["error"]


def test_it_waits_for_one_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "RETRY_SECONDS", 0.001)
    ask, requests = script(*[ReplicaAway("not yet")] * 20, MINE)
    assert asyncio.run(ReplicaPool(ask, ask).send(ASKED)) is MINE
    assert len(requests) == 21


def test_but_not_for_ever() -> None:
    ask, _ = script(ReplicaAway("never"))
    before = time.monotonic()
    with pytest.raises(RunnerStopped, match=r"within 0\.2 s"):
        asyncio.run(ReplicaPool(ask, ask, timeout=0.2).send(ASKED))
    assert time.monotonic() - before < 5


def test_a_loss_is_logged_once(caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    async def many() -> None:
        ask, _ = script(*[ReplicaDied("")] * 8, MINE)
        pool = ReplicaPool(ask, ask)
        await asyncio.gather(*[pool.send(ASKED) for _ in range(8)])

    monkeypatch.setattr(ingress.LOGGER, "propagate", True)
    asyncio.run(many())
    assert [
        record.message for record in caplog.records if "a replica was lost" in record.message
    ] == ["a replica was lost; its requests are sent to another"]


def test_the_engine_is_drawn_from_one_replica() -> None:
    ask, to_any = script(MINE)
    first, to_first = script(MINE)
    asyncio.run(ReplicaPool(ask, first).send(ForwardedRequest("GET", "/engine")))
    assert (len(to_any), len(to_first)) == (0, 1)


def test_who_leaves_is_asked_for_no_more(served: Served) -> None:
    ended: list[str] = []

    async def ask(question: ForwardedRequest) -> ForwardedResponse:
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    far = front(served, ask)
    messages = [
        {"type": "http.request", "body": b'{"inputs": "a"}', "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return messages.pop(0)

    async def send(message: Any) -> None:
        pass

    kind = [(b"content-type", b"application/json"), (b"content-length", b"15")]
    scope = {"type": "http", "method": "POST", "path": "/embed", "headers": kind}
    asyncio.run(far.app({**scope, "query_string": b"", "root_path": ""}, receive, send))
    assert ended == ["cancelled"]
    assert (far.guard.in_flight, far.guard.buffered) == (0, 0)
    assert "packhorse_dropped_total 1.0" in far.get("/metrics").text


def test_ready_follows_the_replica(serving) -> None:
    replica = serving(ready_seconds=0.0)
    assert front(replica).get("/ready").status_code == 200
    replica.models.close()
    far = front(replica)
    assert far.get("/ready").status_code == 503
    assert far.get("/health").status_code == 200  # the front lives, and Ray replaces the replica
