"""Send a million requests to `packhorse serve`; compare its memory after 100,000 and at the end.

    python tests/serve/soak_requests.py --requests 1000000 --config base --device cuda --fronts 8

The model has random weights. Several generator processes send texts of 8 to 512 tokens, short ones
more often than long ones, in a closed loop. Every tenth of the requests the load pauses until the
server is at rest, and what each of its processes holds is read from /proc: memory (its own pages
and its share of shared memory; not the code of libraries, whose pages count less or more as other
programs on the machine use them too), open files, threads; and the memory of the GPU. A few texts
are asked then, and their vectors compared with those of the library in fp32.

The last line of the output is JSON. Exit code 1 means that the server grew by more than 16 MiB from
the first pause to the last, or holds more files, or more threads than its pools may have, that a
request was not answered with 200, or that a vector was wrong. `--leak BYTES` makes the server lose
so much per request, which must be noticed. With `--seconds` the load pauses by time where that is
sooner, and there is so much of it at most; that fewer requests were sent is no failure then. Flags
that are not known here, such as --graphs, are passed on to `packhorse serve`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from packhorse.processor import usable_cores
from packhorse.reports import docstrings, random_model
from packhorse.runtime.loading import load
from packhorse_bench.serving_host import (
    default_generators,
    divide_cores,
    on_cores,
    processor_seconds,
    raise_file_limit,
)
from packhorse_bench.serving_load import Generator, GeneratorTeam, LoadJob
from packhorse_bench.serving_servers import OURS, PeerServer, ServerPlace, start, stopping
from packhorse_bench.serving_texts import exact_texts, learn_vocabulary

SHORTEST = 8
LONGEST = 512
LENGTHS = 48  # different ones, evenly spaced on a logarithmic scale
TEXTS_PER_LENGTH = 64
PAUSES = 10
SLICE_SECONDS = 20.0  # of load at most, so that generators keep few figures
FIRST_SECONDS = 2.0  # of load, to learn the rate
REST_SECONDS = 3.0
MOST_REST_SECONDS = 60.0
ROOM = 16 << 20  # bytes by which all processes together may grow
CHECKED = 8  # texts at every pause
LEAST_COSINE = 0.999  # with the vectors in fp32: 16-bit numbers stay above
# Runs in every Python process that has this folder on its path. What is lost is never freed.
LEAKING = """
import sys
if "packhorse.serve.processes" in sys.orig_argv or "serve" in sys.orig_argv:
    from packhorse.serve import guard
    plain, lost = guard.Guard.__call__, []
    async def leaking(self, scope, receive, send):
        lost.append(b"x" * {leak} + str(len(lost)).encode())
        await plain(self, scope, receive, send)
    guard.Guard.__call__ = leaking
"""


def descendants(root: int) -> dict[str, int]:
    """Return the processes of the server by name: "supervisor", "front 1", "engine 1" …"""
    names: dict[str, int] = {}
    numbers: Counter[str] = Counter()
    for pid in sorted(processor_seconds(root) or [root]):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        kind = "process"
        if b"packhorse.serve.processes" in words:
            kind = words[-3].decode()
        elif pid == root:
            kind = "supervisor"
        numbers[kind] += 1
        names[kind if pid == root else f"{kind} {numbers[kind]}"] = pid
    return names


def look(pid: int) -> dict[str, int]:
    """Return what one process holds: bytes of memory, open files, threads."""
    place = Path(f"/proc/{pid}")
    return {
        **memory(place),
        "files": len(os.listdir(place / "fd")),
        "threads": len(os.listdir(place / "task")),
    }


def memory(place: Path) -> dict[str, int]:
    """Return resident bytes: all, the process's own with its part of what is shared, that part."""
    try:
        lines = (place / "smaps_rollup").read_text().splitlines()[1:]
        sizes = {name: 1024 * int(size.split()[0]) for name, _, size in map(_divided, lines)}
        own, shared = sizes["Pss_Anon"], sizes["Pss_Shmem"]
        return {"rss": sizes["Rss"], "own": own + shared, "shared": shared}
    except (OSError, KeyError):  # some sandboxes and older kernels do not tell so much
        resident, of_files = map(int, (place / "statm").read_text().split()[1:3])
        size = os.sysconf("SC_PAGE_SIZE")
        return {"rss": size * resident, "own": size * (resident - of_files), "shared": 0}


def _divided(line: str) -> tuple[str, str, str]:
    return line.partition(":")


def gpu_bytes(device: str) -> int | None:
    """Return the used memory of the GPU; None without one, or without nvidia-smi."""
    if not device.startswith("cuda"):
        return None
    number = device.partition(":")[2] or "0"
    words = ["nvidia-smi", f"--id={number}", "--query-gpu=memory.used", "--format=csv,noheader"]
    try:
        answer = subprocess.run([*words], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return int(answer.split()[0]) << 20


class Soak:
    """The server, its generators, and what was seen at every pause."""

    def __init__(
        self, server: PeerServer, team: GeneratorTeam, connections: int, sample: list[str]
    ) -> None:
        self.server = server
        self.team = team
        self.connections = connections
        self.sample = sample
        self.answered = 0
        self.errors: Counter[str] = Counter()
        self.tokens = 0
        self.load_seconds = 0.0
        self.pauses: list[dict[str, Any]] = []

    def send(self, count: int, longest: float) -> None:
        """Send until at least so many requests were answered in all, or for so many seconds."""
        seed = 0
        until = time.monotonic() + longest
        while self.answered < count and (left := until - time.monotonic()) > 0:
            seconds = FIRST_SECONDS
            if self.answered:
                rate = self.answered / self.load_seconds
                seconds = max(0.2, (count - self.answered) / rate)
            seconds = min(seconds, SLICE_SECONDS, left)
            report = self.team.run(
                LoadJob(
                    self.server.endpoint.port,
                    rate=0.0,
                    seconds=seconds,
                    connections=self.connections,
                    timeout=60.0,
                    seed=self.answered + (seed := seed + 1),
                )
            )
            if not report.answered:
                raise SystemExit(f"nothing is answered: {report.errors}")
            self.answered += report.answered
            self.errors.update(report.errors)
            self.tokens += report.tokens
            self.load_seconds += report.seconds

    def pause(self, device: str, exact: np.ndarray) -> None:
        """Wait until nothing is under way, and note what the server holds."""
        until = time.monotonic() + MOST_REST_SECONDS
        while self._figure("packhorse_in_flight") > 0:
            if time.monotonic() > until:
                raise SystemExit("requests are still in flight a minute after the last one")
            time.sleep(0.1)
        vectors = self.server.vectors(self.sample)
        products = (vectors * exact).sum(1)
        cosines = products / np.linalg.norm(vectors, axis=1) / np.linalg.norm(exact, axis=1)
        time.sleep(REST_SECONDS)
        processes = {name: look(pid) for name, pid in descendants(self.server.process.pid).items()}
        figures = {
            "requests": self.answered,
            "errors": dict(self.errors),
            "memory_mib": _mib(sum(process["own"] for process in processes.values())),
            "rss_mib": _mib(sum(process["rss"] for process in processes.values())),
            "shared_mib": _mib(sum(process["shared"] for process in processes.values())),
            "files": sum(process["files"] for process in processes.values()),
            "threads": sum(process["threads"] for process in processes.values()),
            "gpu_mib": None if (used := gpu_bytes(device)) is None else _mib(used),
            "cosine_min": round(float(cosines.min()), 6),
            "processes": {name: _mib(process["own"]) for name, process in processes.items()},
        }
        self.pauses.append(figures)
        shown = {name: value for name, value in figures.items() if name != "processes"}
        print(json.dumps(shown), file=sys.stderr, flush=True)

    def _figure(self, name: str) -> float:
        _, page = self.server.endpoint.ask("GET", "/metrics")
        lines = [line for line in page.decode().splitlines() if line.startswith(name)]
        return sum(float(line.split()[-1]) for line in lines)


def _mib(size: int) -> float:
    return round(size / 2**20, 2)


def judge(soak: Soak) -> list[str]:
    """Return what is wrong."""
    first, last = soak.pauses[0], soak.pauses[-1]
    wrong = [f"{count} requests: {error}" for error, count in soak.errors.items()]
    grown = last["memory_mib"] - first["memory_mib"]
    if grown > ROOM / 2**20:
        wrong.append(f"memory grew by {grown:.1f} MiB")
    # The pool of a process, which starts a thread when all others are busy.
    pools = min(32, usable_cores() + 4) * len(last["processes"])
    for name, room in (("files", 0), ("threads", pools)):
        if last[name] > first[name] + room:
            wrong.append(f"{name}: {first[name]} at first, {last[name]} at the end")
    if first["processes"].keys() != last["processes"].keys():
        wrong.append("other processes run at the end than at first")
    if min(pause["cosine_min"] for pause in soak.pauses) < LEAST_COSINE:
        wrong.append("vectors are not those of the library")
    return wrong


def flags(fronts: int | None, connections: int) -> tuple[str, ...]:
    """Return flags of the server whose limits admit all requests of the load.

    Limits are divided among fronts, and connections may come to them unevenly: hence four times.
    """
    limits = {
        "--max-concurrent-requests": max(512, 4 * connections),
        "--max-connections": max(2048, 4 * connections),
        "--max-queue-inputs": max(4096, 4 * connections),
        "--max-queue-tokens": max(1 << 20, 4 * connections * LONGEST),
    }
    words = [word for flag, value in limits.items() for word in (flag, str(value))]
    return (*words, *([] if fronts is None else ["--fronts", str(fronts)]))


def lengths() -> list[int]:
    """Return the lengths of the texts, in tokens."""
    ratio = math.log(LONGEST / SHORTEST) / (LENGTHS - 1)
    return sorted({round(SHORTEST * math.exp(ratio * place)) for place in range(LENGTHS)})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--config", default="tiny", choices=random_model.CONFIGS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--fronts", type=int, help="as in packhorse serve")
    parser.add_argument("--generators", type=int, default=0, help="0: a quarter of the cores")
    parser.add_argument("--connections", type=int, default=0, help="of all generators")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of load")
    parser.add_argument("--leak", type=int, default=0, help="bytes to lose per request")
    arguments, more = parser.parse_known_args()  # the rest are flags of packhorse serve
    generators = arguments.generators or default_generators()
    connections = arguments.connections or (1024 if arguments.device != "cpu" else 64)
    division = divide_cores(generators)
    raise_file_limit(2 * connections)
    begun = time.monotonic()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        written = [item.text for item in docstrings.read()]
        size = random_model.CONFIGS[arguments.config].vocab_size
        vocab = learn_vocabulary(written, size, scratch / "vocab.txt")
        folder = random_model.write(arguments.config, scratch / arguments.config, vocab=vocab)
        if arguments.leak:
            (scratch / "leak").mkdir()
            code = LEAKING.format(leak=arguments.leak)
            (scratch / "leak" / "sitecustomize.py").write_text(code)
            os.environ["PYTHONPATH"] = f"{scratch / 'leak'}:{os.environ.get('PYTHONPATH', '')}"
        running: list[PeerServer] = []
        stack.enter_context(stopping(running))
        place = ServerPlace(
            folder=folder,
            device=arguments.device,
            dtype="fp32" if arguments.device == "cpu" else "bf16",
            threads=division.server_cores,
            batch_size=32,
            more=(*flags(arguments.fronts, connections), *more),
        )
        with on_cores(division.servers):
            server = start(OURS, place, scratch)
        running.append(server)
        encoder = load(folder, device="cpu", dtype="fp32")
        words = [word for text in written for word in text.split()]
        texts: list[str] = []
        tokens: list[int] = []
        for length in lengths():
            texts += exact_texts(length, TEXTS_PER_LENGTH, encoder.tokenizer, words, length)
            tokens += [length] * TEXTS_PER_LENGTH
        sample = texts[:: len(texts) // CHECKED]
        exact = np.asarray(encoder.embed(sample), np.float32)
        del encoder
        team = GeneratorTeam(
            [
                stack.enter_context(Generator(texts, tokens, scratch, core))
                for core in division.generators
            ]
        )
        server.wait()
        soak = Soak(server, team, connections, sample)
        for place_of_pause in range(1, PAUSES + 1):
            soak.send(arguments.requests * place_of_pause // PAUSES, arguments.seconds / PAUSES)
            soak.pause(arguments.device, exact)
        server.process.terminate()
        exit_code = server.process.wait(60)
        words_of_server = server.last_words()
    first, last = soak.pauses[0], soak.pauses[-1]
    wrong = judge(soak)
    if exit_code:
        wrong.append(f"the server ended with {exit_code}: {words_of_server}")
    figures = {
        "requests": soak.answered,
        "requests_per_second": round(soak.answered / soak.load_seconds),
        "tokens_per_second": round(soak.tokens / soak.load_seconds),
        "seconds": round(time.monotonic() - begun),
        "config": arguments.config,
        "device": arguments.device,
        "fronts": arguments.fronts,
        "generators": generators,
        "connections": connections,
        "grown_mib": round(last["memory_mib"] - first["memory_mib"], 2),
        "pauses": soak.pauses,
        "wrong": wrong,
    }
    print(json.dumps(figures))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
