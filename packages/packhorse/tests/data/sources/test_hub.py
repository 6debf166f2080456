"""Datasets of a hub are read by ranges, at one commit, and give what `datasets` reads of them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pytest
from pyarrow import parquet

from packhorse.data.sources.chunking import Chunk, chunks
from packhorse.data.sources.documents import read
from packhorse.data.sources.files import SourceFile
from packhorse.data.sources.hub import HubFile, is_address
from packhorse.errors import InputError

pytest.importorskip("nupunkt", reason="no nupunkt: pip install 'packhorse[data]'")

COMMIT = "c" * 40
TEXTS = [f"Row {i} of the dataset has a text." for i in range(3000)]


def rows(texts: list[str]) -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table({"text": texts}), sink, row_group_size=500)
    return sink.getvalue().to_pybytes()


class DatasetHub:
    """What huggingface_hub asks to list and read a dataset, with ranges."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.ranges: list[tuple[str, int]] = []  # what was sent: file, bytes
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                hub.answer(self, body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def entry(self, name: str) -> dict[str, object]:
        content = self.files[name]
        oid = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": name, "size": len(content), "oid": oid}

    def answer(self, request: BaseHTTPRequestHandler, body: bytes = b"") -> None:
        path = unquote(urlsplit(request.path).path).strip("/")
        parts = path.removeprefix("api/").split("/")
        if parts[1:3] != ["org", "texts"]:
            return self.send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if path.startswith("api/"):
            rest = parts[3:]
            if not rest or rest[0] == "revision":
                siblings = [{"rfilename": name} for name in self.files]
                result: object = {"id": "org/texts", "sha": COMMIT, "siblings": siblings}
            elif rest[0] == "tree":
                result = [self.entry(name) for name in self.files]
            else:  # paths-info
                asked = json.loads(body)["paths"] if body.startswith(b"{") else []
                fields = [pair.split("=", 1) for pair in body.decode().split("&") if "=" in pair]
                asked = asked or [unquote(value) for name, value in fields if name == "paths"]
                result = [self.entry(name) for name in asked if name in self.files]
            return self.send(request, 200, json.dumps(result).encode())
        name = "/".join(parts[5:])
        content = self.files[name]
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if asked_range := request.headers.get("range"):
            first, _, last = asked_range.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last or len(content)) + 1, len(content))
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            self.ranges.append((name, end - begin))
            return self.send(request, 206, content[begin:end], headers)
        self.ranges.append((name, len(content) if request.command == "GET" else 0))
        return self.send(request, 200, content, headers)

    def send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in (headers or {}).items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hub() -> Iterator[DatasetHub]:
    files = {
        "README.md": b"# Texts",
        "data/train-00000-of-00002.parquet": rows(TEXTS[:2000]),
        "data/train-00001-of-00002.parquet": rows(TEXTS[2000:]),
        "data/test-00000-of-00001.parquet": rows(["Never seen in training."]),
        "raw/lines.jsonl.gz": gzip.compress(
            "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:100]).encode()
        ),
    }
    hub = DatasetHub(files)
    yield hub
    hub.close()


SCRIPT = """
import json, sys
from pathlib import Path
from packhorse.data.sources.chunking import chunks
from packhorse.data.sources.documents import read
from packhorse.data.sources.files import find
sources = find([Path(sys.argv[1])])
texts = [" ".join(d.sentences) for c in chunks(sources, 20_000) for d in read(c)[0]]
print(json.dumps({"files": [str(s.path) for s in sources], "texts": texts}))
"""


def run_with(hub: DatasetHub, *words: object) -> subprocess.CompletedProcess[str]:
    settings = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    environment = os.environ | settings | {"HF_TOKEN": ""}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_dataset_is_read_where_it_lies(hub: DatasetHub) -> None:
    result = run_with(hub, "-c", SCRIPT, "hf://org/texts")
    assert result.returncode == 0, result.stderr
    outcome = json.loads(result.stdout)
    assert outcome["texts"] == TEXTS
    assert outcome["files"] == [
        f"hf://org/texts/data/train-0000{i}-of-00002.parquet" for i in (0, 1)
    ]
    assert not any("test" in name or "raw" in name for name, _ in hub.ranges)
    lines = run_with(hub, "-c", SCRIPT, "hf://datasets/org/texts@main/raw")
    assert json.loads(lines.stdout)["texts"] == TEXTS[:100], lines.stderr


@pytest.mark.slow
def test_a_corpus_of_it_is_resumed(hub: DatasetHub, tmp_path: Path) -> None:
    """Two workers read ranges; the same command finds nothing to do, another commit differs."""
    from .. import corpora

    corpora.write_vocabulary(tmp_path / "vocab.txt")
    flags = ["--tokenizer", tmp_path / "vocab.txt", "--max-length", 64, "--chunk-bytes", 20_000]
    words = ["-m", "packhorse", "data", "build", "hf://org/texts", tmp_path / "out", *flags]
    result = run_with(hub, *words, "--workers", 2)
    assert result.returncode == 0, result.stderr
    assert "3,000 documents" in result.stdout
    again = run_with(hub, *words)
    assert "built already" in again.stderr, again.stderr
    (folder := tmp_path / "here").mkdir()
    for number in (0, 1):
        name = f"train-0000{number}-of-00002.parquet"
        (folder / name).write_bytes(hub.files[f"data/{name}"])
    words[4:6] = [folder, tmp_path / "local"]
    assert run_with(hub, *words).returncode == 0
    for path in (tmp_path / "local" / "train").glob("*.arrow"):
        assert path.read_bytes() == (tmp_path / "out" / "train" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("hf://org/nothing", "cannot be listed"),
        ("hf://org", "is no dataset; write hf://org/name"),
        ("hf://org/texts/README.md", "has no file of text"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(
    hub: DatasetHub, tmp_path: Path, address: str, message: str
) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    flags = ["--tokenizer", tmp_path / "vocab.txt"]
    result = run_with(hub, "-m", "packhorse", "data", "build", address, tmp_path / "out", *flags)
    assert result.returncode == 2 and message in result.stderr, result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("fails", ["open", "read"])
@pytest.mark.parametrize("error", [RuntimeError, OSError])
def test_a_broken_connection_is_no_damage(
    fails: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of a row group either, whose remaining rows would be counted as lost."""

    class Broken(io.BytesIO):
        def open(self, *_: object, **__: object) -> Broken:
            return Broken(bytes(100))

        def fail(self, *_: object, **__: object) -> None:
            raise error("connection refused")

    monkeypatch.setattr(Broken, fails, Broken.fail)
    monkeypatch.setattr("huggingface_hub.HfFileSystem", Broken)
    file = HubFile("org/texts", COMMIT, "a.jsonl", 10, "")
    with pytest.raises(InputError, match=r"a\.jsonl cannot be read: connection refused"):
        next(chunks([SourceFile(file, "jsonl", 10, "text")], 5))
    rows = Chunk(SourceFile(file, "parquet", 10, "text"), 0, 0, 5)
    with pytest.raises(InputError, match=r"a\.jsonl cannot be read: connection refused"):
        read(rows)


def test_a_file_of_the_hub_is_no_file_here() -> None:
    file = HubFile("org/texts", COMMIT, "data/a.jsonl.gz", 10, "x")
    assert (file.name, file.stat().st_size, str(file)) == (
        "a.jsonl.gz",
        10,
        "hf://org/texts/data/a.jsonl.gz",
    )
    assert is_address(Path("hf://org/texts")) and not is_address(Path("hf"))
