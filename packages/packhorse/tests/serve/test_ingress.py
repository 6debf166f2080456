"""The door of a server of replicas: the same answers, and requests that outlive their replica.

The replicas are applications in this process, asked without Ray; what it raises is what a script
says. The real thing is in test_cluster.py.
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
from packhorse.serve.ingress import Fleet, Question, ReplicaAway, ReplicaDied, Reply
from packhorse.serve.metrics import figures

from .conftest import Served

MINE = Reply(200, (), b"mine")
ASKED = Question("POST", "/embed")
TIMES = re.compile(r"x-.*-time|x-packhorse-pack")


def door(behind: Served, ask: Any = None, **settings: Any) -> Served:
    """A server whose only replica is the application of another."""

    async def straight(question: Question) -> Reply:
        return await ingress.answer(behind.guard.app, question)

    fleet = Fleet(ask or straight, ask or straight)
    fleet.figures = [figures(host, replica="r1") for host in behind.hosts]
    chosen = replace(behind.settings, **settings)
    models = ingress.hosts([ingress.card(host) for host in behind.hosts], fleet)
    app, guard = guarded(ingress.create(chosen, models, fleet))
    return Served(app, guard, models, chosen)


def script(*events: Any) -> tuple[Callable[[Question], Awaitable[Reply]], list[Question]]:
    """Replicas that do this, one after the other; the last for ever."""
    asked: list[Question] = []

    async def ask(question: Question) -> Reply:
        event = events[min(len(asked), len(events) - 1)]
        asked.append(question)
        await asyncio.sleep(0)
        if isinstance(event, Reply):
            return event
        raise event

    return ask, asked


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
        ("POST", "/embed_sparse", {"inputs": "the cat"}),  # 424
        ("POST", "/embed", {"inputs": ["a"] * 33}),  # 413
        ("POST", "/embed", {"inputs": ""}),  # 400
        ("POST", "/embed", {"text": "a"}),  # 422
        ("POST", "/nowhere", {}),  # 404
        ("POST", "/health", {}),  # 405
        ("GET", "/info", None),
        ("GET", "/health", None),
        ("GET", "/ready", None),
        ("GET", "/openapi.json", None),
        ("GET", "/", None),
    ],
)
def test_the_same_answer(served: Served, method: str, path: str, body: Any) -> None:
    near, far = (each.ask(method, path, json=body) for each in (served, door(served)))
    assert (far.status_code, far.content) == (near.status_code, near.content)
    headers = [
        {name: value for name, value in each.headers.items() if not TIMES.fullmatch(name)}
        for each in (near, far)
    ]
    assert headers[0] == headers[1]
    assert set(near.headers) == set(far.headers)


def test_keys_and_limits_are_the_doors(served: Served) -> None:
    ask, asked = script(MINE)
    closed = door(served, ask, keys=("sesame",), max_body_bytes=30)
    assert closed.post("/embed", {"inputs": "a"}).status_code == 401
    assert closed.get("/nowhere").status_code == 401
    key = {"authorization": "Bearer sesame", "cookie": "a=b", "x-other": "kept"}
    assert closed.post("/embed", {"inputs": "a" * 30}, headers=key).status_code == 413
    assert not asked
    assert closed.post("/embed?a=b", {"inputs": "a"}, headers=key).content == b"mine"
    (question,) = asked
    assert (question.method, question.path, question.query) == ("POST", "/embed", b"a=b")
    assert question.body == b'{"inputs":"a"}'
    assert "sesame" not in str(question.headers) and b"cookie" not in dict(question.headers)
    assert dict(question.headers)[b"x-other"] == b"kept"


def test_figures_are_counted_here_and_told_by_replica(served: Served) -> None:
    far = door(served)
    assert far.post("/embed", {"inputs": ["the cat", "a mat"]}).status_code == 200
    assert far.post("/embed", {"inputs": ""}).status_code == 400
    told = far.get("/metrics").text
    assert 'packhorse_requests_total{route="/embed",status="200"} 1.0' in told
    assert "packhorse_inputs_total 2.0" in told
    assert 'packhorse_errors_total{kind="Empty"} 1.0' in told
    assert 'packhorse_up{model="tiny",replica="r1"} 1.0' in told
    names = [set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)) for text in _pages(served, far)]
    assert names[0] == names[1]


def _pages(*servers: Served) -> list[str]:
    return [each.get("/metrics").text for each in servers]


def test_what_a_mistake_in_a_replica_looks_like(served: Served, caplog) -> None:
    ask, _ = script(ZeroDivisionError("secret"))
    found = door(served, ask).post("/embed", {"inputs": "a"})
    assert (found.status_code, "secret" in found.text) == (500, False)


def test_busy_replicas_say_when_to_come_back(serving) -> None:
    behind = serving(max_concurrent_requests=1)
    far = door(behind)

    async def work(client: Any) -> list[Any]:
        return await asyncio.gather(
            *[client.post("/embed", json={"inputs": "the cat"}) for _ in range(5)]
        )

    found = far.run(work)
    assert sorted({each.status_code for each in found}) == [200, 429]
    assert all("retry-after" in each.headers for each in found if each.status_code == 429)
    assert far.guard.in_flight == 0


# Replicas that die -----------------------------------------------------------------------------


def test_a_request_outlives_its_replica() -> None:
    ask, asked = script(ReplicaDied("one"), ReplicaDied("two"), MINE)
    assert asyncio.run(Fleet(ask, ask).send(ASKED)) is MINE
    assert asked == [ASKED] * 3


def test_but_does_not_kill_them_all(served: Served) -> None:
    ask, asked = script(ReplicaDied("again"))
    found = door(served, ask).post("/embed", {"inputs": "a"})
    assert (found.status_code, len(asked)) == (503, ingress.DEATHS)
    assert "replicas died" in found.json()["error"]


def test_it_waits_for_one_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "PAUSE", 0.001)
    ask, asked = script(*[ReplicaAway("not yet")] * 20, MINE)
    assert asyncio.run(Fleet(ask, ask).send(ASKED)) is MINE
    assert len(asked) == 21


def test_but_not_for_ever() -> None:
    ask, _ = script(ReplicaAway("never"))
    before = time.monotonic()
    with pytest.raises(RunnerStopped, match=r"within 0\.2 s"):
        asyncio.run(Fleet(ask, ask, patience=0.2).send(ASKED))
    assert time.monotonic() - before < 5


def test_a_loss_is_logged_once(caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    async def many() -> None:
        ask, _ = script(*[ReplicaDied("")] * 8, MINE)
        fleet = Fleet(ask, ask)
        await asyncio.gather(*[fleet.send(ASKED) for _ in range(8)])

    monkeypatch.setattr(ingress.LOGGER, "propagate", True)
    asyncio.run(many())
    assert [each.message for each in caplog.records if "a replica was lost" in each.message] == [
        "a replica was lost; what it was at is asked of another"
    ]


def test_the_engine_is_drawn_from_one_replica() -> None:
    ask, asked = script(MINE)
    first, told = script(MINE)
    asyncio.run(Fleet(ask, first).send(Question("GET", "/engine")))
    assert (len(asked), len(told)) == (0, 1)


def test_who_leaves_is_asked_for_no_more(served: Served) -> None:
    ended: list[str] = []

    async def ask(question: Question) -> Reply:
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    far = door(served, ask)
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


def test_ready_is_what_a_replica_says(serving) -> None:
    behind = serving(ready_seconds=0.0)
    assert door(behind).get("/ready").status_code == 200
    behind.hosts.close()
    far = door(behind)
    assert far.get("/ready").status_code == 503
    assert far.get("/health").status_code == 200  # the door lives, and Ray replaces the replica
