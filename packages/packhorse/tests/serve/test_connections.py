"""What one connection may send, byte by byte over a real socket: framing and limits.

The rules are those of RFC 9112 (HTTP/1.1) about what a server must or may refuse: sections
2.2 (bare LF), 3.2 (Host), 5.1 and 5.2 (header lines), 6.1 to 6.3 (lengths), 7.1 (chunks).
"""

from __future__ import annotations

import json
import re
import socket

import pytest

HOST = b"Host: localhost\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HOST
POST = b"POST /embed HTTP/1.1\r\nContent-Type: application/json\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = json.dumps({"inputs": "the cat"}).encode()
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)
NEXT = GET + b"\r\n"  # the request that would be smuggled
MEGABYTE = b"x" * 1_000_000


@pytest.fixture(scope="module")
def port(served, listen) -> int:
    return listen(served)


def send(port: int, *parts: bytes, count: int | None = None) -> list[int]:
    """Send all parts; return the statuses of `count` answers, or of all until it closes."""
    received = b""
    codes = []
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            while len(codes) != count and (data := connection.recv(65536)):
                received += data
                codes = [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]
        except (ConnectionResetError, BrokenPipeError):  # closed while more was being sent
            pass
    return codes


SMUGGLING = {
    "length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 0\r\nContent-Length: 0\r\n\r\n",
    "a list of lengths": POST + b"Content-Length: 0, 0\r\n\r\n",
    "a signed length": POST + b"Content-Length: +0\r\n\r\n",
    "another coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a coding more": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked last but one": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n",
    "LF after the request line": b"GET /health HTTP/1.1\n" + HOST + b"\r\n",
    "LF after a header": GET + b"X: y\nZ: z\r\n\r\n",
    "LF after the headers": GET + b"\n",
    "LF everywhere": GET.replace(b"\r\n", b"\n") + b"\n",
    "CR after a header": GET + b"X: y\rZ: z\r\n\r\n",
    "LF after a chunk's size": CHUNKED + CHUNK.replace(b"\r\n", b"\n", 1) + b"0\r\n\r\n",
    "LF after a chunk": CHUNKED + CHUNK[:-2] + b"\n0\r\n\r\n",
    "LF after the last chunk": CHUNKED + CHUNK + b"0\n\r\n",
    "LF after a trailer": CHUNKED + CHUNK + b"0\r\nX: y\n\r\n",
    "LF in an extension": CHUNKED + b"5;a\nb\r\nhello\r\n0\r\n\r\n",
    "a size in 0x": CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n",
    "a size over 64 bits": CHUNKED + b"10000000000000005\r\nhello\r\n0\r\n\r\n",
    "a blank before the colon": GET + b"Content-Length : 5\r\n\r\n",
    "a folded header": GET + b"X: y\r\n z\r\n\r\n",
    "NUL in a header": GET + b"X: y\0z\r\n\r\n",
    "no Host": b"GET /health HTTP/1.1\r\n\r\n",
    "two Hosts": GET + HOST + b"\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/2.0": GET.replace(b"HTTP/1.1", b"HTTP/2.0") + b"\r\n",
    "a body behind an offer to upgrade": POST
    + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: %d\r\n\r\n" % len(NEXT),
}


@pytest.mark.parametrize("request_bytes", SMUGGLING.values(), ids=SMUGGLING)
def test_what_servers_read_differently_is_refused(port, request_bytes) -> None:
    """One answer, 400; what follows is not read as another request."""
    assert send(port, request_bytes + NEXT) == [400]


def pipelined(count: int) -> bytes:
    return b"".join(b"X-%d: y\r\n" % number for number in range(count))


def kilobytes(count: int) -> bytes:
    return b"".join(b"X: %b\r\n" % (b"y" * 1019) for _ in range(count))


TOO_MUCH = {
    "headers": (GET + pipelined(100) + b"\r\n", 431),
    "bytes of headers": (GET + kilobytes(16) + b"\r\n", 431),
    "one header": (GET + b"X: %b\r\n\r\n" % (b"y" * 8192), 431),
    "a header without end": (GET + b"X: " + MEGABYTE, 431),
    "a name without end": (GET + MEGABYTE, 431),
    "headers without end": (GET + b"a:\r\n" * 250_000, 431),
    "a target": (b"GET /%b HTTP/1.1\r\n\r\n" % (b"x" * 8192), 414),
    "a target without end": (b"GET /" + MEGABYTE, 414),
    "trailers": (CHUNKED + CHUNK + b"0\r\n" + pipelined(100) + b"\r\n", 431),
    "bytes of trailers": (CHUNKED + CHUNK + b"0\r\n" + kilobytes(16) + b"\r\n", 431),
    "a trailer without end": (CHUNKED + CHUNK + b"0\r\nX: " + MEGABYTE, 431),
    "trailers without end": (CHUNKED + CHUNK + b"0\r\n" + b"a:\r\n" * 250_000, 431),
    "an extension without end": (CHUNKED + b"5;a=" + MEGABYTE, 431),
    "a size without end": (CHUNKED + b"0" * 1_000_000, 431),
    "chunks of a byte": (CHUNKED + b"1\r\nx\r\n" * 20_000, 400),
    "empty lines": (b"\r\n" * 500_000, 431),
}


@pytest.mark.parametrize(("request_bytes", "status"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_more_than_the_bounds_is_refused(port, request_bytes, status) -> None:
    """The answer may be lost if the client still sends when the connection is closed."""
    received = send(port, request_bytes)
    assert received == [status] or (received == [] and len(request_bytes) >= 100_000)


@pytest.mark.parametrize("part", [1, 100, 5000])
def test_bounds_do_not_depend_on_how_bytes_arrive(port, part) -> None:
    """Exactly the limit, in parts of any size, and one header more."""
    most = GET + kilobytes(15) + pipelined(83) + b"\r\n"
    for request_bytes, answers in [(most, ([200],)), (GET + pipelined(100) + b"\r\n", ([431], []))]:
        parts = [request_bytes[at : at + part] for at in range(0, len(request_bytes), part)]
        assert send(port, *parts, count=1) in answers


WITHIN = {
    "99 headers": (GET + pipelined(99) + b"\r\n", [200]),
    "a header of 8 KiB": (GET + b"X: %b\r\n\r\n" % (b"y" * 8187), [200]),
    "extensions and trailers": (
        CHUNKED + CHUNK.replace(b"\r\n", b";a=b\r\n", 1) + b"0\r\nX: y\r\n\r\n" + NEXT,
        [200, 200],
    ),
    "a small body by the byte": (
        CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n" + NEXT,
        [200, 200],
    ),
    "an empty line between requests": (NEXT + b"\r\n" + NEXT, [200, 200]),
    "an offer to upgrade": (
        GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n" + NEXT,
        [200, 200],
    ),
    "HTTP/1.0 without Host": (b"GET /health HTTP/1.0\r\n\r\n", [200]),
    "many requests in a row": (NEXT * 64, [200] * 64),
}


@pytest.mark.parametrize(("request_bytes", "answers"), WITHIN.values(), ids=WITHIN)
def test_what_is_within_the_bounds_is_answered(port, request_bytes, answers) -> None:
    assert send(port, request_bytes, count=len(answers)) == answers


def test_requests_that_are_not_waited_for_are_bounded(port) -> None:
    """All arrive at once, before the first can be answered; no answer is cut off."""
    received = send(port, NEXT * 80)
    assert len(received) < 80 and set(received) <= {200}


def test_trailers_are_no_headers(serving, listen) -> None:
    """An API key in a trailer is ignored."""
    port = listen(serving(keys=("right",)))
    trailer = b"0\r\nAuthorization: Bearer right\r\n\r\n"
    assert send(port, CHUNKED + CHUNK + trailer) == [401]
