"""Starts and stops the servers that `serving` measures, each as a process of its own.

All serve the same folder in the same dtype with the same number of threads, speak OpenAI's
`/v1/embeddings`, and listen on 127.0.0.1. The output of a server goes to a file; if it does not
start, its last line is the reason in its row. infinity-emb needs other versions of libraries than
we do, so it is an executable in an environment of its own.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from packhorse.errors import InputError
from packhorse_bench.peers import Unserved
from packhorse_bench.serving_http import request_body

PATH = "/v1/embeddings"
MODEL = "model"
START_SECONDS = 180.0
STOP_SECONDS = 5.0
ANSWER_SECONDS = 60.0
WAIT_LINE_SECONDS = 10.0  # between two lines that say that a server is still starting
INFINITY = Path(".venv-infinity/bin/infinity_emb")  # as `make peers` makes it
INFINITY_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class ServerPlace:
    """The settings that every server of a run shares."""

    folder: Path  # of the model
    device: str
    dtype: str
    threads: int
    batch_size: int  # of the peers
    infinity: Path | None = None  # the executable; None: where `make peers` puts it, or on the path
    onnx: Path | None = None  # the same model as ONNX, for infinity on a CPU
    pooling: str = "mean"  # or "cls": infinity's optimum engine does not read it from the model
    more: tuple[str, ...] = ()  # further flags of our server


def packhorse(place: ServerPlace, port: int) -> list[str]:
    """The command of our server, with its defaults."""
    return [
        sys.executable,
        "-m",
        "packhorse",
        "serve",
        "--model",
        f"{MODEL}={place.folder}",
        "--port",
        str(port),
        "--device",
        place.device,
        "--dtype",
        place.dtype,
        "--threads",
        str(place.threads),
        "--log-level",
        "warning",
        *place.more,
    ]


def sentence_transformers(place: ServerPlace, port: int) -> list[str]:
    """The command of sentence-transformers behind FastAPI (`serving_peer`)."""
    for name in ("sentence_transformers", "fastapi", "uvicorn", "orjson"):
        if find_spec(name) is None:
            raise Unserved(f"{name} is not installed; pip install 'packhorse[peers,serve]'")
    return [
        sys.executable,
        "-m",
        "packhorse_bench.serving_peer",
        str(place.folder),
        "--port",
        str(port),
        "--device",
        place.device,
        "--dtype",
        place.dtype,
        "--threads",
        str(place.threads),
        "--batch",
        str(place.batch_size),
        "--most",
        str(4 * place.batch_size),
    ]


def infinity(place: ServerPlace, port: int) -> list[str]:
    """The command of infinity-emb; on a CPU with its optimum engine, as its author recommends.

    Its number of threads comes from the environment. Its optimum engine finds a graph on disk only
    in the current folder, so it is started there.
    """
    executable = place.infinity or (INFINITY if INFINITY.exists() else shutil.which("infinity_emb"))
    if executable is None or not Path(executable).exists():
        reason = f"there is no {executable}" if executable else "it is not installed"
        raise Unserved(
            f"{reason}; `make peers` puts it in {INFINITY.parents[1]}, or --infinity PATH"
        )
    engine = "torch" if place.onnx is None else "optimum"
    return [
        str(Path(executable).absolute()),
        "v2",
        "--model-id",
        "." if place.onnx else str(place.folder),
        "--served-model-name",
        MODEL,
        "--url-prefix",
        "/v1",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--engine",
        engine,
        "--device",
        place.device.partition(":")[0],
        "--dtype",
        INFINITY_DTYPES[place.dtype],
        "--batch-size",
        str(place.batch_size),
        "--pooling-method",
        "auto" if place.onnx is None else place.pooling,
        # On a CPU it compiles for minutes, and advises against that itself for BERT.
        "--no-compile",
        "--log-level",
        "warning",
    ]


Command = Callable[[ServerPlace, int], list[str]]
OURS = "packhorse"
PEERS = ("sentence-transformers", "infinity")
SERVERS: dict[str, Command] = {
    OURS: packhorse,
    "sentence-transformers": sentence_transformers,
    "infinity": infinity,
}


@dataclass(frozen=True)
class Endpoint:
    """Where a server answers requests for vectors, and the name of its model there."""

    port: int
    host: str = "127.0.0.1"
    path: str = PATH  # TEI's dialect if it ends in /embed, else OpenAI's
    model: str = MODEL

    def vectors(self, texts: Sequence[str]) -> np.ndarray:
        """The vectors of these texts; raises `Unserved` if the answer is an error."""
        body = request_body(self.path, self.model, list(texts))
        status, answer = self.ask("POST", self.path, body)
        if status != 200:
            raise Unserved(f"answers {status}: {answer[:200].decode(errors='replace')}")
        document = json.loads(answer)
        if isinstance(document, dict):
            document = [row["embedding"] for row in document["data"]]
        return np.array(document, np.float32)

    def ask(
        self, method: str, path: str, body: bytes | None = None, seconds: float = ANSWER_SECONDS
    ) -> tuple[int, bytes]:
        """Status and body of the answer to one request."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=seconds)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def parse_url(url: str) -> tuple[str, Endpoint]:
    """Name and endpoint of a running server, from NAME=URL or URL.

    A URL without a path means OpenAI's route. OpenAI's dialect names a model: it is the first that
    the server lists at /models, where it has that.
    """
    name, separator, address = url.partition("=")
    if not separator or "/" in name:
        name = ""
        address = url
    parts = urlsplit(address)
    if parts.scheme != "http" or not parts.hostname:
        raise InputError(
            f"--url {url}: pass NAME=http://localhost:8080/embed; https is not supported"
        )
    path = parts.path.rstrip("/") or PATH
    if not path.endswith(("/embed", "/embeddings")):
        raise InputError(
            f"--url {url}: the path is that of a route, /embed (text-embeddings-inference) or "
            f"{PATH} (OpenAI)"
        )
    try:
        endpoint = Endpoint(parts.port or 80, parts.hostname, path)
    except ValueError as error:
        raise InputError(f"--url {url}: {error}") from error
    return name or f"{endpoint.host}:{endpoint.port}", endpoint


def with_served_model(endpoint: Endpoint) -> Endpoint:
    """The endpoint with the name under which the server lists its first model, if it lists any."""
    if not endpoint.path.endswith("/embeddings"):
        return endpoint
    try:
        status, answer = endpoint.ask("GET", endpoint.path.removesuffix("embeddings") + "models")
        name = json.loads(answer)["data"][0]["id"] if status == 200 else endpoint.model
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return endpoint
    return replace(endpoint, model=str(name))


@dataclass(frozen=True)
class PeerServer:
    """A server process that was started."""

    name: str
    endpoint: Endpoint
    process: subprocess.Popen[bytes]
    log: Path
    begun: float = field(default_factory=time.monotonic)

    def wait(self, report_line: Callable[[str], None] = lambda line: None) -> None:
        """Wait until it answers; raises `Unserved` if it ends or takes too long.

        `report_line` is called now and then while it starts, and when it is ready.
        """
        begun = time.monotonic()
        next_line = begun + WAIT_LINE_SECONDS
        while (now := time.monotonic()) < begun + START_SECONDS:
            if now >= next_line:
                next_line = now + WAIT_LINE_SECONDS
                report_line(f"{self.name} is starting, for {now - self.begun:.0f} s")
            if self.process.poll() is not None:
                raise Unserved(f"ended with {self.process.returncode}: {self.last_words()}")
            try:
                if self.endpoint.ask("GET", "/health", seconds=5.0)[0] == 200:
                    seconds = time.monotonic() - self.begun
                    return report_line(
                        f"{self.name} was seen ready {seconds:.1f} s after its start"
                    )
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.1)
        raise Unserved(f"does not answer after {START_SECONDS:.0f} s: {self.last_words()}")

    def vectors(self, texts: Sequence[str]) -> np.ndarray:
        """The vectors of these texts. Its answer also shows that earlier requests are done."""
        try:
            return self.endpoint.vectors(texts)
        except (OSError, http.client.HTTPException) as error:
            raise Unserved(f"stopped answering ({error}): {self.last_words()}") from error

    def last_words(self) -> str:
        """The last line of its output."""
        lines = self.log.read_text("utf-8", errors="replace").strip().splitlines()
        return lines[-1].strip()[:200] if lines else "it printed nothing"

    def stop(self) -> None:
        """Terminate it, then kill it and whatever it has started in its session."""
        try:
            self.process.terminate()
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def start(name: str, place: ServerPlace, scratch: Path) -> PeerServer:
    """Start a server without waiting for it; raises `Unserved` if it is not installed.

    It runs on the cores of the calling thread.
    """
    port = _free_port()
    command = SERVERS[name](place, port)
    log = scratch / f"{name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(place.threads) | {"HF_HOME": str(scratch / "hf")},
            cwd=place.onnx if name == "infinity" else None,
            start_new_session=True,  # Ctrl-C goes to us only, and `stopping` stops it
        )
    return PeerServer(name, Endpoint(port), process, log)


def _environment(threads: int) -> dict[str, str]:
    """The environment of a server: equal threads, no settings or keys of others, no telemetry."""
    others = ("PACKHORSE_SERVE_", "PACKHORSE_API_KEY", "INFINITY_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    count = str(threads)
    return variables | {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "RAYON_NUM_THREADS": count,
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def stopping(servers: list[PeerServer]) -> Iterator[None]:
    """Stop the servers in the list at the end, whatever happens; SIGTERM raises as Ctrl-C does."""

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, leave) if in_main_thread else None
    try:
        yield
    finally:
        # An ExitStack runs all its callbacks, even if a second Ctrl-C interrupts one of them.
        with ExitStack() as stack:
            for server in servers:
                server.process.terminate()
                stack.callback(server.stop)
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)
