"""The inputs of one request: limits, order, batches, fairness, cancellation."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from packhorse.errors import InputError
from packhorse.serve import calls
from packhorse.serve.settings import ServeSettings

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "red", "hat", "."]
POISON = 20  # its id in the vocabulary of conftest


def text(rng: random.Random, tokens: int) -> str:
    return " ".join(rng.choices(WORDS, k=max(1, tokens - 2)))


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.002)


def test_answers_are_the_encoders_whatever_else_is_in_flight(serving, tiny) -> None:
    rng = random.Random(1)
    requests = [
        [text(rng, rng.randint(3, 46)) for _ in range(rng.randint(1, 32))] for _ in range(20)
    ]

    async def work(client: Any) -> list[Any]:
        return await asyncio.gather(*[client.post("/embed", json={"inputs": x}) for x in requests])

    served = serving(max_queue_tokens=1 << 20)
    encoder = tiny()
    for inputs, response in zip(requests, served.run(work), strict=True):
        assert response.status_code == 200
        assert np.abs(np.array(response.json()) - encoder.embed(inputs)).max() <= 1e-6


@pytest.fixture(scope="module")
def limited(serving):
    return serving(max_batch_inputs=4, max_input_characters=80, max_input_tokens=12)


def test_the_header_has_fill_and_neighbors_of_the_pack(served) -> None:
    response = served.post("/embed", {"inputs": ["the cat", "a mat", "one hat"]})
    pack = dict(part.split("=") for part in response.headers["x-packhorse-pack"].split(";"))
    assert pack["fill"] == "1.000"
    assert pack["neighbours"] == "2"
    assert float(pack["queue_ms"]) >= 0


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"inputs": ["cat"] * 5}, 413, "TooLarge"),
        ({"inputs": "cat " * 30}, 413, "TooLarge"),
        ({"inputs": "cat sat mat on " * 4, "truncate": False}, 413, "TooLarge"),
        ({"inputs": "cat sat mat on " * 4, "truncate": True}, 200, ""),
        ({"inputs": ["cat", ""]}, 400, "Empty"),
    ],
)
def test_limits(limited, body: dict, status: int, kind: str) -> None:
    response = limited.post("/embed", body)
    assert response.status_code == status, response.text
    figures = limited.get("/metrics").text
    assert not kind or f'packhorse_errors_total{{kind="{kind}"}}' in figures


def test_a_task_without_a_head_is_424_with_those_there_are(serving) -> None:
    served = serving(names=("tagger",))
    response = served.post("/embed", {"inputs": "cat"})
    assert response.status_code == 424
    assert "label, hidden" in response.json()["error"]


def test_an_unknown_model_is_404_with_those_there_are(served) -> None:
    response = served.post("/v1/embeddings", {"input": "cat", "model": "gpt"})
    assert response.status_code == 404
    assert "tiny, ranker, tagger" in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("served_alone", "path", "body"),
    [
        ("tiny", "/v1/embeddings", {"input": "cat", "model": "text-embedding-3-small"}),
        ("ranker", "/v1/rerank", {"query": "cat", "documents": ["a"], "model": "jina-reranker"}),
        ("ranker", "/v2/rerank", {"query": "cat", "documents": ["a"], "model": "rerank-v3.5"}),
    ],
)
def test_a_model_alone_answers_to_any_name(serving, served_alone, path: str, body: dict) -> None:
    """Every name means the only model; a request about a model itself needs its real name."""
    served = serving(names=(served_alone,))
    response = served.post(path, body)
    assert (response.status_code, response.json()["model"]) == (200, served_alone)
    assert served.get(f"/v1/models/{body['model']}").status_code == 404
    assert served.get(f"/v1/models/{served_alone}").json()["id"] == served_alone


def test_a_model_alone_is_asked_for_nothing_it_cannot_do(serving) -> None:
    response = serving(names=("ranker",)).post("/v1/embeddings", {"input": "cat", "model": "any"})
    assert response.status_code == 424
    assert "ranker has no head" in response.json()["error"]["message"]


def test_a_request_of_more_inputs_than_may_wait_is_too_large(serving) -> None:
    """429 would be wrong: trying again could never succeed."""
    served = serving(max_queue_inputs=3)
    responses = [served.post("/embed", {"inputs": ["cat"] * count}) for count in (3, 4)]
    assert [response.status_code for response in responses] == [200, 413]
    assert "has 4 inputs; the queue holds at most 3" in responses[1].text


def test_overload_is_429_at_once_and_passes(serving) -> None:
    go = threading.Event()
    served = serving(before=lambda packed: go.wait(60), max_queue_tokens=100)
    runner = served.models.default.runner
    body = {"inputs": "the cat " * 20}

    async def work(client: Any) -> Any:
        tasks = [asyncio.ensure_future(client.post("/embed", json=body)) for _ in range(10)]
        while sum(task.done() for task in tasks) + runner.stats().requests < len(tasks):
            await asyncio.sleep(0.001)  # until all are admitted or refused
        early = [task.result() for task in tasks if task.done()]
        go.set()
        return early, await asyncio.gather(*tasks)

    early, responses = served.run(work)
    assert early, "nobody was refused while the engine was held"
    assert {response.status_code for response in early} == {429}
    assert all(1 <= int(response.headers["retry-after"]) <= 60 for response in early)
    assert {response.status_code for response in responses} == {200, 429}
    assert served.post("/embed", body).status_code == 200
    assert f'packhorse_runner_refused_total{{model="tiny"}} {float(len(early))}' in (
        served.get("/metrics").text
    )


async def _waiting(runner: Any) -> int:
    """Tokens in the queue while the first batch runs."""
    while not runner.stats().running_requests:
        await asyncio.sleep(0.001)
    return runner.stats().waiting_tokens


def test_a_long_request_does_not_stand_before_a_short_one(serving) -> None:
    """32 × 46 tokens are 8 batches; a short text that arrives later waits for two of them."""
    go = threading.Event()

    def before(packed: Any) -> None:
        go.wait(60)
        time.sleep(0.02)  # the loop reports the short ones before the last batch ends

    served = serving(before=before, max_queue_tokens=10_000)
    runner = served.models.default.runner
    rng = random.Random(2)
    long = {"inputs": [text(rng, 46) for _ in range(32)]}
    order: list[str] = []

    async def ask(client: Any, name: str, body: dict) -> None:
        assert (await client.post("/embed", json=body)).status_code == 200
        order.append(name)

    async def work(client: Any) -> float:
        first = asyncio.ensure_future(ask(client, "long", long))
        waiting = await _waiting(runner)
        short = [asyncio.ensure_future(ask(client, "short", {"inputs": "cat"})) for _ in range(20)]
        while runner.stats().waiting_tokens < waiting + 20 * 3:
            await asyncio.sleep(0.001)
        go.set()
        await asyncio.gather(first, *short)
        return waiting

    waiting = served.run(work)
    assert order == ["short"] * 20 + ["long"]
    assert waiting <= 32 * 46 / 4


def test_without_the_window_it_would(serving, monkeypatch) -> None:
    """The control: inputs that are submitted all at once are ahead of all later requests."""
    from packhorse.serve import streams

    go = threading.Event()
    served = serving(before=lambda packed: go.wait(60), max_queue_tokens=10_000)
    plain = streams.RequestStream.__init__

    def wide(self: Any, *arguments: Any) -> None:
        plain(self, *arguments)
        self.window = 1 << 30

    monkeypatch.setattr(streams.RequestStream, "__init__", wide)

    async def work(client: Any) -> float:
        inputs = ["the cat " * 22] * 32
        first = asyncio.ensure_future(client.post("/embed", json={"inputs": inputs}))
        waiting = await _waiting(served.models.default.runner)
        go.set()
        await first
        return waiting

    assert served.run(work) > 3 * served.models.default.runner.shape.tokens


def test_a_large_request_finds_a_place_where_a_single_text_does(serving) -> None:
    """It needs room for one of its texts, and is then not refused half way."""
    go = threading.Event()
    served = serving(before=lambda packed: go.wait(60), max_queue_tokens=200)
    runner = served.models.default.runner
    large = {"inputs": ["the cat " * 22] * 100}  # 46 tokens each, 23 times the queue

    async def work(client: Any) -> tuple[list[int], int, int]:
        def ask(body: Any) -> Any:
            return asyncio.ensure_future(client.post("/embed", json=body))

        async def until(condition: Any) -> None:
            while not condition():
                await asyncio.sleep(0.001)

        admitted = [ask({"inputs": "cat"})]
        await until(lambda: runner.stats().running_requests)
        admitted += [ask({"inputs": "cat"}) for _ in range(50)]  # of 3 tokens
        await until(lambda: runner.waiting_tokens == 150)
        admitted.append(ask(large))
        await until(lambda: runner.waiting_tokens > 150)
        waiting = runner.waiting_tokens
        refused = await client.post("/embed", json=large)  # now the queue is full
        go.set()
        statuses = [response.status_code for response in await asyncio.gather(*admitted)]
        return statuses, waiting, refused.status_code

    statuses, waiting, refused = served.run(work)
    assert statuses == [200] * 52
    assert waiting <= 200 + 3 * runner.shape.tokens
    assert refused == 429
    assert (runner.waiting_tokens, runner.stats().answered) == (0, 151)


def test_a_very_large_request_has_three_batches_in_the_queue(serving) -> None:
    waiting: list[int] = []
    served = serving(before=lambda packed: waiting.append(runner.waiting_tokens))
    runner = served.models.default.runner
    response = served.post("/embed", {"inputs": ["the cat " * 22] * 500})
    assert (response.status_code, len(response.json())) == (200, 500)
    assert len(waiting) >= 125
    assert max(waiting) <= 3 * runner.shape.tokens


def test_the_default_bounds_take_what_clients_send(served, tiny) -> None:
    """OpenAI allows 2,048 inputs, LangChain sends 1,000 and LlamaIndex 100 at once."""
    inputs = [f"the cat {'sat ' * (i % 40)}on a mat" for i in range(2048)]
    response = served.post("/v1/embeddings", {"input": inputs, "model": "tiny"})
    vectors = [row["embedding"] for row in response.json()["data"]]
    assert np.abs(np.array(vectors) - tiny().embed(inputs)).max() <= 1e-6
    refused = served.post("/v1/embeddings", {"input": [*inputs, "cat"], "model": "tiny"})
    assert refused.status_code == 413 and "max_batch_inputs" in refused.text


def test_a_request_of_too_many_tokens_is_413_before_all_is_tokenized(serving, monkeypatch) -> None:
    monkeypatch.setattr(calls, "GROUP_CHARACTERS", 400)
    served = serving(max_request_tokens=460)
    runner = served.models.default.runner
    groups: list[int] = []
    prepare = runner.prepare

    def counted(texts: Any, *arguments: Any, **options: Any) -> Any:
        groups.append(len(texts))
        return prepare(texts, *arguments, **options)

    monkeypatch.setattr(runner, "prepare", counted)
    assert served.post("/embed", {"inputs": ["the cat " * 22] * 10}).status_code == 200
    assert groups == [3, 3, 3, 1]
    groups.clear()
    refused = served.post("/embed", {"inputs": ["the cat " * 22] * 100})
    assert refused.status_code == 413 and "max_request_tokens" in refused.text
    assert groups == [3] * 4


def test_an_input_of_a_later_group_is_named_by_where_its_group_begins(serving, monkeypatch) -> None:
    monkeypatch.setattr(calls, "GROUP_CHARACTERS", 10)
    model = serving().models.default
    texts = ["the cat sat", "on a mat and", "half \ud800 a pair"]
    with pytest.raises(InputError, match="of the inputs from 2 on, text 0"):
        calls._prepare(model, "embed", texts, {}, ServeSettings())


@pytest.mark.parametrize(
    ("task", "path", "inputs"),
    [("hidden", "/embed_all", "the cat sat"), ("fill", "/fill", "the [MASK] sat")],
)
def test_results_that_would_fill_the_memory_are_413(
    serving, monkeypatch, task: str, path: str, inputs: str
) -> None:
    served = serving()
    size = 4 * (5 * 96 if task == "hidden" else served.models.default.encoder.tokenizer.vocab_size)
    monkeypatch.setitem(calls.MAX_RESULT_BYTES, task, 3 * size)
    assert served.post(path, {"inputs": [inputs] * 3}).status_code == 200
    refused = served.post(path, {"inputs": [inputs] * 4})
    assert refused.status_code == 413 and "send fewer inputs" in refused.text


def test_a_long_answer_is_written_in_parts(monkeypatch) -> None:
    rng = np.random.default_rng(0)
    vectors = list(rng.standard_normal((40, 33), np.float32))
    documents = [
        vectors,
        [rng.standard_normal((50, 33), np.float32), np.zeros((0, 33), np.float32)],
        {"data": [{"embedding": vector, "index": i} for i, vector in enumerate(vectors)], "n": 1},
        {"a": {"b": ["é" for _ in range(2000)], 'quote"d': None}, "c": []},
        {"data": [{"embedding": "QUJD" * 250, "index": i} for i in range(40)]},
        rng.standard_normal(1000, np.float32),
    ]
    for document in documents:
        assert calls._count_values(document, 1 << 30) >= 1000
        plain = calls.json_response(document)
        with monkeypatch.context() as patch:
            patch.setattr(calls, "MAX_INLINE_VALUES", 60)
            patch.setattr(calls, "_dump", bounded := Bounded(calls._dump))
            response = calls.json_response(document, {"x-header": "kept"})
            sent: list[Any] = []

            async def send(message: Any, sent: list[Any] = sent) -> None:
                sent.append(message)

            asyncio.run(response({"type": "http"}, None, send))
        assert b"".join(message.get("body", b"") for message in sent) == plain.body
        headers = dict(sent[0]["headers"])
        assert headers[b"content-length"] == str(len(plain.body)).encode()
        assert headers[b"x-header"] == b"kept"
        assert bounded.largest <= 60 or document is documents[-1]


class Bounded:
    """Remembers the largest value that was written by one call."""

    def __init__(self, dump: Any) -> None:
        self.dump = dump
        self.largest = 0

    def __call__(self, value: Any) -> bytes:
        self.largest = max(self.largest, calls._count_values(value, 1 << 30))
        return self.dump(value)


def test_a_poison_fails_alone(serving) -> None:
    def before(packed: Any) -> None:
        if (packed.ids == POISON).any():
            raise RuntimeError("the model cannot take this")

    served = serving(before=before)
    inputs = ["the cat"] * 30 + ["poison"] * 2
    random.Random(0).shuffle(inputs)

    async def work(client: Any) -> list[Any]:
        return await asyncio.gather(*[client.post("/embed", json={"inputs": x}) for x in inputs])

    for text, response in zip(inputs, served.run(work), strict=True):
        assert response.status_code == (424 if text == "poison" else 200)
    whole = served.post("/embed", {"inputs": inputs})
    assert (whole.status_code, whole.json()["error_type"]) == (424, "Backend")
    wait_until(lambda: served.models.default.runner.stats().running_requests == 0)
    assert served.post("/embed", {"inputs": "a mat"}).status_code == 200


async def _hang_up(served: Any, body: bytes, until: Callable[[], Awaitable[Any]]) -> None:
    """Send a request, wait `until` something happens, and disconnect."""
    sent = False

    async def receive() -> Any:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await until()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "method": "POST", "path": "/embed", "raw_path": b"/embed"}
    scope |= {"query_string": b"", "headers": headers, "http_version": "1.1", "scheme": "http"}
    await served.app(scope, receive, send)


def test_who_hangs_up_in_the_queue_costs_nothing(serving) -> None:
    go = threading.Event()
    served = serving(before=lambda packed: go.wait(60), max_queue_tokens=5_000)
    runner = served.models.default.runner
    body = b'{"inputs": ["the cat", "a mat", "one hat"]}'

    async def work(client: Any) -> None:
        first = asyncio.ensure_future(client.post("/embed", json={"inputs": "cat"}))
        await _waiting(runner)
        queued = asyncio.Event()
        leaving = [asyncio.ensure_future(_hang_up(served, body, queued.wait)) for _ in range(20)]
        while runner.stats().waiting_requests < 60:
            await asyncio.sleep(0.001)
        queued.set()
        await asyncio.gather(*leaving)
        assert runner.waiting_tokens == 0
        go.set()
        assert (await first).status_code == 200

    served.run(work)
    stats = runner.stats()
    assert (stats.cancelled, stats.answered, served.guard.in_flight) == (60, 1, 0)
    assert "packhorse_dropped_total 20.0" in served.get("/metrics").text


def _random_cancels(served: Any, count: int) -> None:
    rng = random.Random(3)

    async def one(client: Any) -> None:
        body = b'{"inputs": "%s"}' % text(rng, rng.randint(3, 40)).encode()
        if rng.random() < 0.5:
            pause = rng.random() * 0.004
            return await _hang_up(served, body, lambda: asyncio.sleep(pause))
        task = asyncio.ensure_future(
            client.post("/embed", content=body, headers={"content-type": "application/json"})
        )
        await asyncio.sleep(rng.random() * 0.004)
        task.cancel()

    async def work(client: Any) -> None:
        for _ in range(count // 50):
            await asyncio.gather(*[one(client) for _ in range(50)])
        while served.guard.in_flight:
            await asyncio.sleep(0.005)

    served.run(work)
    wait_until(lambda: not served.models.default.runner.stats().running_requests)
    stats = served.models.default.runner.stats()
    assert stats.requests == stats.answered + stats.cancelled + stats.failed
    assert (stats.waiting_requests, stats.waiting_tokens, served.guard.buffered) == (0, 0, 0)
    assert "packhorse_in_flight 0.0" in served.get("/metrics").text
    assert served.post("/embed", {"inputs": "cat"}).status_code == 200


def test_random_cancels_leave_nothing_behind(serving) -> None:
    _random_cancels(serving(max_queue_tokens=20_000), 300)


@pytest.mark.slow
def test_ten_thousand_cancels_leave_nothing_behind(serving) -> None:
    _random_cancels(serving(max_queue_tokens=20_000), 10_000)


@pytest.mark.slow
def test_ten_thousand_requests_with_a_hundred_poisons(serving) -> None:
    def before(packed: Any) -> None:
        if (packed.ids == POISON).any():
            raise RuntimeError("the model cannot take this")

    served = serving(before=before, max_queue_tokens=1 << 20, max_concurrent_requests=10_000)
    inputs = ["the cat sat"] * 10_000 + ["poison"] * 100
    random.Random(0).shuffle(inputs)

    async def work(client: Any) -> list[int]:
        statuses: list[int] = []
        for begin in range(0, len(inputs), 200):
            calls = [client.post("/embed", json={"inputs": x}) for x in inputs[begin : begin + 200]]
            statuses += [response.status_code for response in await asyncio.gather(*calls)]
        return statuses

    expected = [424 if text == "poison" else 200 for text in inputs]
    assert served.run(work) == expected
