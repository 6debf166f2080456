"""Fixtures: one server for all dialects, with the real MiniLM and a tiny model per head.

It listens on a real port, because the official clients are tested unchanged. Requests that need no
client go over ASGI to the same application, which is faster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

VOCABULARY = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on a mat and saw one red hat . ? who what poison"
    " horse mule carries sacks to market is good bad old brown with no load ##s ! query :"
)
LABELS = {"judge": ("good", "bad", "ugly"), "ranker": ("score",)}
LABELS["tagger"] = ("I-CAT", "B-CAT", "B-MAT", "I-MAT", "O")
HEADS = {
    "tiny": ("pooled", "embed"),
    "reader": ("pooled", "span"),
    "filler": ("pooled", "mlm", "embed"),
    "judge": ("pooled", "classify"),
    "ranker": ("pooled", "classify"),
    "tagger": ("pooled", "tokens"),
}


@dataclass(frozen=True)
class Server:
    """A running server: its URL, application and models."""

    url: str
    app: Any
    models: Any

    def encoder(self, name: str) -> Any:
        return self.models.find(name).encoder


@pytest.fixture(scope="session")
def encoders(make_model, minilm, tmp_path_factory) -> dict[str, Any]:
    """The models by name; the first is the default."""
    import torch

    import packhorse
    from packhorse import attention
    from packhorse.model.heads import Embed, PooledLabels
    from packhorse.runtime.backend import TorchBackend
    from packhorse.runtime.encoder import Encoder
    from packhorse.tokens import Tokenizer

    folder: Path = tmp_path_factory.mktemp("vocabulary")
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY.split()))
    tokenizer = Tokenizer.load(folder)
    cpu = torch.device("cpu")

    def tiny(name: str) -> Encoder:
        model = make_model(torch.float32, width=32, heads=2, positions=48)
        model.bert.use(attention.kernel("bucketed"))
        if name == "ranker":
            old = model.heads["classify"]
            model.heads["classify"] = PooledLabels(model.bert.config, old.pooler, 1).eval()
        head = model.heads["embed"]
        return Encoder(
            name=name,
            tokenizer=tokenizer,
            backend=TorchBackend(model, cpu),
            heads=HEADS[name],
            width=96,
            labels=LABELS.get(name, ()),
            problem="regression" if name == "ranker" else "single_label",
            prompts={"query": "query : "},
            default_prompt=None,
            max_length=48,
            device=cpu,
            dtype=torch.float32,
            kernel="bucketed",
            reason="asked for",
            digests={"weights": "of no file", "config": "of no file"},
            budget=4 * 48,
            embedder=head if isinstance(head, Embed) else None,
        )

    return {"mini": packhorse.load(minilm, device="cpu"), **{name: tiny(name) for name in HEADS}}


@pytest.fixture(scope="module")
def listen() -> Iterator[Callable[..., Server]]:
    """Serve models on a port, in a thread: `listen(encoders, **settings)`.

    The engines are closed after the test file.
    """
    import torch
    import uvicorn

    from packhorse.serve import app, hosting
    from packhorse.serve.settings import ServeSettings

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    running: list[tuple[Any, threading.Thread, Any]] = []

    def begin(encoders: dict[str, Any], **options: Any) -> Server:
        settings = ServeSettings(batch_wait_ms=0.0, **options)
        models = hosting.ServedModels(
            [_hosted(name, encoder) for name, encoder in encoders.items()]
        )
        application = app.create(settings, models)
        outer, _ = app.guarded(application)
        # Not uvloop: other tests of the process fork.
        config = uvicorn.Config(outer, port=0, log_config=None, lifespan="off", loop="asyncio")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread, models))
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        return Server(f"http://127.0.0.1:{port}", application, models)

    yield begin
    for server, thread, models in running:
        server.should_exit = True
        thread.join(120)
        models.close()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def server(encoders, listen) -> Server:
    """All models on one port."""
    return listen(encoders)


def _hosted(name: str, encoder: Any) -> Any:
    """Start a runner that publishes no figures, because other tests count who does."""
    from packhorse import PackRunner
    from packhorse.serve.hosting import ServedModel
    from packhorse.serve.streams import LocalDispatcher

    rows = 2048 // encoder.max_length
    runner = PackRunner(encoder, rows=rows, timeout=0, max_waiting_requests=4096, publish=False)
    parts = runner.encoder.fingerprint_parts()
    return ServedModel(name, name, runner.encoder, runner, LocalDispatcher(runner), parts)


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[Any]:
    """A plain client of the server."""
    import httpx

    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture
def post(http: Any):
    """POST a body; returns the status and the JSON document."""

    def send(path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        answer = (
            http.post(path, json=body, **options)
            if body is not None
            else http.post(path, **options)
        )
        return answer.status_code, answer.json()

    return send
