"""Lanes, shares and deadlines of requests, through the whole server."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from typing import Any

import httpx
import pytest

from packhorse.serve.failures import Failure
from packhorse.serve.keys import parse_keys
from packhorse.serve.tickets import is_bulk, read_timeout

TEXT = {"inputs": "the cat"}
KEYS = ("search: s", "nightly: n bulk", "other: o")


def bearer(key: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **headers}


LANE = {"interactive": {"x-packhorse-lane": "interactive"}, "bulk": {"x-packhorse-lane": "bulk"}}


def status(value: Any) -> Any:
    return value.status if isinstance(value, Failure) else value


def test_the_lane_of_a_request() -> None:
    plain, marked = parse_keys(("a: x", "b: y bulk"))
    lanes = [{}, {b"x-packhorse-lane": b"interactive"}, {b"x-packhorse-lane": b" Bulk "}]
    assert [status(is_bulk(headers, None)) for headers in lanes] == [False, False, True]
    assert [status(is_bulk(headers, plain)) for headers in lanes] == [False, False, True]
    assert [status(is_bulk(headers, marked)) for headers in lanes] == [True, 403, True]
    assert status(is_bulk({b"x-packhorse-lane": b"fast"}, None)) == 400


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, math.inf),
        ({"x-packhorse-timeout": "2.5"}, 2.5),
        ({"x-packhorse-timeout": "soon"}, 400),
        ({"x-packhorse-timeout": "-1"}, 400),
        ({"x-packhorse-timeout": "nan"}, 400),
        ({"x-stainless-read-timeout": "600"}, 600),
        ({"x-stainless-read-timeout": "None"}, math.inf),
        ({"x-stainless-timeout": "30", "x-packhorse-timeout": "40"}, 30),
        ({"x-envoy-expected-rq-timeout-ms": "1500"}, 1.5),
    ],
)
def test_the_time_that_a_client_allows(headers: dict[str, str], seconds: float) -> None:
    encoded = {name.encode(): value.encode() for name, value in headers.items()}
    assert status(read_timeout(encoded)) == seconds


def test_openais_client_sends_its_timeout(serving, listen) -> None:
    openai = pytest.importorskip("openai")
    served = serving()
    seen: list[float] = []
    start = served.models.default.dispatcher.start

    def watch(jobs: Any, ticket: Any) -> Any:
        seen.append(ticket.deadline - time.monotonic())
        return start(jobs, ticket)

    object.__setattr__(served.models.default.dispatcher, "start", watch)
    url = f"http://127.0.0.1:{listen(served)}/v1"
    for seconds in (25.0, 90.0):
        client = openai.OpenAI(base_url=url, api_key="any", timeout=seconds)
        client.embeddings.create(model="tiny", input="the cat")
    assert 0 < seen[0] <= 25 < seen[1] <= 90


def test_names_lanes_and_tokens_are_counted_and_no_key_is_told(serving, caplog) -> None:
    from packhorse.serve import logs

    served = serving(keys=KEYS)
    logs.REQUESTS.disabled = False
    with caplog.at_level("INFO", "packhorse.serve.requests"):
        for headers in (bearer("s"), bearer("s"), bearer("s", **LANE["bulk"]), bearer("n")):
            assert served.post("/embed", TEXT, headers=headers).status_code == 200
        assert served.post("/embed", TEXT, headers=bearer("wrong")).status_code == 401
    response = served.post("/embed", TEXT, headers=bearer("n", **LANE["interactive"]))
    assert (response.status_code, "lane bulk" in response.text) == (403, True)
    response = served.post("/embed", TEXT, headers=bearer("s", **{"x-packhorse-lane": "x"}))
    assert response.status_code == 400
    page = served.get("/metrics", headers=bearer("o")).text
    counts = dict(line.rsplit(" ", 1) for line in page.splitlines() if "packhorse_key_" in line)
    labels = '{key="search",lane="interactive"}'
    assert counts[f"packhorse_key_requests_total{labels}"] == "3.0"  # the one that is 400 too
    assert counts[f"packhorse_key_tokens_total{labels}"] == "8.0"
    labels = '{key="search",lane="bulk"}'
    assert counts[f"packhorse_key_requests_total{labels}"] == "1.0"
    messages = [record.getMessage() for record in caplog.records]
    assert [("key=search" in m, "lane=bulk" in m) for m in messages[2:5]] == [
        (True, True),
        (False, True),
        (False, False),
    ]
    assert "key=nightly" in messages[3] and "key=" not in messages[4]


def test_one_key_or_none_divides_nothing(serving) -> None:
    for keys, headers in [((), {}), (("k",), bearer("k")), (("a: k", "a: l"), bearer("k"))]:
        served = serving(keys=keys)
        assert served.post("/embed", TEXT, headers=headers).status_code == 200
        assert served.models.default.runner._admission.ledger is None
    assert served.post("/embed", TEXT, headers=bearer("k", **LANE["bulk"])).status_code == 200
    assert served.models.default.runner._admission.ledger is not None


async def _until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("keys_differ", [True, False])
def test_one_key_takes_neither_all_places_nor_all_of_the_queue(serving, keys_differ: bool) -> None:
    """The control: with the same key, the second client is refused."""
    go = threading.Event()
    served = serving(
        keys=KEYS,
        before=lambda packed: go.wait(60),
        max_concurrent_requests=30,
        max_queue_inputs=30,
    )
    other = bearer("o") if keys_differ else bearer("s")

    async def work(client: httpx.AsyncClient) -> tuple[Counter[int], int]:
        flood = [
            asyncio.ensure_future(client.post("/embed", json=TEXT, headers=bearer("s")))
            for _ in range(100)
        ]
        await _until(lambda: sum(task.done() for task in flood) + served.guard.in_flight == 100)
        light = asyncio.ensure_future(client.post("/embed", json=TEXT, headers=other))
        await _until(lambda: light.done() or served.guard.in_flight == 21)
        go.set()
        statuses = Counter([(await task).status_code for task in flood])
        return statuses, (await light).status_code

    statuses, light = served.run(work)
    assert statuses == {200: 20, 429: 80}, "two thirds of the places"
    assert light == (200 if keys_differ else 429)
    assert (served.guard.in_flight, served.guard.buffered) == (0, 0)


def test_bytes_are_divided_too(serving) -> None:
    served = serving(keys=KEYS, max_buffered_bytes=3000, max_body_bytes=3000)
    guard = served.guard
    waiting = threading.Event()

    async def bodies(amount: int, key: str) -> int:
        """Send a body that never ends; return the status if it is refused."""
        sent: list[Any] = []

        async def receive() -> Any:
            if not sent.count("part"):
                sent.append("part")
                return {"type": "http.request", "body": b"x" * amount, "more_body": True}
            await _until(waiting.is_set)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-length", b"3000")]
        headers.append((b"content-type", b"application/json"))
        scope = {"type": "http", "method": "POST", "path": "/embed", "headers": headers}
        await served.app(scope, receive, send)
        return next((m["status"] for m in sent if m != "part" and "status" in m), 0)

    async def work(_: Any) -> tuple[int, int]:
        flood = [asyncio.ensure_future(bodies(500, "s")) for _ in range(6)]
        await _until(lambda: sum(task.done() for task in flood) + guard.buffered / 500 == 6)
        light = asyncio.ensure_future(bodies(500, "o"))
        await _until(lambda: guard.buffered == 2500 or light.done())
        waiting.set()
        refused = [await task for task in flood].count(429)
        return refused, await light

    assert served.run(work) == (2, 0), "two of six of the flood are refused, the other is not"
    assert guard.buffered == 0


def slow_server(serving, **settings: Any) -> Any:
    """A server whose batches take 4 ms a token, whatever the machine."""
    served = serving(before=lambda packed: time.sleep(0.004 * len(packed.ids)), **settings)
    served.models.default.runner.measure(96)  # as at the start of a server
    return served


def test_what_cannot_be_in_time_is_refused_at_once_and_told_when(serving) -> None:
    """A queue of four seconds: who allows one and a half is refused."""
    served = slow_server(serving)
    runner = served.models.default.runner
    texts = 80
    text = {"inputs": "the cat sat on a mat and saw one red hat"}  # 13 tokens
    hurry = {"x-packhorse-timeout": "1.5"}

    async def work(client: httpx.AsyncClient) -> tuple[Any, float]:
        queue = [asyncio.ensure_future(client.post("/embed", json=text)) for _ in range(texts)]
        await _until(lambda: runner.stats().requests == texts)
        refused = await client.post("/embed", json=TEXT, headers=hurry)
        began = time.monotonic()
        assert runner.stats().waiting_requests, "refused at once"
        patient = await client.post("/embed", json=TEXT, headers={"x-packhorse-timeout": "60"})
        truth = time.monotonic() - began - 1.5
        assert patient.status_code == 200
        for task in queue:
            assert (await task).status_code == 200
        return refused, truth

    refused, truth = served.run(work)
    assert refused.status_code == 429
    assert refused.json()["error_type"] == "Overloaded"
    # The patient one was answered behind all that waited; with 1.5 s to spare it would have been
    # let in so much earlier. The header has whole seconds.
    assert truth / 2 <= int(refused.headers["retry-after"]) <= 2 * truth + 1
    assert served.post("/embed", TEXT, headers=hurry).status_code == 200, "now it can"


def test_a_request_that_takes_longer_than_allowed_leaves_the_queue(serving) -> None:
    go = threading.Event()
    served = serving(before=lambda packed: go.wait(60), request_timeout=0.3)
    runner = served.models.default.runner

    async def work(client: httpx.AsyncClient) -> list[Any]:
        first = asyncio.ensure_future(client.post("/embed", json=TEXT))
        await _until(lambda: runner.stats().running_requests)
        second = await client.post("/embed", json=TEXT)
        answers = [await first, second]
        await _until(lambda: not runner.stats().waiting_requests)
        go.set()
        return answers

    for response in served.run(work):
        assert (response.status_code, "retry-after" in response.headers) == (429, True)
        assert "0.3 s" in response.json()["error"]
    assert 'packhorse_errors_total{kind="DeadlineExceeded"} 2.0' in served.get("/metrics").text
