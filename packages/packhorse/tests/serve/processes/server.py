"""A server of several processes seen from outside: who runs, what they hold, and clients for it."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

SECONDS = 120.0  # for what must come; ten times what it takes
ERROR = 1e-5  # of a vector in fp32, whatever it was packed with
# An engine that ended 503, and a queue or memory that is full 429: both say when to come again.
REFUSALS = (429, 503)


def children(pid: int) -> dict[str, list[int]]:
    """Return the fronts and engines of a server, by kind."""
    kinds: dict[str, list[int]] = {"front": [], "engine": []}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = re.search(r"PPid:\s+(\d+)", (folder / "status").read_text())
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it has ended
                continue
            if parent and int(parent[1]) == pid and b"packhorse.serve.processes" in words:
                kinds[words[-3].decode()].append(int(folder.name))
    return kinds


def wait_for(condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, "it never came"
        time.sleep(0.02)
    return value


def total(server: Any, name: str) -> float:
    """Return the sum of a metric over all its labels."""
    page = httpx.get(f"{server.url}/metrics", timeout=60).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


def holdings(pid: int) -> dict[str, list[tuple[int, int]]]:
    """Return open files and mapped shared memory of every process of a server, by kind."""
    kinds = {"supervisor": [pid], **children(pid)}
    return {kind: sorted(map(_holding, pids)) for kind, pids in kinds.items()}


def _holding(pid: int) -> tuple[int, int]:
    try:
        files = len(os.listdir(f"/proc/{pid}/fd"))
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has ended
        return 0, 0
    return files, maps.count("memfd:packhorse")


def owners(port: int, pids: Sequence[int]) -> dict[int, int]:
    """Return which of these processes has the connection of a client, by the client's port."""
    clients: dict[str, int] = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, remote, inode = (line.split()[place] for place in (1, 2, 9))
        if int(local.partition(":")[2], 16) == port:
            clients[f"socket:[{inode}]"] = int(remote.partition(":")[2], 16)
    owner: dict[int, int] = {}
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                client = clients.get(os.readlink(file))
            except OSError:  # it was closed
                continue
            if client:
                owner[client] = pid
    return owner


@dataclass(frozen=True)
class Question:
    """A request, and the vectors that the library gives for its texts."""

    body: bytes
    vectors: np.ndarray


def questions(model: Any, count: int = 40, seed: int = 0) -> list[Question]:
    """Return requests of one to eight texts, of one to sixty words each."""
    chance = random.Random(seed)
    rows: list[Question] = []
    for _ in range(count):
        texts = [
            " ".join(f"w{chance.randint(100, 2000)}" for _ in range(chance.randint(1, 60)))
            for _ in range(chance.randint(1, 8))
        ]
        body = json.dumps({"inputs": texts}).encode()
        rows.append(Question(body, model.embed(texts)))
    return rows


@dataclass(frozen=True)
class Refusal:
    """An answer that is not 200."""

    status: int
    retry_after: str | None
    message: str


REQUESTS_PER_CONNECTION = 50


class Load:
    """Clients that ask without pause; every vector is compared with the library's."""

    def __init__(self, port: int, questions: Sequence[Question], clients: int = 8) -> None:
        self.port = port
        self.questions = questions
        self.statuses: Counter[Any] = Counter()
        self.wrong = 0
        self.refusals: set[Refusal] = set()
        self.lost: list[int] = []  # ports of clients whose connection was closed
        self.stopped = threading.Event()
        self.threads = [
            threading.Thread(target=self._run, args=[place], daemon=True)
            for place in range(clients)
        ]

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        self.wait_for_answers(20)
        return self

    def __exit__(self, *exception: object) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive(), "a request hangs"
        assert self.wrong == 0, f"{self.wrong} answers have wrong vectors"
        for refusal in self.refusals:
            assert refusal.status in REFUSALS and int(refusal.retry_after or 0) >= 1, refusal

    def wait_for_answers(self, count: int) -> None:
        """Wait until so many more requests were answered with 200."""
        before = self.statuses[200]
        wait_for(lambda: self.statuses[200] >= before + count)

    def check_served(self, count: int = 40) -> None:
        """From now on no request may fail, for so many answers."""
        # One answer per client may be of the time before.
        self.wait_for_answers(len(self.threads))
        failed = self.failed
        self.wait_for_answers(count)
        assert self.failed == failed, self.statuses

    @property
    def failed(self) -> int:
        """How many requests were not answered with 200."""
        return sum(self.statuses.values()) - self.statuses[200]

    def _run(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self.stopped.is_set():
            client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            port = 0
            try:
                client.connect()
                port = client.sock.getsockname()[1]
                # A new connection may come to the front that has none yet.
                for _ in range(REQUESTS_PER_CONNECTION):
                    if self.stopped.is_set() or not self._ask(client, chance):
                        break
            except (OSError, http.client.HTTPException):
                self.statuses["lost"] += 1
                self.lost.append(port)
                time.sleep(0.02)  # the server may be gone
            finally:
                client.close()

    def _ask(self, client: http.client.HTTPConnection, chance: random.Random) -> bool:
        """Send one request; return whether the connection can be used for another."""
        question = chance.choice(self.questions)
        client.request("POST", "/embed", question.body, {"Content-Type": "application/json"})
        response = client.getresponse()
        answer = response.read()
        if response.status == 200:
            vectors = np.array(json.loads(answer), np.float32)
            same = vectors.shape == question.vectors.shape
            self.wrong += not (same and np.allclose(vectors, question.vectors, atol=ERROR))
        else:
            message = json.loads(answer)["error"]
            retry_after = response.headers.get("retry-after")
            self.refusals.add(Refusal(response.status, retry_after, message))
            time.sleep(0.01)
        self.statuses[response.status] += 1
        return response.headers.get("connection") != "close"
