"""Scenarios of docs/reliability.md that no other file tests, against the whole server.

Each guarantee has a control in which it is broken and the same check fails: without the mask, with
offsets in bytes, with an open network.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import socket
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from .bodies import BODIES, TOKENS_ONLY

slow = pytest.mark.slow
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "red", "hat", "who", "mule"]
POISON = 20  # its id in the vocabulary of conftest
JSON = {"content-type": "application/json"}


def phrase(chance: random.Random, most: int = 40) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(1, most)))


async def embed(client: Any, inputs: list[str]) -> np.ndarray:
    response = await client.post("/embed", json={"inputs": inputs})
    assert response.status_code == 200, response.text
    return np.array(response.json(), np.float32)


# S1: neighbors in the pack


def apart(served: Any, packs: int) -> tuple[float, float]:
    """Return how much an answer changes with its neighbors, and with one token of a neighbor."""
    chance = random.Random(0)
    subject = "the cat saw one red hat"

    async def beside(client: Any, neighbor: str) -> np.ndarray | None:
        """Return the answer in a pack of two; None if the two did not run in one pack."""
        response = await client.post("/embed", json={"inputs": [subject, neighbor]})
        met = ";neighbours=1;" in response.headers["x-packhorse-pack"]
        return np.array(response.json()[0], np.float32) if met else None

    async def work(client: Any) -> tuple[float, float]:
        alone = (await embed(client, [subject]))[0]
        any_pack = 0.0
        one_token = []
        for _ in range(packs):
            others = [phrase(chance) for _ in range(chance.randint(1, 6))]
            place = chance.randint(0, len(others))
            vectors = await embed(client, [*others[:place], subject, *others[place:]])
            any_pack = max(any_pack, float(np.abs(vectors[place] - alone).max()))
            a, b = [await beside(client, f"a mat sat on {word}") for word in ("mule", "horse")]
            one_token += [] if a is None or b is None else [float(np.abs(a - b).max())]
        assert len(one_token) >= packs / 2
        return any_pack, max(one_token)

    return served.run(work)


@pytest.mark.parametrize("packs", [12, pytest.param(1000, marks=slow)])
def test_an_answer_does_not_depend_on_its_neighbors(serving, packs: int) -> None:
    served = serving(batch_wait_ms=2.0)
    any_pack, one_token = apart(served, packs)
    assert any_pack <= 1e-5
    assert one_token == 0.0  # to the last bit
    assert served.models.default.runner.stats().sequences_a_batch > 1.5, "nothing was packed"


def test_without_the_mask_it_would(serving, tiny, make_model) -> None:
    """The control: attention over the whole pack."""
    import torch

    from packhorse.attention.reference import Reference
    from packhorse.runtime.backend import TorchBackend

    class Everywhere(Reference):
        def plan(self, packed: Any, dropout: float = 0.0) -> Any:
            return super().plan(replace(packed, cu_seqlens=packed.cu_seqlens[[0, -1]]), dropout)

    model = make_model(torch.float32, width=32, heads=2, positions=48)
    model.bert.use(Everywhere())
    loose = replace(tiny(), backend=TorchBackend(model, torch.device("cpu")), kernel="reference")
    any_pack, one_token = apart(serving(encoders=[loose], batch_wait_ms=2.0), 5)
    assert any_pack > 1e-3
    assert one_token > 1e-4


# S2: NaN


@pytest.fixture
def unsound(tiny) -> Iterator[None]:
    """Make the word "poison" NaN below the first layer, in the model that all tests share."""
    import torch

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        return torch.where((inputs[0].ids == POISON)[:, None], torch.nan, output)

    hook = tiny().backend.model.bert.embed.register_forward_hook(spoil)
    yield
    hook.remove()


@pytest.mark.parametrize("path", [path for path in BODIES if path not in TOKENS_ONLY])
def test_nan_is_424_and_stays_with_its_owner(served, unsound, path: str) -> None:
    good = BODIES[path]
    bad = json.loads(json.dumps(good).replace("cat", "poison").replace("the [", "poison ["))

    async def work(client: Any) -> list[Any]:
        bodies = [good, bad, good, bad, good]
        return await asyncio.gather(*[client.post(path, json=body) for body in bodies])

    responses = served.run(work)
    assert [response.status_code for response in responses] == [200, 424, 200, 424, 200]
    assert "not finite" in responses[1].text
    assert not any("null" in response.text or "NaN" in response.text for response in responses[::2])
    again = served.post(path, good)
    assert again.status_code == 200
    assert "null" not in again.text


# S3: exceptions


class PanicException(BaseException):
    """An exception as native libraries raise it."""


class Refusing:
    """A tokenizer library that raises at one word."""

    def __init__(self, library: Any, error: BaseException) -> None:
        self.library = library
        self.error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library, name)

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        if any("poison" in text for text in texts):
            raise self.error
        return self.library.encode_batch(texts, **options)


@pytest.mark.parametrize("place", ["tokenize", "forward", "read"])
@pytest.mark.parametrize(
    "error", [ValueError("no"), MemoryError("none left"), PanicException("native")]
)
def test_what_raises_fails_alone(
    serving, tiny, monkeypatch, place: str, error: BaseException
) -> None:
    from packhorse.runtime import tasks

    def before(packed: Any) -> None:
        if (packed.ids == POISON).any():
            raise error

    def read(sequences: Any, *arguments: Any) -> Any:
        if POISON in sequences[0].ids:
            raise error
        return vector(sequences, *arguments)

    encoder = tiny(before=before if place == "forward" else None)
    vector = tasks._vector
    if place == "tokenize":
        library = Refusing(encoder.tokenizer._library, error)
        encoder = replace(
            encoder, tokenizer=replace(encoder.tokenizer, _library=library, _ascii=None)
        )
    if place == "read":
        monkeypatch.setattr(tasks, "_vector", read)
    served = serving(encoders=[encoder], batch_wait_ms=2.0)
    inputs = ["the cat"] * 5 + ["poison"] + ["a mat"] * 5

    async def work(client: Any) -> list[int]:
        calls = [client.post("/embed", json={"inputs": text}) for text in inputs]
        return [response.status_code for response in await asyncio.gather(*calls)]

    failed = 424 if place != "tokenize" else 500 if isinstance(error, MemoryError) else 422
    assert served.run(work) == [failed if text == "poison" else 200 for text in inputs]
    assert served.get("/health").status_code == 200


# S4: answers go to the right client


@pytest.mark.parametrize(
    ("clients", "requests"),
    [(16, 6), pytest.param(64, 1000, marks=[slow, pytest.mark.timeout(1800)])],
)
def test_every_client_gets_its_own_answer(serving, tiny, clients: int, requests: int) -> None:
    """A fifth of the clients leaves before its answer is ready."""
    served = serving(max_queue_tokens=1 << 20, max_queue_inputs=1 << 16)
    texts = list(dict.fromkeys(phrase(random.Random(seed)) for seed in range(400)))[:100]
    expected = tiny().embed(texts)
    far = np.abs(expected[:, None] - expected[None]).max(-1) + np.eye(len(texts))
    assert far.min() > 1e-4, "answers must tell texts apart"
    right: list[int] = []

    async def one(client: Any, chance: random.Random) -> None:
        number = chance.randrange(len(texts))
        vector = (await embed(client, [texts[number]]))[0]
        assert np.abs(vector - expected[number]).max() <= 1e-5
        right.append(number)

    async def client_of(client: Any, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(requests):
            if chance.random() < 0.2:
                task = asyncio.ensure_future(one(client, chance))
                await asyncio.sleep(chance.random() * 0.003)
                task.cancel()
                continue
            await one(client, chance)

    async def work(client: Any) -> None:
        await asyncio.gather(*[client_of(client, seed) for seed in range(clients)])

    served.run(work)
    assert len(right) >= 0.7 * clients * requests


# S6: no starvation


def test_a_long_request_ends_under_a_stream_of_short_ones(serving) -> None:
    """Its 32 texts of 46 tokens are 8 batches; the stream always keeps another one full."""
    served = serving(before=lambda packed: time.sleep(0.002), max_queue_tokens=1 << 16)
    runner = served.models.default.runner

    async def work(client: Any) -> tuple[int, int]:
        over = asyncio.Event()
        shorts = 0

        async def stream() -> None:
            nonlocal shorts
            while not over.is_set():
                await embed(client, ["the cat sat on a mat"])
                shorts += 1

        streams = [asyncio.ensure_future(stream()) for _ in range(24)]
        while runner.stats().batches < 3:
            await asyncio.sleep(0.001)
        before = runner.stats().batches
        await embed(client, ["the cat " * 22] * 32)
        took = runner.stats().batches - before
        over.set()
        await asyncio.gather(*streams)
        return took, shorts

    took, shorts = served.run(work)
    assert took < 60, f"{took} batches"
    assert shorts > 24, "there was no stream"


# S12 and S13: keys and origins


def test_no_method_of_any_route_is_open(serving) -> None:
    served = serving(keys=("right",))
    right = {"authorization": "Bearer right"}
    paths = list(served.get("/openapi.json", headers=right).json()["paths"])
    paths += ["/openapi.json", "//health", "/health/", "/HEALTH", "/health/x"]
    methods = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "MADEUP"]
    wrong = {"authorization": "Bearer wrong"}

    async def work(client: Any) -> dict[tuple[str, str], list[int]]:
        return {
            (method, path): [
                (await client.request(method, path, headers=headers)).status_code
                for headers in ({}, wrong)
            ]
            for path in paths
            for method in methods
        }

    assert len(paths) > 20
    for (method, path), status in served.run(work).items():
        assert (status == [401, 401]) is (path not in ("/health", "/ping")), (method, path)


def test_any_page_may_call_without_being_trusted(serving) -> None:
    """`*` never allows credentials, and a header beside the key gives no right."""
    served = serving(cors_origin=("*",), keys=("right",))
    preflight = {"origin": "https://example.org", "access-control-request-method": "POST"}
    preflight["access-control-request-headers"] = "authorization,content-type"
    response = served.ask("OPTIONS", "/embed", headers=preflight)
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, "*")
    assert "access-control-allow-credentials" not in response.headers
    with_header = preflight | {"access-control-request-headers": "x-anything"}
    assert served.ask("OPTIONS", "/embed", headers=with_header).status_code == 200
    keyless = served.post("/embed", {"inputs": "cat"}, headers={"origin": "https://example.org"})
    assert keyless.status_code == 401


# S14: no outgoing connections


@pytest.fixture(scope="module")
def no_network() -> Iterator[Callable[[bool], None]]:
    """Name lookups and connections of this process raise while the network is shut."""
    shut = False

    def hook(event: str, arguments: Any) -> None:
        if shut and event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
            raise PermissionError(f"{event} {arguments!r:.80}")

    def close(now: bool) -> None:
        nonlocal shut
        shut = now

    sys.addaudithook(hook)  # cannot be removed again
    yield close
    close(False)


def test_no_request_makes_the_server_call_anyone(served, no_network) -> None:
    address = "http://169.254.169.254/latest/meta-data"
    no_network(True)
    with pytest.raises(PermissionError):  # the control
        socket.create_connection(("127.0.0.1", 9), timeout=0.1)
    try:
        for path, body in BODIES.items():
            assert served.post(path, body).status_code == 200, path
            text = json.dumps(body).replace("the cat", address)
            assert served.post(path, json.loads(text)).status_code in (200, 413), path
            named = {**body, "model": address}
            assert served.post(path, named).status_code in (404, 200), path
        for path in ("/health", "/ready", "/metrics", "/info", "/v1/models", "/", "/openapi.json"):
            assert served.get(path).status_code == 200, path
        assert served.post(f"/models/{address}", BODIES["/"]).status_code == 404
    finally:
        no_network(False)


# S15: offsets in code points

ODD = {
    "4 bytes": "\U0001f40e the cat \U0001f40e\U0001f3fd sat on a mat \U0001f40e and saw one hat",
    "composed": "thé cát sàt on a mât ñ and saw one red hat",
    "decomposed": unicodedata.normalize("NFD", "thé cát sàt on a mât ñ and saw one red hat"),
    "order mark": "\ufeffthe cat\ufeff sat on a mat",
    "right to left": "\u202ethe cat\u202c שלום sat مرحبا on a mat",
    "nul": "the\0 cat\0sat on\0 a mat",
    "joiners": "the cat \U0001f469\u200d\U0001f469\u200d\U0001f467 sat \u200b on a mat",
    "marks": "the ca" + "\u0301" * 300 + "t sat on a mat",
    "blanks": "the\u00a0cat\u3000sat\u2003on\r\n\ta mat",
}


def plain(text: str) -> str:
    """Return a text as the tokenizer sees it: without accents, controls and case."""
    letters = (
        c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c)[0] not in "MC"
    )
    return "".join(letters).lower()


def in_units(text: str, place: int, coding: str) -> int:
    """Convert an offset from code points to units of an encoding."""
    return len(text[:place].encode(coding)) // (2 if coding == "utf-16-le" else 1)


def in_place(text: str, tokens: list[dict[str, Any]], at: Callable[[int], int]) -> bool:
    """Return whether every known word of the answer is at its offsets."""
    known = [token for token in tokens if not token["special"] and token["text"] != "[UNK]"]
    assert len(known) >= 3
    return all(
        plain(text[at(token["start"]) : at(token["stop"])]) == token["text"].removeprefix("##")
        for token in known
    )


@pytest.mark.parametrize("name", ODD)
def test_offsets_are_code_points_of_the_original(served, name: str) -> None:
    text = ODD[name]
    (tokens,) = served.post("/tokenize", {"inputs": text}).json()
    assert in_place(text, tokens, lambda place: place)
    body = {"question": "who sat ?", "context": text, "top_k": 20}
    (answers,) = served.post("/answer", body).json()
    edges = {token["start"] for token in tokens}, {token["stop"] for token in tokens}
    assert answers
    for answer in answers:
        assert text[answer["start"] : answer["end"]] == answer["text"]
        assert answer["start"] in edges[0] and answer["end"] in edges[1]
    (names,) = served.post("/ner", {"inputs": text}).json()
    assert all(text[name["start"] : name["end"]] == name["text"] for name in names)
    ((words,),) = served.post("/fill", {"inputs": f"{text} [MASK]", "top_k": 2}).json()
    assert all(word["text"] == f"{text} {word['word']}" for word in words)


@pytest.mark.parametrize("coding", ["utf-8", "utf-16-le"])
def test_other_offsets_would_be_noticed(served, coding: str) -> None:
    """The control: the same check with offsets in bytes and in UTF-16 units."""
    text = ODD["4 bytes"]
    (tokens,) = served.post("/tokenize", {"inputs": text}).json()
    assert not in_place(text, tokens, lambda place: in_units(text, place, coding))


def test_two_ways_to_write_a_letter_are_one_text(served) -> None:
    composed = ODD["composed"]
    decomposed = ODD["decomposed"]
    assert composed != decomposed
    vectors = served.post("/embed", {"inputs": [composed, decomposed, "the cat"]}).json()
    assert np.abs(np.subtract(vectors[0], vectors[1])).max() <= 1e-6
    assert np.abs(np.subtract(vectors[0], vectors[2])).max() > 1e-3


# S18: threads, and two engines in one process


def test_two_engines_and_many_threads(tiny, make_model) -> None:
    """Each engine answers with its own weights, in any thread."""
    import torch

    from packhorse import PackRunner
    from packhorse.runtime.backend import TorchBackend

    second_model = make_model(torch.float32, width=32, heads=2, positions=48, std=0.3)
    second = replace(
        tiny(), backend=TorchBackend(second_model, torch.device("cpu")), kernel="reference"
    )
    texts = [phrase(random.Random(seed), 12) for seed in range(20)]
    encoders = [tiny(), second]
    expected = [encoder.embed(texts) for encoder in encoders]
    assert np.abs(expected[0] - expected[1]).max() > 0.01, "two models that answer alike"
    runners = [PackRunner(encoder, timeout=0.001, publish=False) for encoder in encoders]
    wrong: list[Any] = []

    def ask(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(8):
            which = chance.randrange(2)
            number = chance.randrange(len(texts))
            vector = runners[which].submit(texts[number]).result(60)
            if np.abs(vector - expected[which][number]).max() > 1e-5:
                wrong.append((which, number))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for runner in runners:
        runner.close()
    assert not wrong
    assert sum(runner.stats().answered for runner in runners) == 32 * 8


# S19: metrics


def figures(served: Any) -> dict[str, float]:
    lines = served.get("/metrics").text.splitlines()
    pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


def total(samples: dict[str, float], name: str) -> float:
    return sum(value for key, value in samples.items() if key.split("{")[0] == name)


def junk(served: Any, seed: int, count: int) -> int:
    """Send requests of all kinds; returns how many were refused."""
    chance = random.Random(seed)

    def made_up() -> str:
        return "".join(chance.choices("abcdefghij%/.?=", k=12))

    async def one(client: Any) -> int:
        path = chance.choice([*BODIES, f"/{made_up()}", f"/models/{made_up()}", "/v1/models/x"])
        method = chance.choice(["POST", "POST", "GET", "PUT", "HEAD", "BREW"])
        body = chance.choice([*BODIES.values(), {"inputs": [], "model": made_up()}, [made_up()]])
        content = chance.choice([json.dumps(body), "{", ""])
        response = await client.request(method, path, content=content, headers=JSON)
        return response.status_code

    async def work(client: Any) -> list[int]:
        return [await one(client) for _ in range(count)]

    return sum(status >= 400 for status in served.run(work))


def test_every_request_is_counted_once_and_makes_no_new_figures(serving) -> None:
    served = serving(names=("tiny", "ranker", "tagger"))
    refused = junk(served, 1, 80)
    first = figures(served)
    assert total(first, "packhorse_requests_total") == 80
    assert total(first, "packhorse_request_seconds_count") == 80
    assert total(first, "packhorse_errors_total") == refused > 20
    refused += junk(served, 2, 120)
    second = figures(served)
    assert total(second, "packhorse_requests_total") == 201  # and /metrics itself
    assert total(second, "packhorse_errors_total") == refused
    routes = {key.split('route="')[1].split('"')[0] for key in second if 'route="' in key}
    templates = set(served.get("/openapi.json").json()["paths"])
    assert {route.replace(":path}", "}") for route in routes} <= templates | {"other"}
    times = [key for key in second if "_seconds_" in key]  # a histogram has 16 lines
    assert len(second) - len(times) < 400
    models = {model for key in times for model in re.findall('model="([^"]*)"', key)}
    assert models <= {"tiny", "ranker", "tagger", "none"}
    counted = [key for key in second if key.startswith("packhorse_request_seconds_count")]
    label_sets = {re.sub('model="[^"]*",', "", key.split("{")[1]) for key in counted}
    requests = [key for key in second if key.startswith("packhorse_requests_total")]
    assert label_sets == {key.split("{")[1] for key in requests}


def test_the_page_of_figures_costs_little(served) -> None:
    """Measured as CPU time of the thread that writes it, whatever else runs."""
    page = served.app.metrics.page
    page()
    # As in a server (`life.run`): otherwise collecting the garbage of all earlier tests counts too.
    gc.collect()
    gc.freeze()
    try:
        begun = time.thread_time()
        for _ in range(5):
            page()
        spent = time.thread_time() - begun
    finally:
        gc.unfreeze()
    assert spent / 5 < 0.05


# S21: public addresses


@pytest.mark.parametrize(("words", "warns"), [((), False), (("--host", "0.0.0.0"), True)])
def test_serving_all_hosts_without_a_key_warns(
    monkeypatch, capsys, words: Any, warns: bool
) -> None:
    from packhorse.cli import main
    from packhorse.serve import life

    reached: list[Any] = []
    monkeypatch.setattr(life, "run", lambda settings, *arguments: reached.append(settings.host))
    assert main(["serve", "--insecure", *words]) == 0
    assert ("everyone who reaches 0.0.0.0" in capsys.readouterr().err) is warns
    assert reached == [("0.0.0.0" if warns else "127.0.0.1")]
