"""Fixtures: the whole server over tiny models, in this process or in a separate one.

In this process the application is called over ASGI, without sockets, which is faster. Tests about
sockets and signals run `packhorse serve` itself on a free port, over a checkpoint of a tiny model.
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
HEADS = {
    "tiny": ("pooled", "embed", "mlm", "span", "classify", "sparse", "multi"),
    "ranker": ("pooled", "classify"),
}
HEADS["tagger"] = ("pooled", "tokens")


class Around:
    """A backend that calls `before` with each batch, which may wait or raise."""

    def __init__(self, backend: Any, before: Callable[[Any], Any]) -> None:
        self.backend = backend
        self.before = before

    def __call__(self, packed: Any, heads: Sequence[str], at: Any = None) -> Any:
        self.before(packed)
        return self.backend(packed, heads, at)


@pytest.fixture(scope="session")
def tiny(make_model, tmp_path_factory):
    """Make tiny encoders by name ("tiny", "ranker", "tagger") that share their layers."""
    import torch

    from packhorse import attention
    from packhorse.attention.hidden_keys import HiddenKeys
    from packhorse.model.heads import PooledLabels
    from packhorse.model.model import Model
    from packhorse.model.retrieval import MultiSettings, SparseSettings, TokenSide
    from packhorse.runtime.backend import TorchBackend
    from packhorse.runtime.encoder import Encoder
    from packhorse.tokens import Tokenizer

    folder: Path = tmp_path_factory.mktemp("vocabulary")
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY.split()))
    torch.set_num_threads(1)
    model = make_model(torch.float32, width=32, heads=2, positions=48)
    model.bert.use(HiddenKeys(attention.kernel("bucketed")))
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
        digests={"weights": "of no file", "config": "of no file"},
        budget=4 * 48,
        embedder=model.heads["embed"],
        sparse_settings=SparseSettings(97, "sparse"),
        multi_settings=MultiSettings(
            16, query=TokenSide(8, marker=5, filler=4), document=TokenSide(skipped=(19,))
        ),
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
    """A server in this process; each call is made by a new client."""

    app: Any  # the outermost ASGI application
    guard: Any
    models: Any
    settings: Any

    def ask(self, method: str, path: str, **options: Any) -> Any:
        """Return the response to one request."""
        return self.run(lambda client: client.request(method, path, **options))

    def get(self, path: str, **options: Any) -> Any:
        return self.ask("GET", path, **options)

    def post(self, path: str, json: Any = None, **options: Any) -> Any:
        return self.ask("POST", path, json=json, **options)

    def run(self, work: Callable[[Any], Any]) -> Any:
        """Return the result of a coroutine function that gets an httpx client of this server."""
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
    """Make servers: `serving(before=…, names=("tiny",), max_batch_inputs=2, keys=("k",))`.

    Or of other encoders: `serving(encoders=[…])`. They are closed after the test file.
    """
    from packhorse.serve.app import create, guarded
    from packhorse.serve.hosting import ServedModels, serve_model
    from packhorse.serve.settings import ServeSettings

    opened: list[ServedModels] = []

    def make(
        names: Sequence[str] = ("tiny",),
        before: Any = None,
        encoders: Sequence[Any] = (),
        **settings: Any,
    ) -> Served:
        chosen = ServeSettings(**{"batch_tokens": 4 * 48, "batch_wait_ms": 0.0, **settings})
        chosen_encoders = encoders or [tiny(name, before) for name in names]
        models = ServedModels(
            [serve_model(encoder, chosen, publish=False) for encoder in chosen_encoders]
        )
        opened.append(models)
        app, guard = guarded(create(chosen, models))
        return Served(app, guard, models, chosen)

    yield make
    for models in opened:
        models.close(drain=False)


@pytest.fixture(scope="module")
def listen() -> Iterator[Callable[[Served], int]]:
    """Serve on a real socket and return the port; ended after the test file."""
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
        thread.join(120)


@pytest.fixture(scope="module")
def served(serving) -> Served:
    """A shared server of all three tiny models with default settings; do not change it."""
    return serving(names=("tiny", "ranker", "tagger"))


@dataclass
class Process:
    """`packhorse serve` in a separate process."""

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
        """Send the signal, wait, and return the exit code."""
        self.popen.send_signal(number)
        return self.popen.wait(timeout)


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory) -> Path:
    """A checkpoint folder of a tiny embedding model."""
    from packhorse.reports import random_model

    return random_model.write("tiny", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def start(checkpoint_folder, tmp_path_factory) -> Iterator[Callable[..., Process]]:
    """Start `packhorse serve` with these arguments; `before` is Python code that runs first.

    Processes that still run are killed after the test file.
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
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.wait()
        if process.popen.stdout:
            process.popen.stdout.close()
