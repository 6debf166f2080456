"""`packhorse verify MODEL --against`: vectors of servers and files, as a user compares them."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import packhorse

WORDS = "the cat sat on a mat who saw one red hat old brown horse mule carries no load to market"


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Different texts of uneven length."""
    generator = random.Random(0)
    words = WORDS.split()
    return [
        " ".join(generator.choices(words, k=generator.randint(2, 12))) + f" {number}"
        for number in range(60)
    ]


@pytest.fixture(scope="module")
def texts_file(texts, tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n".join(texts) + "\n")
    return path


@pytest.fixture(scope="module")
def other(tiny, tmp_path_factory) -> Path:
    """A model of the same shape and vocabulary with other weights."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(tiny("embed"), folder)
    torch.manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    changed = {
        name: torch.randn_like(tensor) * 0.3 if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def serve(tiny) -> Iterator[Callable[..., str]]:
    """Run our server over a model in this process and return its URL."""
    import uvicorn

    from packhorse.serve.app import create, guarded
    from packhorse.serve.connections import protocol
    from packhorse.serve.hosting import ServedModels, serve_model
    from packhorse.serve.settings import ServeSettings

    running: list[tuple[Any, threading.Thread, Any]] = []

    def begin(folder: Path, **options: Any) -> str:
        settings = ServeSettings(batch_wait_ms=0.0, **options)
        encoder = packhorse.load(folder, device="cpu", dtype="fp32")
        models = ServedModels([serve_model(encoder, settings, publish=False)])
        app, _ = guarded(create(settings, models))
        config = uvicorn.Config(
            app,
            port=0,
            http=protocol(settings),
            ws="none",
            log_config=None,
            lifespan="off",
            loop="asyncio",
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread, models))
        while not server.started:
            time.sleep(0.01)
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    yield begin
    for server, thread, models in running:
        server.should_exit = True
        thread.join(60)
        models.close(drain=False)


@pytest.fixture(scope="module")
def openai_server() -> Iterator[Callable[..., str]]:
    """Run a small server with OpenAI's two routes around a function from texts to vectors."""
    running: list[ThreadingHTTPServer] = []

    def begin(embed: Callable[[list[str]], Any], prefix: str = "/v1") -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == f"{prefix}/models":
                    self.reply(200, {"object": "list", "data": [{"id": "served"}]})
                else:
                    self.reply(404, {"detail": "Not Found"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.path != f"{prefix}/embeddings" or body["model"] != "served":
                    return self.reply(404, {"detail": "Not Found"})
                rows = [
                    {"index": index, "embedding": np.asarray(vector).tolist()}
                    for index, vector in enumerate(embed(body["input"]))
                ]
                self.reply(200, {"data": rows[::-1]})  # the order is in `index`

            def reply(self, status: int, document: Any) -> None:
                data = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        running.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield begin
    for server in running:
        server.shutdown()
        server.server_close()


# Servers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "/embed", "/v1", "/v1/embeddings"])
def test_our_own_server_gives_the_model_s_vectors(cli, tiny, serve, texts_file, path) -> None:
    url = serve(tiny("embed"))
    result = cli("verify", tiny("embed"), "--against", url + path, "--texts", texts_file, "--json")
    assert result.code == 0, result.err
    document = result.document
    assert document["same"] and document["overlap"] == 1
    assert document["cosine"]["least"] > 0.99999
    expected = "OpenAI's API" if path.startswith("/v1") else "text-embeddings-inference"
    assert document["against"] == expected
    assert document["normalized"] == {"model": True, "other": True}
    assert document["texts"] == 60


@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_sentence_transformers_behind_http(cli, tiny, openai_server, prefix) -> None:
    """On the built-in texts, by the routes of vLLM and, without a version, of Infinity."""
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(tiny("embed")), device="cpu")
    url = openai_server(lambda texts: model.encode(texts), prefix)
    result = cli("verify", tiny("embed"), "--against", url, "--json")
    assert result.code == 0, result.err
    assert result.document["texts"] >= 200
    assert result.document["overlap"] > 0.99
    assert result.document["cosine"]["mean"] > 0.9999
    assert "the same vectors for a search" in result.err


def test_another_model_fails(cli, tiny, other, serve, texts_file) -> None:
    """The control: the same dimension and vocabulary, other weights."""
    url = serve(other)
    words = ("verify", tiny("embed"), "--against", url, "--texts", texts_file)
    result = cli(*words, "--json")
    assert result.code == 1
    assert not result.document["same"] and result.document["overlap"] < 0.9
    assert "not the same vectors: of the 10 nearest texts both find" in result.err
    assert "less than 99.0%" in result.document["why_not"][0]
    lenient = cli(*words, "--min-overlap", "0")
    assert lenient.code == 0, lenient.err
    assert "nearest 10 in common" in lenient.out


def test_another_dimension_says_so(cli, tiny, openai_server, texts_file) -> None:
    url = openai_server(lambda texts: np.ones((len(texts), 7)))
    result = cli("verify", tiny("embed"), "--against", url, "--texts", texts_file, "--json")
    assert result.code == 1
    assert result.document["dimension"] == {"model": 32, "other": 7}
    assert "32 dimensions here and 7 there" in result.err


def test_vectors_that_are_not_normalized_are_told(cli, tiny, openai_server, texts_file) -> None:
    encoder = packhorse.load(tiny("embed"), device="cpu")
    url = openai_server(lambda texts: 3 * encoder.embed(texts))
    result = cli("verify", tiny("embed"), "--against", url, "--texts", texts_file, "--json")
    assert result.code == 0, result.err
    assert result.document["normalized"] == {"model": True, "other": False}
    assert "the others do not: search by cosine" in result.err


def test_the_prompt_of_the_other_is_found(cli, tiny, openai_server, texts_file, tmp_path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("embed"), folder)
    prompts = {"prompts": {"query": "who saw the ", "document": "red "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    encoder = packhorse.load(folder, device="cpu")
    url = openai_server(lambda texts: encoder.embed(texts, prompt="query"))
    words = ("verify", folder, "--against", url, "--texts", texts_file, "--json")
    assert "try --prompt query" in cli(*words, "--min-overlap", "0").err
    right = cli(*words, "--prompt", "query")
    assert right.code == 0, right.err
    assert right.document["prompt"] == {"model": "query", "better": None}

    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({**prompts, "default_prompt_name": "document"})
    )
    url = openai_server(lambda texts: encoder.embed(texts))  # opened without a default
    words = ("verify", folder, "--against", url, "--texts", texts_file, "--json")
    assert "without a prompt they agree better" in cli(*words, "--min-overlap", "0").err
    assert cli(*words, "--prompt", "").document["overlap"] == 1


def test_a_key_is_read_from_the_environment(cli, tiny, serve, texts_file, monkeypatch) -> None:
    url = serve(tiny("embed"), keys=("secret",))
    words = ("verify", tiny("embed"), "--against", url, "--texts", texts_file)
    monkeypatch.delenv("PACKHORSE_API_KEY", raising=False)
    refused = cli(*words)
    assert refused.code == 2 and "set PACKHORSE_API_KEY" in refused.err
    monkeypatch.setenv("PACKHORSE_API_KEY", "secret")
    assert cli(*words).code == 0


def test_a_redirect_does_not_get_the_key(cli, tiny, texts_file, monkeypatch) -> None:
    headers: list[Any] = []

    class Target(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers.append(self.headers)
            self.send_error(404)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Redirect(Target):
        def do_GET(self) -> None:
            assert self.headers["authorization"] == "Bearer secret"
            self.send_response(302)
            self.send_header("location", f"http://127.0.0.1:{target.server_address[1]}/")
            self.end_headers()

    monkeypatch.setenv("PACKHORSE_API_KEY", "secret")
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Target) as target,
        ThreadingHTTPServer(("127.0.0.1", 0), Redirect) as redirect,
    ):
        for server in (target, redirect):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{redirect.server_address[1]}"
        assert cli("verify", tiny("embed"), "--against", url, "--texts", texts_file).code == 2
        for server in (target, redirect):
            server.shutdown()
    assert headers and not any("authorization" in sent for sent in headers)


def test_a_server_that_is_not_there(cli, tiny, openai_server) -> None:
    gone = cli("verify", tiny("embed"), "--against", "http://127.0.0.1:9")
    assert gone.code == 2 and "is the server running?" in gone.err
    url = openai_server(lambda texts: [], "/elsewhere")
    unknown = cli("verify", tiny("embed"), "--against", url)
    assert unknown.code == 2 and "has neither /info" in unknown.err
    silent = cli("verify", tiny("embed"), "--against", f"{url}/elsewhere/embeddings")
    assert silent.code == 2


# Files -------------------------------------------------------------------------------------------


def test_files_of_vectors(cli, tiny, texts, texts_file, tmp_path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    vectors = packhorse.load(tiny("embed"), device="cpu").embed(texts)
    np.save(tmp_path / "vectors.npy", vectors)
    table = pyarrow.table({"text": texts, "vector": vectors.tolist()})
    parquet.write_table(table, tmp_path / "vectors.parquet")
    rows = [
        json.dumps({"body": text, "embedding": vector.tolist()})
        for text, vector in zip(texts, vectors, strict=True)
    ]
    (tmp_path / "vectors.jsonl").write_text("\n".join([*rows, rows[0]]) + "\n")
    written = cli(
        "run",
        *("--task", "embed", "-m", tiny("embed"), "--input", texts_file),
        *("--out", tmp_path / "written.parquet"),
    )
    assert written.code == 0, written.err
    for words in (
        ("vectors.parquet",),
        ("vectors.jsonl",),
        ("vectors.npy", "--texts", texts_file),
        ("written.parquet", "--texts", texts_file),
    ):
        path, *more = words
        result = cli("verify", tiny("embed"), "--against", tmp_path / path, *more, "--json")
        assert result.code == 0, result.err
        assert result.document["overlap"] == 1 and result.document["texts"] == 60


def test_vectors_of_other_texts_fail(cli, tiny, texts, texts_file, tmp_path) -> None:
    """A control: the right vectors in the wrong order."""
    vectors = packhorse.load(tiny("embed"), device="cpu").embed(texts)
    np.save(tmp_path / "vectors.npy", np.roll(vectors, 1, 0))
    result = cli(
        "verify", tiny("embed"), "--against", tmp_path / "vectors.npy", "--texts", texts_file
    )
    assert result.code == 1 and "not the same vectors" in result.err


def test_files_that_cannot_be_compared(cli, tiny, texts, texts_file, tmp_path) -> None:
    np.save(tmp_path / "few.npy", np.ones((3, 32), np.float32))
    (tmp_path / "few.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "none.jsonl").write_text('{"text": "a", "count": 3}\n')
    (tmp_path / "vectors.bin").write_bytes(b"")
    for words, message in (
        (("few.npy",), "pass --texts FILE"),
        (("few.npy", "--texts", texts_file), "each needs a row"),
        (("few.npy", "--texts", tmp_path / "few.txt"), "32 are needed"),
        (("none.jsonl",), "one column must have vectors"),
        (("vectors.bin",), "read from .parquet, .jsonl and .npy"),
        (("absent.parquet",), "does not exist"),
    ):
        path, *more = words
        result = cli("verify", tiny("embed"), "--against", tmp_path / path, *more)
        assert result.code == 2 and message in result.err, result.err


def test_flags_that_contradict(cli, tiny) -> None:
    both = cli("verify", tiny("embed"), tiny("embed"), "--against", "vectors.npy")
    assert both.code == 2 and "leave one out" in both.err
    assert cli("verify", tiny("embed")).code == 2
    wrong = cli("verify", tiny("embed"), "--against", "x.npy", "--min-overlap", "99")
    assert wrong.code == 2 and "between 0 and 1" in wrong.err
