"""gRPC calls over a real connection: answers are the library's, refusals have TEI's codes."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

import packhorse
from packhorse.serve.rpc.descriptors import read_interface
from packhorse.serve.rpc.methods import METHODS

SECONDS = 120.0  # a limit for slow machines; nothing here takes a second
TEXTS = ["the cat sat", "a horse carries sacks", "who saw the mule ?"]


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


class Client:
    """Calls any method of `tei.proto` by its name."""

    def __init__(self, port: int, key: str = "") -> None:
        self.channel = grpc.insecure_channel(
            f"127.0.0.1:{port}",
            # Otherwise all channels of a process to the same address are one connection.
            options=[("grpc.use_local_subchannel_pool", 1)],
        )
        self.metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self.interface = read_interface("tei.proto", "health.proto")

    def method(self, path: str, package: str = "tei.v1") -> Any:
        service, _, name = path.partition("/")
        method = self.interface.services[f"{package}.{service}"].methods_by_name[name]
        kinds = {True: "stream", False: "unary"}
        make = getattr(
            self.channel, f"{kinds[method.client_streaming]}_{kinds[method.server_streaming]}"
        )
        return make(
            f"/{package}.{path}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=self.interface.messages[method.output_type.full_name].FromString,
        )

    def make(self, path: str, package: str = "tei.v1", **fields: Any) -> Any:
        service, _, name = path.partition("/")
        method = self.interface.services[f"{package}.{service}"].methods_by_name[name]
        return self.interface.messages[method.input_type.full_name](**fields)

    def ask(self, path: str, package: str = "tei.v1", **fields: Any) -> Any:
        message = self.make(path, package, **fields)
        return self.method(path, package)(message, timeout=SECONDS, metadata=self.metadata)

    def stream(self, path: str, *requests: dict[str, Any]) -> Any:
        messages = iter([self.make(path, **fields) for fields in requests])
        return self.method(path)(messages, timeout=SECONDS, metadata=self.metadata)

    def refusal(self, path: str, **fields: Any) -> Any:
        with pytest.raises(grpc.RpcError) as raised:
            self.ask(path, **fields)
        return raised.value


@dataclass
class Running:
    client: Client
    served: Any
    port: int


@pytest.fixture(scope="module")
def running(serving) -> Iterator[Callable[..., Running]]:
    """Run a gRPC server of the tiny models on an event loop in a thread."""
    import asyncio

    from packhorse.serve.rpc.server import RpcServer

    stops: list[Callable[[], None]] = []

    def begin(names: Sequence[str] = ("tiny", "ranker"), **settings: Any) -> Running:
        port = free_port()
        served = serving(names=names, grpc_port=port, **settings)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        server = RpcServer(served.guard.app, served.guard)
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(SECONDS)

        def stop() -> None:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result(SECONDS)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(SECONDS)
            loop.close()

        stops.append(stop)
        client = Client(port, *settings.get("keys", ())[:1])
        return Running(client, served, port)

    yield begin
    for stop in stops:
        stop()


@pytest.fixture(scope="module")
def rpc(running) -> Running:
    """A shared server with default settings; do not change it."""
    return running()


def encoder(rpc: Running, name: str = "tiny") -> Any:
    return rpc.served.models.named(name).encoder


# Answers ---------------------------------------------------------------------------------------


def test_every_method_of_the_interface_is_there() -> None:
    services = read_interface("tei.proto").services.values()
    names = {f"{service.name}/{method.name}" for service in services for method in service.methods}
    assert names == set(METHODS)


def test_vectors_are_those_of_the_library(rpc) -> None:
    for text, expected in zip(TEXTS, encoder(rpc).embed(TEXTS, normalize=True), strict=True):
        response = rpc.client.ask("Embed/Embed", inputs=text)
        np.testing.assert_allclose(response.embeddings, expected, atol=1e-5)
        assert response.metadata.compute_chars == len(text)
        assert response.metadata.compute_tokens == len(encoder(rpc).tokenize([text])[0].ids)
        assert response.metadata.total_time_ns >= response.metadata.inference_time_ns > 0


def test_options_of_a_vector_act(rpc) -> None:
    (raw,) = encoder(rpc).embed(TEXTS[:1], normalize=False)
    response = rpc.client.ask("Embed/Embed", inputs=TEXTS[0], normalize=False, dimensions=8)
    np.testing.assert_allclose(response.embeddings, raw[:8], atol=1e-5)
    (prompted,) = encoder(rpc).embed(TEXTS[:1], normalize=True, prompt="query")
    response = rpc.client.ask("Embed/Embed", inputs=TEXTS[0], prompt_name="query")
    np.testing.assert_allclose(response.embeddings, prompted, atol=1e-5)
    assert not np.allclose(raw / np.linalg.norm(raw), prompted, atol=1e-5)


def test_a_stream_is_answered_in_its_order(rpc) -> None:
    texts = [" ".join(TEXTS[i % 3] for _ in range(1 + i % 4)) for i in range(200)]
    answers = list(rpc.client.stream("Embed/EmbedStream", *({"inputs": text} for text in texts)))
    expected = encoder(rpc).embed(texts, normalize=True)
    np.testing.assert_allclose([answer.embeddings for answer in answers], expected, atol=1e-5)


def test_a_stream_of_no_messages_has_no_answers(rpc) -> None:
    assert list(rpc.client.stream("Embed/EmbedStream")) == []


def test_an_error_in_a_stream_comes_after_the_answers_before_it(rpc) -> None:
    answers = rpc.client.stream(
        "Embed/EmbedStream", {"inputs": TEXTS[0]}, {"inputs": ""}, {"inputs": TEXTS[1]}
    )
    assert len(next(answers).embeddings) == 96
    with pytest.raises(grpc.RpcError) as raised:
        next(answers)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "empty" in (raised.value.details() or "")


def test_token_vectors_are_hidden_states(rpc) -> None:
    (expected,) = encoder(rpc).hidden(TEXTS[:1])
    for response in (
        rpc.client.ask("Embed/EmbedAll", inputs=TEXTS[0]),
        *rpc.client.stream("Embed/EmbedAllStream", {"inputs": TEXTS[0]}),
    ):
        states = [token.embeddings for token in response.token_embeddings]
        np.testing.assert_allclose(states, expected.states, atol=1e-5)


def test_predictions_are_those_of_the_library(rpc) -> None:
    pair = (TEXTS[0], TEXTS[1])
    single, double = encoder(rpc).classify([TEXTS[0], pair])
    for expected, responses in (
        (single, [rpc.client.ask("Predict/Predict", inputs=TEXTS[0])]),
        (single, [rpc.client.ask("Predict/PredictPair", inputs=[TEXTS[0]])]),
        (single, list(rpc.client.stream("Predict/PredictStream", {"inputs": TEXTS[0]}))),
        (double, [rpc.client.ask("Predict/PredictPair", inputs=pair)]),
        (double, list(rpc.client.stream("Predict/PredictPairStream", {"inputs": pair}))),
    ):
        (response,) = responses
        scores = {prediction.label: prediction.score for prediction in response.predictions}
        assert scores == pytest.approx(expected.scores, abs=1e-5)
        assert list(scores) == list(expected.scores)
    raw = rpc.client.ask("Predict/Predict", inputs=TEXTS[0], raw_scores=True)
    assert sum(prediction.score for prediction in raw.predictions) != pytest.approx(1, abs=1e-3)


def test_rankings_are_those_of_the_library(rpc) -> None:
    expected = encoder(rpc, "ranker").rerank("who saw", TEXTS, raw=True)
    logits = [rank.score for rank in expected]
    whole = rpc.client.ask("Rerank/Rerank", query="who saw", texts=TEXTS, return_text=True)
    parts = rpc.client.stream(
        "Rerank/RerankStream",
        {"query": "who saw", "text": TEXTS[0], "return_text": True, "truncate": True},
        *({"query": "who saw", "text": text} for text in TEXTS[1:]),
    )
    for response in (whole, parts):
        assert [rank.index for rank in response.ranks] == [rank.index for rank in expected]
        assert [rank.text for rank in response.ranks] == [rank.text for rank in expected]
        scores = [rank.score for rank in response.ranks]
        assert scores == pytest.approx([1 / (1 + math.exp(-logit)) for logit in logits], abs=1e-5)
    raw = [
        rpc.client.ask("Rerank/Rerank", query="who saw", texts=TEXTS, raw_scores=True),
        rpc.client.stream(
            "Rerank/RerankStream",
            {"query": "who saw", "text": TEXTS[0], "raw_scores": True},
            *({"query": "who saw", "text": text} for text in TEXTS[1:]),
        ),
    ]
    for response in raw:
        assert [rank.score for rank in response.ranks] == pytest.approx(logits, abs=1e-5)
    bare = rpc.client.ask("Rerank/Rerank", query="who saw", texts=TEXTS)
    assert not any(rank.HasField("text") for rank in bare.ranks)


def test_tokens_and_texts(rpc) -> None:
    response = rpc.client.ask("Tokenize/Tokenize", inputs="the cat", add_special_tokens=True)
    assert [token.text for token in response.tokens] == ["[CLS]", "the", "cat", "[SEP]"]
    assert [token.special for token in response.tokens] == [True, False, False, True]
    assert [(t.start, t.stop) for t in response.tokens if t.HasField("start")] == [(0, 3), (4, 7)]
    (streamed,) = rpc.client.stream("Tokenize/TokenizeStream", {"inputs": "the cat"})
    ids = [token.id for token in streamed.tokens]
    assert ids == [token.id for token in response.tokens[1:-1]]
    assert rpc.client.ask("Tokenize/Decode", ids=ids).text == "the cat"
    (decoded,) = rpc.client.stream("Tokenize/DecodeStream", {"ids": ids})
    assert decoded.text == "the cat"


def test_info_is_that_of_http(rpc) -> None:
    response = rpc.client.ask("Info/Info")
    document = rpc.served.get("/info").json()
    for field in ("model_id", "model_dtype", "max_input_length", "max_batch_tokens", "version"):
        assert getattr(response, field) == document[field]
    assert response.max_client_batch_size == document["max_client_batch_size"]
    assert not response.HasField("max_batch_requests")


def test_an_answer_has_the_headers_of_http(rpc) -> None:
    method = rpc.client.method("Embed/Embed")
    _, call = method.with_call(rpc.client.make("Embed/Embed", inputs=TEXTS[0]), timeout=SECONDS)
    initial = dict(call.initial_metadata())
    assert initial["x-compute-characters"] == str(len(TEXTS[0]))
    trailing = dict(call.trailing_metadata())
    assert trailing["x-packhorse-fingerprint"] == encoder(rpc).fingerprint
    assert trailing["x-packhorse-pack"].startswith("fill=")


def test_ids_are_those_of_the_call(rpc) -> None:
    method = rpc.client.method("Embed/Embed")
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    ids = [("x-request-id", "Req-1"), ("traceparent", f"00-{trace}-00f067aa0ba902b7-01")]
    for inputs in (TEXTS[0], ""):  # answered, and refused
        message = rpc.client.make("Embed/Embed", inputs=inputs)
        call = method.future(message, metadata=ids, timeout=SECONDS)
        trailing = dict(call.trailing_metadata())
        assert trailing["x-request-id"] == "Req-1"
        assert trailing["traceparent"].startswith(f"00-{trace}-")


# Refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "code", "message"),
    [
        ("Embed/Embed", {"inputs": ""}, "INVALID_ARGUMENT", "empty"),
        ("Embed/Embed", {"inputs": "cat " * 100}, "INVALID_ARGUMENT", "more tokens"),
        ("Embed/Embed", {"inputs": "cat", "dimensions": 97}, "INVALID_ARGUMENT", "dimensions"),
        ("Embed/Embed", {"inputs": "cat", "dimensions": 0}, "INVALID_ARGUMENT", "dimensions"),
        ("Embed/Embed", {"inputs": "cat", "prompt_name": "x"}, "INVALID_ARGUMENT", "prompt"),
        (
            "Embed/Embed",
            {"inputs": "cat", "truncation_direction": 7},
            "INVALID_ARGUMENT",
            "truncation_direction",
        ),
        ("Predict/PredictPair", {"inputs": ["a"] * 3}, "INVALID_ARGUMENT", "3 texts"),
        ("Rerank/Rerank", {"query": "cat"}, "INVALID_ARGUMENT", "no input"),
        ("Tokenize/Decode", {}, "INVALID_ARGUMENT", "no input"),
    ],
)
def test_refusals_have_codes_and_reasons(rpc, path, fields, code, message) -> None:
    error = rpc.client.refusal(path, **fields)
    assert error.code().name == code
    assert message in error.details()


def test_a_long_text_is_truncated_where_asked(rpc) -> None:
    text = "cat " * 30 + "horse " * 30
    for direction, kept in ((0, "cat "), (1, "horse ")):
        response = rpc.client.ask(
            "Embed/Embed", inputs=text, truncate=True, truncation_direction=direction
        )
        long = "truncate_left" if direction else "truncate"
        (expected,) = encoder(rpc).embed([text], normalize=True, long=long)
        np.testing.assert_allclose(response.embeddings, expected, atol=1e-5, err_msg=kept)


def test_a_model_without_the_head_says_what_it_supports(running) -> None:
    client = running(names=("ranker",)).client
    error = client.refusal("Embed/Embed", inputs="cat")
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "it supports" in error.details()


def test_a_message_that_cannot_be_read_is_refused(rpc) -> None:
    method = rpc.client.channel.unary_unary("/tei.v1.Embed/Embed")  # raw bytes
    with pytest.raises(grpc.RpcError) as raised:
        method(b"\x0a\xff", timeout=SECONDS)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_keys_are_those_of_http(running) -> None:
    protected = running(keys=("secret",))
    assert len(protected.client.ask("Embed/Embed", inputs="cat").embeddings) == 96
    for client in (Client(protected.port), Client(protected.port, "wrong")):
        assert client.refusal("Embed/Embed", inputs="cat").code().name == "UNAUTHENTICATED"
        assert client.refusal("Info/Info").code().name == "UNAUTHENTICATED"
        # Load balancers have no key.
        assert client.ask("Health/Check", "grpc.health.v1").status == 1


def test_lanes_and_reloaded_keys_are_those_of_http(running) -> None:
    protected = running(keys=("search: s", "nightly: n bulk"))

    def lane(key: str, name: str) -> str:
        message = protected.client.make("Embed/Embed", inputs="cat")
        metadata = (("authorization", f"Bearer {key}"), ("x-packhorse-lane", name))
        try:
            protected.client.method("Embed/Embed")(message, timeout=SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            return error.code().name
        return "OK"

    assert lane("s", "bulk") == lane("s", "interactive") == lane("n", "bulk") == "OK"
    assert lane("s", "fast") == "INVALID_ARGUMENT"
    assert lane("n", "interactive") == "PERMISSION_DENIED"
    page = protected.served.get("/metrics", headers={"authorization": "Bearer s"}).text
    for key, bulk, count in [("search", "bulk", 1), ("nightly", "bulk", 2)]:
        labels = f'{{key="{key}",lane="{bulk}"}}'
        assert f"packhorse_key_requests_total{labels} {count}.0" in page

    go_on = threading.Event()

    def messages() -> Iterator[Any]:
        yield protected.client.make("Embed/Embed", inputs="cat")
        go_on.wait(SECONDS)
        yield protected.client.make("Embed/Embed", inputs="cat")

    metadata = (("authorization", "Bearer s"),)
    stream = protected.client.method("Embed/EmbedStream")(
        messages(), timeout=SECONDS, metadata=metadata
    )
    assert len(next(stream).embeddings) == 96
    # A new key of the same name: the stream came with the old one.
    protected.served.guard.use_keys(("search: t",))
    go_on.set()
    with pytest.raises(grpc.RpcError) as raised:
        next(stream)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_deadline_that_cannot_be_met_is_refused_at_once(running) -> None:
    leave = threading.Event()
    full = running(names=("tiny",), before=lambda packed: leave.wait(SECONDS))
    runner = full.served.models.default.runner
    runner._engine.recorder.pace.add(100, 1e6)  # it believes that a token takes hours
    message = full.client.make("Embed/Embed", inputs="cat")
    first = full.client.method("Embed/Embed").future(message, timeout=SECONDS)
    wait_for(lambda: runner.stats().running_requests)
    error = full.client.refusal("Embed/Embed", inputs="cat")  # it allows `SECONDS`
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(error.trailing_metadata())["retry-after"]) >= SECONDS
    leave.set()
    assert len(first.result().embeddings) == 96
    assert count_requests(full, "/tei.v1.Embed/Embed", 429) == 1


def test_limits_are_those_of_http(running) -> None:
    small = running(max_batch_inputs=2, max_input_characters=100, max_body_bytes=4096)
    error = small.client.refusal("Rerank/Rerank", query="cat", texts=["a", "b", "c"])
    assert (error.code().name, "at most 2" in error.details()) == ("INVALID_ARGUMENT", True)
    with pytest.raises(grpc.RpcError) as raised:
        small.client.stream("Rerank/RerankStream", *([{"query": "cat", "text": "mat"}] * 3))
    assert raised.value.code().name == "INVALID_ARGUMENT"
    error = small.client.refusal("Tokenize/Tokenize", inputs="c" * 101)
    assert (error.code().name, "101 characters" in error.details()) == ("INVALID_ARGUMENT", True)
    error = small.client.refusal("Embed/Embed", inputs="c" * 5000)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # gRPC's own, as it arrives
    assert len(small.client.ask("Embed/Embed", inputs="cat").embeddings) == 96


def test_a_call_without_a_message_ends_in_time(running) -> None:
    slow = running(receive_seconds=0.2)
    never = threading.Event()

    def messages() -> Iterator[Any]:
        never.wait(SECONDS)
        yield from ()

    for path in ("Embed/EmbedStream", "Rerank/RerankStream"):
        with pytest.raises(grpc.RpcError) as raised:
            response = slow.client.method(path)(messages(), timeout=SECONDS)
            list(response)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "0.2 seconds" in (raised.value.details() or "")
    never.set()


def test_a_full_server_refuses_and_a_cancelled_call_frees_its_place(running) -> None:
    entered, leave = threading.Event(), threading.Event()

    def before(packed: Any) -> None:
        entered.set()
        assert leave.wait(SECONDS)

    full = running(names=("tiny",), before=before, max_concurrent_requests=1)
    message = full.client.make("Embed/Embed", inputs="cat")
    first = full.client.method("Embed/Embed").future(message, timeout=SECONDS)
    assert entered.wait(SECONDS)
    # On the same connection a second call would wait, which HTTP/2 has for this.
    error = Client(full.port).refusal("Embed/Embed", inputs="cat")
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(error.trailing_metadata())["retry-after"]) >= 1
    first.cancel()
    wait_for(lambda: not full.served.guard.in_flight)
    assert full.served.guard.buffered == 0
    leave.set()
    assert len(full.client.ask("Embed/Embed", inputs="cat").embeddings) == 96
    counts = [count_requests(full, "/tei.v1.Embed/Embed", status) for status in (200, 429, 499)]
    assert counts == [1, 1, 1]
    assert "packhorse_dropped_total 1.0" in full.served.get("/metrics").text


def test_a_client_that_does_not_read_is_cut_off(running) -> None:
    slow = running(send_seconds=0.5, idle_seconds=SECONDS)
    request = {"inputs": "cat " * 12_000}  # an answer of a quarter of a megabyte
    unread = slow.client.stream("Tokenize/TokenizeStream", *([request] * 200))
    wait_for(lambda: count_requests(slow, "/tei.v1.Tokenize/TokenizeStream", 499))
    assert (slow.served.guard.in_flight, slow.served.guard.buffered) == (0, 0)
    assert Client(slow.port).ask("Info/Info").model_id == "tiny"
    unread.cancel()


def count_requests(running: Running, route: str, status: int) -> float:
    """The number of calls that ended so."""
    page = running.served.get("/metrics").text
    label = f'packhorse_requests_total{{route="{route}",status="{status}"}} '
    return next((float(line[len(label) :]) for line in page.splitlines() if label in line), 0.0)


def wait_for(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.02)


def test_health_tells_of_services(running) -> None:
    client = running(names=("ranker",)).client

    def status(service: str) -> int:
        return client.ask("Health/Check", "grpc.health.v1", service=service).status

    names = ("", "tei.v1.Info", "tei.v1.Rerank", "tei.v1.Predict", "tei.v1.Embed")
    assert {name: status(name) for name in names} == dict(zip(names, (1, 1, 1, 1, 2), strict=True))
    with pytest.raises(grpc.RpcError) as raised:
        status("other")
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_has_the_interface(rpc) -> None:
    from google.protobuf.descriptor_pool import DescriptorPool
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
        ProtoReflectionDescriptorDatabase,
    )

    database = ProtoReflectionDescriptorDatabase(rpc.client.channel)
    assert {"tei.v1.Embed", "grpc.health.v1.Health"} <= set(database.get_services())
    method = DescriptorPool(database).FindServiceByName("tei.v1.Embed").methods_by_name["Embed"]
    assert method.input_type.fields_by_name["dimensions"].number == 6


def test_who_asks_nothing_of_reflection_loses_the_place(running) -> None:
    client = running(receive_seconds=0.5).client
    ask = client.channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    )
    end = threading.Event()

    def silence() -> Iterator[bytes]:
        end.wait(SECONDS)
        yield from ()

    with pytest.raises(grpc.RpcError) as raised:
        list(ask(silence(), timeout=SECONDS))
    end.set()
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "no question arrived" in raised.value.details()


def test_all_messages_of_a_stream_are_counted(running) -> None:
    small = running(names=("ranker",), max_buffered_bytes=2000)
    messages = [{"query": "who sat", "text": "cat " * 100}] * 10
    with pytest.raises(grpc.RpcError) as raised:
        small.client.stream("Rerank/RerankStream", *messages)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert small.served.guard.buffered == 0


# Processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fronts", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_beside_http_in_the_same_server(start, checkpoint_folder, fronts: str) -> None:
    if fronts != "0" and not hasattr(os, "memfd_create"):
        pytest.skip("fronts share memory by memfd, which is Linux's")
    port = free_port()
    words = ("--fronts", fronts, "--device", "cpu", "--grpc-port", str(port))
    process = start(*words)
    ready = json.loads(process.popen.stdout.readline())
    assert ready["grpc_port"] == port
    process.port = ready["port"]
    client = Client(port)
    (expected,) = packhorse.load(checkpoint_folder, device="cpu").embed(["w1 w2 w3"])
    response = client.ask("Embed/Embed", inputs="w1 w2 w3")
    np.testing.assert_allclose(response.embeddings, expected, atol=1e-5)
    answer = httpx.post(f"{process.url}/embed", json={"inputs": "w1 w2 w3"}, timeout=SECONDS)
    np.testing.assert_allclose(response.embeddings, answer.json()[0], atol=1e-5)
    page = httpx.get(f"{process.url}/metrics", timeout=SECONDS).text
    assert 'packhorse_requests_total{route="/tei.v1.Embed/Embed",status="200"} 1.0' in page

    if fronts != "0":  # which share the port, but not with another server
        second = start(*words)
        assert second.popen.wait(SECONDS) == 2
        assert f"cannot listen on 127.0.0.1:{port}" in second.log()

    # A stream whose client sends nothing more does not hold up the shutdown.
    sent = threading.Event()

    def messages() -> Iterator[Any]:
        yield client.make("Embed/EmbedStream", inputs="w1")
        sent.wait(SECONDS)

    stream = client.method("Embed/EmbedStream")(messages(), timeout=SECONDS)
    assert next(stream).embeddings
    process.popen.send_signal(signal.SIGTERM)
    with pytest.raises(grpc.RpcError) as raised:
        next(stream)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    sent.set()
    assert process.popen.wait(SECONDS) == 0
