"""Keys, sizes, deadlines and concurrency: what is refused before the application runs."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.serve import guard
from packhorse.serve.guard import has_more_values

TEXT = {"inputs": "the cat sat"}
JSON = {"content-type": "application/json"}


def raw(app: Any, messages: list[Any], **scope: Any) -> tuple[int, dict[str, str], bytes]:
    """Call the app over ASGI; returns status, headers, body. A message may be a coroutine."""
    sent: list[Any] = []
    waiting = list(messages)

    async def receive() -> Any:
        if not waiting:
            await asyncio.sleep(60)
        message = waiting.pop(0)
        return await message() if callable(message) else message

    async def send(message: Any) -> None:
        sent.append(message)

    headers = {"content-type": "application/json", **scope.pop("headers", {})}
    full_scope = {"type": "http", "method": "POST", "path": "/embed", "query_string": b"", **scope}
    full_scope["raw_path"] = full_scope["path"].encode()
    full_scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(app({"http_version": "1.1", "scheme": "http", **full_scope}, receive, send))
    if not sent:
        return 0, {}, b""
    answered = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], answered, b"".join(message.get("body", b"") for message in sent[1:])


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def body_of(size: int) -> bytes:
    """Return a JSON body of so many bytes."""
    frame = b'{"inputs":"","x":""}'
    return b'{"inputs":"cat","x":"' + b"y" * (size - len(frame) - 3) + b'"}'


@pytest.fixture(scope="module")
def small(serving):
    return serving(max_body_bytes=200, receive_seconds=0.05, max_buffered_bytes=150)


@pytest.fixture(scope="module")
def locked(serving):
    return serving(keys=("right", "other"))


def test_a_body_within_the_limit_is_read(serving) -> None:
    served = serving(max_body_bytes=200)
    for size in (199, 200):
        body = body_of(size)
        assert len(body) == size
        assert served.post("/embed", content=body, headers=JSON).status_code == 200


def test_one_byte_more_is_not(small) -> None:
    response = small.post("/embed", content=body_of(201), headers=JSON)
    assert (response.status_code, response.headers["connection"]) == (413, "close")
    assert response.json() == {
        "error": "the body is too large; at most 200 bytes are allowed (max_body_bytes)",
        "error_type": "Validation",
    }


def test_nothing_is_read_past_the_limit(small) -> None:
    """With any Content-Length or none, nothing is read after the part that exceeds the limit."""

    def never() -> Any:
        raise AssertionError("read past the limit")

    for headers in ({"transfer-encoding": "chunked"}, {"content-length": "10"}):
        parts = [part(b"x" * 70, True), part(b"x" * 70, True), part(b"x" * 70, True), never]
        small.guard.settings = small.settings.__class__(max_body_bytes=200)
        status, _, _ = raw(small.app, parts, headers=headers)
        small.guard.settings = small.settings
        assert status == 413
    assert small.guard.buffered == 0


def test_a_length_that_is_too_large_is_refused_unread(small) -> None:
    assert raw(small.app, [], headers={"content-length": "201"})[0] == 413


def test_chunks_without_a_length_are_read(served) -> None:
    parts = [part(bytes([byte]), True) for byte in json.dumps(TEXT).encode()] + [part(b"")]
    assert raw(served.app, parts, headers={"transfer-encoding": "chunked"})[0] == 200


def test_all_bodies_together_are_bounded(small) -> None:
    status, headers, _ = raw(small.app, [part(body_of(160))], headers={"content-length": "160"})
    assert (status, int(headers["retry-after"]) >= 1) == (429, True)
    assert small.guard.buffered == 0


def test_a_body_that_does_not_arrive_is_given_up(small) -> None:
    status, headers, body = raw(small.app, [part(b"{", True)], headers={"content-length": "50"})
    assert (status, headers["connection"]) == (408, "close")
    assert b"0.05 seconds" in body
    assert small.guard.in_flight == small.guard.buffered == 0


def test_a_slow_body_takes_no_place(serving) -> None:
    served = serving(max_concurrent_requests=1, receive_seconds=5)
    inside = []

    async def late() -> Any:
        inside.append(served.guard.in_flight)
        return part(json.dumps(TEXT).encode())

    assert raw(served.app, [late], headers={"content-length": "24"})[0] == 200
    assert inside == [0]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 411),
        ({"content-length": "24", "content-encoding": "gzip"}, 415),
        ({"content-length": "24", "content-type": "text/plain"}, 415),
        ({"content-length": "24", "content-type": ""}, 200),
        ({"content-length": "24", "content-type": "", "origin": "null"}, 415),
        ({"content-length": "24", "content-type": "application/json; charset=utf-8"}, 200),
        ({"content-length": "24", "content-encoding": "identity"}, 200),
    ],
)
def test_headers(served, headers: dict[str, str], status: int) -> None:
    body = [part(json.dumps(TEXT).encode())] if status == 200 else []
    assert raw(served.app, body, headers=headers)[0] == status


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", (400, 422)),
        (b"{", 400),
        (b"[" * 15_000, 400),
        (b"[" * 100_000, 413),
        (b'{"inputs":' + b"[" * 15_000 + b"]" * 15_000 + b"}", (400, 422)),
        (b'{"inputs": "\\ud800"}', (400, 422)),
        (b'{"inputs": "\xff"}', (400, 422)),
        (b'{"inputs": []}', (400, 422)),
        (b'{"inputs": ""}', 400),
        (b'{"inputs": 7}', 422),
        (json.dumps({"inputs": ["cat"] * 2049}).encode(), (413, 422)),
        (json.dumps({"inputs": [1] * 300_000}).encode(), (413, 422)),
        (json.dumps({"inputs": "cat " * 50_001}).encode(), 413),
    ],
)
def test_senseless_bodies_are_refused(served, body: bytes, status: Any) -> None:
    response = served.post("/embed", content=body, headers=JSON)
    assert response.status_code in (status if isinstance(status, tuple) else (status,)), (
        response.text
    )
    assert set(response.json()) == {"error", "error_type"}


def test_every_route_is_closed_without_a_key(locked) -> None:
    """Routes of the API description, and unknown ones."""
    schema = locked.get("/openapi.json", headers={"authorization": "Bearer right"}).json()
    routes = [(method, path) for path, item in schema["paths"].items() for method in item]
    assert len(routes) > 10
    for method, path in [*routes, ("get", "/openapi.json"), ("get", "/nowhere"), ("post", "/")]:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "right"}):
            response = locked.ask(method.upper(), path, headers=headers)
            assert response.status_code == (200 if path in ("/health", "/ping") else 401), (
                method,
                path,
            )
        response = locked.ask(method.upper(), path, headers={"authorization": "Bearer right"})
        assert response.status_code != 401, (method, path)


def test_any_of_the_keys_opens(locked) -> None:
    def status(value: str) -> int:
        return locked.post("/embed", TEXT, headers={"authorization": value}).status_code

    basic = base64.b64encode(b"anyone:other").decode()
    assert [status(v) for v in ("Bearer right", "bearer other", f"Basic {basic}")] == [200] * 3
    wrong = ["", "Bearer", "Bearer ", "Bearer rightother", "Basic !!", "Basic " + "cmlnaHQ=", "Key"]
    assert [status(value) for value in wrong] == [401] * len(wrong)


def test_two_authorizations_are_refused(locked, served) -> None:
    """Whichever is valid: a proxy may have checked the other."""
    for values in (["right", "wrong"], ["wrong", "right"], ["right", "right"]):
        headers = [("authorization", f"Bearer {value}") for value in values]
        response = locked.post("/embed", TEXT, headers=headers)
        assert (response.status_code, "Authorization" in response.text) == (400, True)


LOCAL = ["localhost", "localhost:8080", "LOCALHOST", "a.localhost:1", "127.0.0.1:8080"]
LOCAL += ["127.9.9.9", "[::1]:8080", "[::1]", "localhost."]
FOREIGN = ["evil.example", "evil.example:8080", "localhost.evil.example", "notlocalhost"]
FOREIGN += ["127.0.0.1.evil.example", "192.0.2.7", "[2001:db8::1]:80", "", "local host", "[::1"]
FOREIGN += ["localhost:80:evil.example", "127.0.0.1@evil.example"]


def status_for(served: Any, host: str) -> int:
    return served.post("/embed", TEXT, headers={"host": host}).status_code


def test_without_a_key_the_host_must_be_this_server(serving, locked) -> None:
    """A page whose domain resolves to this machine (DNS rebinding) still sends its domain."""
    served = serving()
    assert {host: status_for(served, host) for host in LOCAL} == dict.fromkeys(LOCAL, 200)
    assert {host: status_for(served, host) for host in FOREIGN} == dict.fromkeys(FOREIGN, 403)
    refused = served.get("/health", headers={"host": "evil.example"})
    assert (refused.status_code, "--allow-host" in refused.text) == (403, True)
    assert "evil" not in refused.text
    key = {"authorization": "Bearer right", "host": "evil.example"}
    assert locked.post("/embed", TEXT, headers=key).status_code == 200


def test_names_and_addresses_that_the_server_has(serving) -> None:
    named = serving(host="192.0.2.7", insecure=True, allow_host=("Packhorse.local", "[::2]"))
    known = ["192.0.2.7:80", "packhorse.local:8080", "[::2]", "localhost"]
    unknown = ["192.0.2.8", "local", "x.packhorse.local"]
    everywhere = serving(host="0.0.0.0", insecure=True)  # any address of the machine
    addresses = ["192.0.2.8", "[2001:db8::1]:80"]
    assert [status_for(named, host) for host in known] == [200] * 4
    assert [status_for(named, host) for host in unknown] == [403] * 3
    assert [status_for(everywhere, host) for host in addresses] == [200] * 2
    assert status_for(everywhere, "evil.example") == 403


def test_a_slash_at_the_end_leads_nowhere(served) -> None:
    """A redirect would repeat the Host header that was sent."""
    for method, path in [("POST", "/embed/"), ("GET", "/health/"), ("GET", "/info/")]:
        response = served.ask(method, path, json=TEXT, headers={"host": "a.localhost"})
        assert (response.status_code, "location" in response.headers) == (404, False)


def test_the_dialects_say_no_in_their_words(locked) -> None:
    shapes = {path: locked.post(path, {}).json() for path in ("/embed", "/v1/embeddings", "/")}
    shapes |= {path: locked.post(path, {}).json() for path in ("/v1/rerank", "/models/x")}
    message = "the API key is missing or wrong"
    assert shapes["/embed"] == {"error": message, "error_type": "Validation"}
    assert shapes["/v1/embeddings"]["error"]["type"] == "authentication_error"
    assert shapes["/v1/rerank"]["message"] == message
    assert shapes["/"] == shapes["/models/x"] == {"error": message}


def test_no_more_than_so_many_at_once(serving) -> None:
    go = threading.Event()
    served = serving(max_concurrent_requests=3, before=lambda packed: go.wait(120))

    async def work(client: Any) -> list[Any]:
        first = [asyncio.ensure_future(client.post("/embed", json=TEXT)) for _ in range(3)]
        while served.guard.in_flight < 3:
            await asyncio.sleep(0.005)
        beyond = [await client.post("/embed", json=TEXT), await client.get("/health")]
        go.set()
        return [*beyond, *[await task for task in first]]

    refused, health, *answered = served.run(work)
    assert (refused.status_code, refused.json()["error_type"]) == (429, "Overloaded")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert [health.status_code, *[response.status_code for response in answered]] == [200] * 4
    assert served.guard.in_flight == 0
    assert served.post("/embed", TEXT).status_code == 200


def test_no_other_page_may_call(served) -> None:
    preflight = {"origin": "https://example.org", "access-control-request-method": "POST"}
    response = served.ask("OPTIONS", "/embed", headers=preflight)
    assert not [name for name in response.headers if name.startswith("access-control")]
    response = served.post("/embed", TEXT, headers={"origin": "https://example.org"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_pages_that_are_named_may(serving) -> None:
    served = serving(cors_origin=("https://example.org",), keys=("right",))
    preflight = {"origin": "https://example.org", "access-control-request-method": "POST"}
    # Of OpenAI's JavaScript client, and of tracing.
    names = "authorization,content-type,openai-organization,openai-project,traceparent,tracestate"
    names += ",x-request-id,x-stainless-arch,x-stainless-lang,x-stainless-retry-count"
    preflight["access-control-request-headers"] = names
    response = served.ask("OPTIONS", "/embed", headers=preflight)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://example.org"
    assert response.headers["access-control-allow-headers"] == names
    assert "access-control-allow-credentials" not in response.headers
    assert served.ask(
        "OPTIONS", "/embed", headers=preflight | {"origin": "https://example.net"}
    ).is_error
    assert served.post("/embed", TEXT, headers={"origin": "https://example.org"}).is_error


def test_a_mistake_of_ours_is_500_and_leaves_no_text_in_the_log(
    serving, caplog, monkeypatch
) -> None:
    served = serving()
    monkeypatch.setattr(served.models, "find", lambda *arguments: {}["the secret text"])
    response = served.post("/embed", TEXT)
    assert (response.status_code, response.json()["error_type"]) == (500, "Backend")
    assert served.guard.in_flight == 0
    assert "secret" not in response.text


@pytest.mark.parametrize(
    ("body", "more"),
    [
        (b'{"inputs": [' + b",".join([b"[1]"] * 200) + b"]}", True),
        (b'{"inputs": [' + b",".join([b'"a"'] * 200) + b"]}", True),
        (b'{"inputs": [' + b",".join([b'"a"'] * 80) + b"]}", False),
        (b'{"inputs": ' + b"[" * 30, True),
        (b'{"inputs": ' + b"[" * 20, False),
        (b'{"inputs": [' + b",".join([b'{"a": 1}'] * 12) + b"]}", True),
        (b'{"inputs": "' + b"a, b: [{" * 400 + b'"}', False),
        (b'{"inputs": "' + rb"he said \"a, b\", " * 400 + b'"}', False),
        (b'{"inputs": "' + rb"C:\\, " * 400 + b'"}', False),
        (b'{"inputs": "' + rb'a\\",[' + b"1," * 200 + b"1]]}", True),
        (b"," * 300, True),
        (b'"' + b"," * 300, False),  # no JSON, and refused as that
        (b'["' + rb"\"," * 200_000, False),  # nor this, which must not take long
    ],
)
def test_values_are_counted_outside_of_strings(body: bytes, more: bool) -> None:
    assert has_more_values(body, 100) is more


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from([b'"', b"\\", b",", b"a", b'\\"', b"[1,", b"{"]), max_size=60),
    st.data(),
)
def test_slices_are_counted_as_one(parts: list[bytes], data: st.DataObject) -> None:
    body = b"".join(parts)
    weights = {",": 1, "[": guard.COMPOUND_VALUES, "{": guard.COMPOUND_VALUES}
    values = 0
    is_string = is_escaped = False
    for character in body.decode():
        values += 0 if is_string else weights.get(character, 0)
        if character == '"' and not is_escaped:
            is_string = not is_string
        is_escaped = character == "\\" and not is_escaped
    quotes = body.count(b'"')
    size = data.draw(st.integers(1, 70))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "SLICE_BYTES", size)
        assert b"".join(guard._slices(body)) == body
        for limit in (values - 1, values, values + 1):
            if limit >= 0 and quotes <= 2 * limit:  # else there are too many strings
                assert has_more_values(body, limit) is (values > limit)


def test_a_body_of_very_many_values_is_413(serving) -> None:
    served = serving(max_body_values=100)
    body = b'{"inputs": [' + b",".join([b"[1]"] * 200) + b"]}"
    response = served.ask(
        "POST", "/embed", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 413 and "100 JSON values" in response.text
    text = {"inputs": "a, b, " * 200, "truncate": True}
    assert served.post("/embed", text).status_code == 200
