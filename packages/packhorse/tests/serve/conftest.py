"""A tiny model behind the whole server: in this process for most tests, in one of its own for some.

In this process the application is called over ASGI, without sockets: what is tested is ours, at
once. What is about sockets and signals runs `packhorse serve` itself on a port of its choice, over
the checkpoint of a tiny model.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

VOCABULARY = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on a mat and saw one red hat . ? who what poison"
    " horse mule carries sacks to market is good bad old brown with no load"
)
LABELS = {"tiny": ("good", "bad", "ugly"), "ranker": ("score",)}
LABELS["tagger"] = ("B-CAT", "I-CAT", "B-MAT", "I-MAT", "O")
HEADS = {"tiny": ("pooled", "embed", "mlm", "span", "classify"), "ranker": ("pooled", "classify")}
HEADS["tagger"] = ("pooled", "tokens")


class Around:
    """A backend around another: `before` sees each batch first, and may wait or raise."""

    def __init__(self, backend: Any, before: Callable[[Any], Any]) -> None:
        self.backend, self.before = backend, before

    def __call__(self, packed: Any, heads: Sequence[str], at: Any = None) -> Any:
        self.before(packed)
        return self.backend(packed, heads, at)


@pytest.fixture(scope="session")
def tiny(make_model, tmp_path_factory):
    """Tiny encoders by name ("tiny", "ranker", "tagger"), all over the layers of one model."""
    import torch

    from packhorse import attention
    from packhorse.model.heads import PooledLabels
    from packhorse.model.model import Model
    from packhorse.runtime.backend import TorchBackend
    from packhorse.runtime.encoder import Encoder
    from packhorse.tokens import Tokenizer

    folder: Path = tmp_path_factory.mktemp("vocabulary")
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY.split()))
    torch.set_num_threads(1)
    model = make_model(torch.float32, width=32, heads=2, positions=48)
    model.bert.use(attention.kernel("bucketed"))
    pooler = model.heads["pooled"]
    score = PooledLabels(model.bert.config, pooler, 1)
    ranker = Model(model.bert, {"pooled": pooler, "classify": score})
    whole = Encoder(
        name="tiny",
        tokenizer=Tokenizer.load(folder),
        backend=TorchBackend(model, torch.device("cpu")),
        heads=HEADS["tiny"],
        width=96,
        labels=LABELS["tiny"],
        problem="single_label",
        prompts={"query": "who saw "},
        default_prompt=None,
        max_length=48,
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernel="bucketed",
        reason="asked for",
        budget=4 * 48,
        embedder=model.heads["embed"],
    )

    backends = {"ranker": TorchBackend(ranker, torch.device("cpu"))}

    def make(name: str = "tiny", before: Callable[[Any], Any] | None = None) -> Encoder:
        backend = backends.get(name, whole.backend)
        around = backend if before is None else Around(backend, before)
        encoder = replace(whole, name=name, heads=HEADS[name], labels=LABELS[name])
        return replace(encoder, backend=around)

    return make


@dataclass
class Served:
    """A whole server in this process; each call is a client of its own."""

    app: Any  # what the world may call
    guard: Any
    hosts: Any
    settings: Any

    def ask(self, method: str, path: str, **given: Any) -> Any:
        """The response to one request."""
        return self.run(lambda client: client.request(method, path, **given))

    def get(self, path: str, **given: Any) -> Any:
        return self.ask("GET", path, **given)

    def post(self, path: str, json: Any = None, **given: Any) -> Any:
        return self.ask("POST", path, json=json, **given)

    def run(self, work: Callable[[Any], Any]) -> Any:
        """What a coroutine function makes of an httpx client of this server."""
        import httpx

        async def go() -> Any:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                return await work(client)

        return asyncio.run(go())


@pytest.fixture(scope="module")
def serving(tiny) -> Iterator[Callable[..., Served]]:
    """Makes servers: `serving(before=…, names=("tiny",), max_batch_inputs=2, keys=("k",))`.

    Or of encoders of one's own: `serving(encoders=[…])`. They end with the file that made them.
    """
    from packhorse.serve.app import create, guarded
    from packhorse.serve.hosting import Hosts, host
    from packhorse.serve.settings import Settings

    opened: list[Hosts] = []

    def make(
        names: Sequence[str] = ("tiny",),
        before: Any = None,
        encoders: Sequence[Any] = (),
        **settings: Any,
    ) -> Served:
        chosen = Settings(**{"batch_tokens": 4 * 48, "batch_wait_ms": 0.0, **settings})
        made = encoders or [tiny(name, before) for name in names]
        models = [host(encoder, chosen, publish=False) for encoder in made]
        opened.append(hosts := Hosts(models))
        app, guard = guarded(create(chosen, hosts))
        return Served(app, guard, hosts, chosen)

    yield make
    for hosts in opened:
        hosts.close(drain=False)


@pytest.fixture(scope="module")
def listen() -> Iterator[Callable[[Served], int]]:
    """Put a server of this process behind a real socket; the port. It ends with the file."""
    import uvicorn

    from packhorse.serve.connections import protocol

    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def begin(served: Served) -> int:
        config = uvicorn.Config(
            served.app,
            port=0,
            http=protocol(served.settings),
            ws="none",
            log_config=None,
            lifespan="off",
            loop="asyncio",  # not uvloop: other tests of the process fork
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread))
        while not server.started:
            time.sleep(0.01)
        return server.servers[0].sockets[0].getsockname()[1]

    yield begin
    for server, thread in running:
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def served(serving) -> Served:
    """A server of all three tiny models, as the defaults have it; leave it as it is."""
    return serving(names=("tiny", "ranker", "tagger"))


@dataclass
class Process:
    """`packhorse serve` in a process of its own."""

    popen: subprocess.Popen[str]
    errors: Path
    port: int = 0

    def wait_until_ready(self) -> Process:
        line = self.popen.stdout.readline() if self.popen.stdout else ""
        assert line, f"the server did not start: {self.errors.read_text()}"
        self.port = json.loads(line)["port"]
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        return self.errors.read_text("utf-8")

    def end(self, number: int = signal.SIGTERM, timeout: float = 20.0) -> int:
        """Send the signal and wait; the exit code."""
        self.popen.send_signal(number)
        return self.popen.wait(timeout)


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory) -> Path:
    """A tiny model that makes vectors, as a folder."""
    from packhorse.reports import random_model

    return random_model.write("tiny", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def start(checkpoint_folder, tmp_path_factory) -> Iterator[Callable[..., Process]]:
    """Starts `packhorse serve` with these arguments; `before` is code that runs first.

    A process that still runs is ended with the file that started it.
    """
    started: list[Process] = []

    def begin(*arguments: str, before: str = "", **environment: str) -> Process:
        folder = tmp_path_factory.mktemp("process")
        code = f"import sys\n{before}\nfrom packhorse.cli import main\nsys.exit(main(sys.argv[1:]))"
        words = ["serve", "--json", "--threads", "1", *arguments]
        words += [] if "--port" in arguments else ["--port", "0"]
        if "--model" not in arguments:
            words += ["--model", f"tiny={checkpoint_folder}"]
        with (folder / "stderr").open("w") as errors:
            popen = subprocess.Popen(
                [sys.executable, "-c", code, *words],
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PACKHORSE_RUNTIME": str(folder), **environment},
                text=True,
            )
        started.append(Process(popen, folder / "stderr"))
        return started[-1]

    yield begin
    for each in started:
        if each.popen.poll() is None:
            each.popen.kill()
        each.popen.wait()
        if each.popen.stdout:
            each.popen.stdout.close()
