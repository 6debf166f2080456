"""How long a server takes from its command to its first answer, several times, and for what.

    python tests/serve/start_times.py --config base --device cuda --dtype bf16 --graphs --fronts 8

The first start compiles with an empty cache of this server's own ("cold"; files may still have to
come from a slow disk) and runs on for `--settle` seconds, in which batches are compiled; the others
find what it left there ("warm"). Each row has, in
seconds since the command: when the engine had opened the model, when a front was ready, when the
server said that it serves, when its first request was answered, and the processor time that all of
its processes had taken until then.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

TEXT = json.dumps({"inputs": "the cat sat on a mat"}).encode()
STEPS = {"engine": r"engine \d+ .*is ready", "front": r"front \d+ .*is ready"}


def start(words: list[str], cache: Path, trace: str, settle: float) -> dict[str, float]:
    """Start a server, ask it once, stop it; return the seconds of each step."""
    environment = {**os.environ, "PACKHORSE_CACHE": str(cache)}
    if trace:
        environment["PYTHONPATH"] = os.pathsep.join([trace, os.environ.get("PYTHONPATH", "")])
    begun = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "packhorse", "serve", "--json", "--port", "0", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    steps: dict[str, float] = {}
    log: list[str] = []

    def read_log() -> None:
        assert server.stderr is not None
        for line in server.stderr:
            log.append(line)
            for step, pattern in STEPS.items():
                if re.search(pattern, line):
                    steps.setdefault(step, time.perf_counter() - begun)

    threading.Thread(target=read_log, daemon=True).start()
    try:
        line = server.stdout.readline() if server.stdout else ""
        if not line:
            raise SystemExit("".join(log))
        steps["serving"] = time.perf_counter() - begun
        client = http.client.HTTPConnection("127.0.0.1", json.loads(line)["port"], timeout=120)
        client.request("POST", "/embed", TEXT, {"Content-Type": "application/json"})
        assert client.getresponse().status == 200
        steps["answer"] = time.perf_counter() - begun
        steps["processor"] = processor_seconds(server.pid)
        time.sleep(settle)
    finally:
        server.terminate()
        server.wait(120)
    return {step: round(seconds, 2) for step, seconds in steps.items()}


def processor_seconds(root: int) -> float:
    """Return the processor time of a process and of its children, of Linux."""
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if root in (int(folder.name), int(fields[1])):
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="tiny", help="of a model with random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--fronts", type=int, default=0, help="0: one process does all")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--starts", type=int, default=6)
    parser.add_argument("--settle", type=float, default=0.0, help="seconds that the first runs on")
    parser.add_argument("--trace", default="", help="a folder for PYTHONPATH, of a profiler")
    arguments = parser.parse_args()
    from packhorse.reports import random_model

    with tempfile.TemporaryDirectory() as place:
        model = random_model.write(arguments.config, Path(place) / "model")
        words = ["--model", f"model={model}", "--fronts", str(arguments.fronts)]
        words += ["--device", arguments.device, "--dtype", arguments.dtype]
        words += ["--graphs"] if arguments.graphs else []
        rows: list[dict[str, float]] = []
        cache = Path(place) / "cache"
        cache.mkdir(mode=0o700)
        for number in range(arguments.starts):
            settle = 0.0 if number else arguments.settle
            rows.append(start(words, cache, arguments.trace, settle))
            print("warm" if number else "cold", json.dumps(rows[-1]), flush=True)
    warm = rows[1:]
    if warm:
        medians = {step: round(statistics.median(row[step] for row in warm), 2) for step in warm[0]}
        print("median of the warm", json.dumps(medians))


if __name__ == "__main__":
    main()
