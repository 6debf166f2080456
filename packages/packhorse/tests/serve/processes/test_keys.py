"""Keys of real servers, as one process and as fronts beside an engine: fair shares, reloading.

The computing process waits in each batch until a file is there, and then as long as that says.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="fronts need Linux")
TEXT = {"inputs": "w1 w2 w3"}
FORMS = {"one-process": ("--fronts", "0"), "two-fronts": ("--fronts", "2")}
QUEUE = 24  # inputs that may wait
SECONDS = 120.0  # a limit for slow machines
# Found by every Python process that is started with its folder in PYTHONPATH.
SITECUSTOMIZE = """
import builtins, os, sys, time
gate = {gate!r}
original = builtins.__import__
def import_and_patch(name, *rest, **options):
    module = original(name, *rest, **options)
    backend = sys.modules.get("packhorse.runtime.backend")
    if builtins.__import__ is not original and hasattr(backend, "TorchBackend"):
        builtins.__import__ = original  # imports are nested: only the first is to patch
        patch(backend.TorchBackend)
    return module
def patch(kind):
    call = kind.__call__
    def slow(self, packed, *rest):
        while not os.path.exists(gate):
            time.sleep(0.005)
        time.sleep(float(open(gate).read() or 0) * len(packed.ids))
        return call(self, packed, *rest)
    kind.__call__ = slow
builtins.__import__ = import_and_patch
"""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@dataclass
class Gated:
    """A server whose batches wait for a file."""

    server: Any
    gate: Path
    keys: Path

    def open(self, seconds_a_token: float = 0.0) -> None:
        written = self.gate.with_suffix(".new")
        written.write_text(str(seconds_a_token))
        written.rename(self.gate)

    def close(self) -> None:
        self.gate.unlink(missing_ok=True)

    def post(self, key: str) -> int:
        url = f"{self.server.url}/embed"
        return httpx.post(url, json=TEXT, headers=bearer(key), timeout=SECONDS).status_code

    def run(self, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
        async def go() -> Any:
            limits = httpx.Limits(max_connections=100)
            async with httpx.AsyncClient(
                base_url=self.server.url, timeout=SECONDS, limits=limits
            ) as client:
                return await work(client)

        return asyncio.run(go())


def begin(start: Any, folder: Path, form: str, *flags: str) -> Gated:
    gate = folder / "gate"
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE.format(gate=str(gate)))
    keys = folder / "keys"
    keys.touch(0o600)
    keys.write_text("flood: f\nlight: l\nnightly: n bulk\n")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    arguments = (*FORMS[form], "--device", "cpu", "--api-key-file", str(keys), *flags)
    server = start(*arguments, PYTHONPATH=path, PACKHORSE_API_KEY="env: variable")
    gated = Gated(server, gate, keys)
    gated.open()
    server.wait_until_ready()
    return gated


@pytest.fixture(
    scope="module", params=["one-process", pytest.param("two-fronts", marks=pytest.mark.slow)]
)
def gated(start, request, tmp_path_factory) -> Gated:
    flags = ("--max-queue-inputs", str(QUEUE), "--max-input-tokens", "16", "--batch-tokens", "32")
    return begin(start, tmp_path_factory.mktemp("keys"), request.param, *flags)


async def wait_for(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(SECONDS):
        while not await condition():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("key", ["f", "l", "n"])
def test_a_flood_of_one_key_refuses_no_other(gated: Gated, key: str) -> None:
    """The control: with the key of the flood, its own requests are refused too."""
    order: list[str] = []

    async def ask(client: httpx.AsyncClient, name: str, key: str) -> int:
        response = await client.post("/embed", json=TEXT, headers=bearer(key))
        order.append(name)
        return response.status_code

    async def offered(client: httpx.AsyncClient) -> float:
        """Inputs that were admitted to the queue, or refused."""
        text = (await client.get("/metrics", headers=bearer("variable"))).text
        pattern = r"^packhorse_runner_(?:requests|refused)_total{.*} (\S+)$"
        return sum(map(float, re.findall(pattern, text, re.MULTILINE)))

    async def work(client: httpx.AsyncClient) -> tuple[Counter[int], list[int]]:
        begun = await offered(client)
        gated.close()
        flood = [asyncio.ensure_future(ask(client, "flood", "f")) for _ in range(60)]

        async def all_came(count: int = 60) -> bool:
            return await offered(client) == begun + count

        await wait_for(all_came)
        asked = [asyncio.ensure_future(ask(client, "other", key)) for _ in range(4)]
        await wait_for(lambda: all_came(64))
        order.clear()
        gated.open(0.002)
        statuses = [await task for task in asked]
        return Counter([await task for task in flood]), statuses

    flood, others = gated.run(work)
    admitted = [name for name in order if name == "flood"]
    assert set(flood) == {200, 429}
    assert flood[200] <= 2 * QUEUE / 3 + 7 + 1, "two thirds of what may wait, and what ran"
    if key == "f":
        assert others == [429] * 4
    else:
        assert others == [200] * 4
    if key == "l":
        last = max(place for place, name in enumerate(order) if name == "other")
        assert order[last + 1 :].count("flood") >= len(admitted) / 4, "they were not the last"


def test_sighup_reads_the_keys_again(gated: Gated) -> None:
    keys = ("f", "l", "new", "variable")
    server = gated.server

    async def statuses(client: httpx.AsyncClient) -> list[int]:
        asked = [client.post("/embed", json=TEXT, headers=bearer(key)) for key in keys]
        return [response.status_code for response in await asyncio.gather(*asked)]

    async def reload(client: httpx.AsyncClient) -> int:
        assert await statuses(client) == [200, 200, 401, 200]
        gated.close()
        under_way = asyncio.ensure_future(client.post("/embed", json=TEXT, headers=bearer("f")))

        async def has_come() -> bool:
            page = await client.get("/metrics", headers=bearer("variable"))
            return "packhorse_in_flight 1.0" in page.text

        await wait_for(has_come)
        gated.keys.write_text("light: l\nother: new\n")
        server.popen.send_signal(signal.SIGHUP)

        async def is_refused() -> bool:  # by all fronts, also on connections from before
            headers = bearer("f")
            asked = [client.get("/info", headers=headers) for _ in range(8)]
            return {(await response).status_code for response in asked} == {401}

        await wait_for(is_refused)
        gated.open()
        return (await under_way).status_code

    assert gated.run(reload) == 200, "what was under way is answered"
    assert gated.run(statuses) == [401, 200, 200, 200]
    gated.keys.write_text("light: l\nbad line here\n")
    server.popen.send_signal(signal.SIGHUP)

    async def is_logged() -> bool:
        return "stay as they were" in server.log()

    asyncio.run(wait_for(is_logged))
    assert gated.run(statuses) == [401, 200, 200, 200]
    lines = [line for line in server.log().splitlines() if "stay as they were" in line]
    assert len(lines) == 1 and "API key 2 has blanks" in lines[0]
    assert "bad line" not in server.log() and "variable" not in server.log()
    assert server.end() == 0


# Measured ---------------------------------------------------------------------------------------

# 64 clients in a process of their own, so that the one that measures does not wait for them.
FLOOD = """
import asyncio, httpx, sys
url, key = sys.argv[1:]
body = {"inputs": ["w1 w2 w3 w4 w5 w6 w7 w8 " * 5] * 8}
async def ask(client):
    while True:
        response = await client.post("/embed", json=body)
        if response.status_code == 429:
            await asyncio.sleep(1)
async def main():
    limits = httpx.Limits(max_connections=64)
    headers = {"authorization": f"Bearer {key}"}
    options = {"base_url": url, "headers": headers, "limits": limits}
    async with httpx.AsyncClient(timeout=120, **options) as client:
        await asyncio.gather(*[ask(client) for _ in range(64)])
asyncio.run(main())
"""


@dataclass
class Measured:
    """Short texts at random moments, whether or not the last one was answered."""

    seconds: list[float]  # to the answer
    waited: list[float]  # in the queue, as the server says
    refused: int

    def p99(self, values: list[float]) -> float:
        return sorted(values)[math.ceil(0.99 * len(values)) - 1]

    def __str__(self) -> str:
        if not self.seconds:
            return f"{self.refused} refused"
        times = f"p99 {self.p99(self.seconds):.2f} s, in the queue {self.p99(self.waited):.2f} s"
        return f"{times}, {self.refused} refused"


async def measure(client: httpx.AsyncClient, count: int = 100) -> Measured:
    draw = np.random.default_rng(5)
    measured = Measured([], [], 0)

    async def ask() -> None:
        began = time.perf_counter()
        response = await client.post("/embed", json=TEXT, headers=bearer("l"))
        if response.status_code == 429:
            measured.refused += 1
            return
        assert response.status_code == 200, response.text
        measured.seconds.append(time.perf_counter() - began)
        queued = re.search(r"queue_ms=([\d.]+)", response.headers["x-packhorse-pack"])
        assert queued is not None
        measured.waited.append(float(queued[1]) / 1000)

    tasks: list[asyncio.Future[None]] = []
    for pause in draw.exponential(0.2, count):
        tasks.append(asyncio.ensure_future(ask()))
        await asyncio.sleep(float(pause))
    await asyncio.gather(*tasks)
    return measured


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_what_a_flood_adds(start, form: str, tmp_path: Path) -> None:
    """A full batch of 512 tokens takes half a second, whatever the machine; 64 clients ask without
    pause, by another key, by one of the lane bulk and, as the control, by the same key."""
    gated = begin(start, tmp_path, form, "--batch-tokens", "512", "--max-input-tokens", "64")
    full = 0.512
    gated.open(0.001)

    def beside(key: str) -> Measured:
        arguments = [sys.executable, "-c", FLOOD, gated.server.url, key]
        flood = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)

        async def work(client: httpx.AsyncClient) -> Measured:
            async def is_full() -> bool:
                page = await client.get("/metrics", headers=bearer("variable"))
                waiting = re.search(r"runner_waiting_tokens{.*} (\S+)", page.text)
                return waiting is not None and float(waiting[1]) > 4 * 512

            await wait_for(is_full)
            return await measure(client)

        try:
            return gated.run(work)
        finally:
            flood.kill()
            flood.wait()

    alone = gated.run(measure)
    flooded, bulk, same = beside("f"), beside("n"), beside("l")
    print(f"{form}, a full batch {full} s. Alone: {alone}; beside a flood: {flooded};")
    print(f"beside bulk: {bulk}; control, beside a flood of the same key: {same}")
    assert (alone.refused, flooded.refused, bulk.refused) == (0, 0, 0)
    # Its own batch, full, comes on top in the first case.
    assert flooded.p99(flooded.waited) + full - alone.p99(alone.waited) <= 2.2 * full
    assert bulk.p99(bulk.waited) <= 2 * alone.p99(alone.seconds) + full
    assert same.refused or same.p99(same.waited) > 4 * full
    assert gated.server.end() == 0
