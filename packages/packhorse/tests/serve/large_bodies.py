"""How long a lone client waits while bodies of 2 MB arrive: median and worst, per kind of body.

    python tests/serve/large_bodies.py --fronts 2

Large bodies keep coming, one after the other on a connection of their own, and another client sends
a short text every few milliseconds. Its latency is compared with the same client's alone, in turns,
because the machine is rarely quiet: what counts is how much larger the median and the worst are.
The worst times include what other processes of the machine took.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

SIZE = 2_000_000
PAUSE = 0.005  # seconds between two requests of the lone client
WORD = "lorem ipsum dolor sit amet "
TEXT = json.dumps({"inputs": "the cat sat on a mat"}).encode()


def inputs(count: int, text: str) -> bytes:
    return json.dumps({"inputs": [text] * count}).encode()


BODIES = {
    "plain text": inputs(32, (WORD * SIZE)[: SIZE // 32]),
    "escapes": inputs(32, "\n" * (SIZE // 64)),
    "escaped letters": inputs(32, "\u00e9" * (SIZE // 192)),
    "2,048 texts": inputs(2048, (WORD * 99)[: SIZE // 2048]),
    "[1]": b'{"inputs":[' + b",".join([b"[1]"] * (SIZE // 4)) + b"]}",
    "as many [1] as allowed": b'{"inputs":[' + b",".join([b"[1]"] * 13_000) + b"]}",
    "as many fields as allowed": json.dumps(
        {"inputs": "a", **{f"k{i}": 1 for i in range(13_000)}}
    ).encode(),
}


def post(client: http.client.HTTPConnection, body: bytes) -> int:
    client.request("POST", "/embed", body, {"Content-Type": "application/json"})
    answer = client.getresponse()
    answer.read()
    return answer.status


class LargeBodies:
    """Sends a body again and again in a thread, on one connection after the other."""

    def __init__(self, port: int, body: bytes) -> None:
        self.port = port
        self.body = body
        self.statuses: Counter[int] = Counter()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._send, daemon=True)

    def __enter__(self) -> LargeBodies:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.thread.join()

    def _send(self) -> None:
        while not self.stopped.is_set():
            client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            try:
                self.statuses[post(client, self.body)] += 1
            except OSError:  # it refused before it had read all
                self.statuses[0] += 1
            finally:
                client.close()


def latencies(port: int, seconds: float) -> list[float]:
    """Return what the lone client waits for each answer, in milliseconds."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    times: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        begun = time.perf_counter()
        assert post(client, TEXT) == 200
        times.append(1e3 * (time.perf_counter() - begun))
        time.sleep(PAUSE)
    client.close()
    return times


def measure(port: int, rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    latencies(port, 1.0)
    rows: dict[str, dict[str, Any]] = {}
    for kind, body in BODIES.items():
        alone: list[float] = []
        beside: list[float] = []
        statuses: Counter[int] = Counter()
        for _ in range(rounds):
            alone += latencies(port, seconds)
            with LargeBodies(port, body) as large:
                beside += latencies(port, seconds)
            statuses.update(large.statuses)
        rows[kind] = {
            "statuses": dict(statuses),
            "alone": figures(alone),
            "beside": figures(beside),
        }
    return rows


def figures(times: list[float]) -> list[float]:
    """Median, 99th percentile and worst."""
    ordered = sorted(times)
    chosen = [statistics.median(ordered), ordered[int(0.99 * len(ordered))], ordered[-1]]
    return [round(value, 1) for value in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fronts", type=int, default=0, help="0: one process does all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a round, for each kind")
    arguments = parser.parse_args()
    from packhorse.reports import random_model

    with tempfile.TemporaryDirectory() as place:
        model = random_model.write("tiny", Path(place) / "tiny")
        words = ["serve", "--json", "--port", "0", "--model", f"tiny={model}", "--threads", "1"]
        words += ["--fronts", str(arguments.fronts), "--device", "cpu", "--log-level", "error"]
        words += ["--max-input-characters", str(SIZE)]
        server = subprocess.Popen(
            [sys.executable, "-m", "packhorse", *words], stdout=subprocess.PIPE, text=True
        )
        try:
            port = json.loads(server.stdout.readline() if server.stdout else "")["port"]
            rows = measure(port, arguments.rounds, arguments.seconds)
        finally:
            server.terminate()
            server.wait(60)
    for kind, row in rows.items():
        print(json.dumps({"fronts": arguments.fronts, "kind": kind, **row}))


if __name__ == "__main__":
    main()
