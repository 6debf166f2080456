"""As a program: ranks that train for a test, forked from one process, so that torch loads once.

It reads one line of JSON for each run, {"world": 2, "settings": {…}, "out": …, …}, and answers with
one: how each rank ended and what it has to say. What may be asked for beside:

    stop      {"rank": 1, "after": 5}: that rank is asked to stop when so many steps are done
    dtype     "float64": the model is computed in it
    unlike    ranks other than 0 begin with other weights
    forget    random numbers are not put back
    apart     each rank keeps its own gradients
    strike    {"rank": 1, "at": "forward", "number": 3, "how": "kill"}: that rank is killed (or with
              "fail" has a full disk, or with "hang" stands still) at the third call of that kind
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed.optim  # once, for all
from torch.distributed import distributed_c10d

from packhorse import dist
from packhorse.checkpoint import hf
from packhorse.data.packed import loader
from packhorse.dist import Team
from packhorse.errors import PackhorseError
from packhorse.launcher import STORE
from packhorse.model.bert import Bert
from packhorse.train import checkpoints
from packhorse.train.job import assemble
from packhorse.train.loop import train
from packhorse.train.ranks import joined
from packhorse.train.settings import TrainSettings

LONGEST = 60.0  # seconds for a run
PLACES = {  # where a rank can be struck
    "forward": (Bert, "forward"),
    "add": (Team, "add"),
    "load": (loader, "batch_of"),
    "write": (hf, "write_tensors"),
    "gather": (Team, "gather"),
}


def _strike(at: str, number: int, kind: str) -> None:
    owner, name = PLACES[at]
    real, calls = getattr(owner, name), count(1)

    def struck(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            if kind == "fail":
                raise OSError(28, "No space left on device")
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        return real(*args, **kwargs)

    setattr(owner, name, struck)


def _wish(stop: dict[str, int] | None, rank: int) -> Callable[[], int]:
    calls = count()
    if stop is None or stop["rank"] != rank:
        return lambda: 0
    return lambda: signal.SIGTERM if next(calls) >= stop["after"] else 0


def _train(request: dict[str, Any]) -> dict[str, Any]:
    """What one rank does, and what it saw."""
    settings, notes = TrainSettings(**request["settings"]), []
    with joined("cpu", request.get("timeout", 20.0)) as ranks:
        job = assemble(settings, ranks.rank, ranks.world)
        if dtype := request.get("dtype"):
            job.model.to(getattr(torch, dtype))
        if request.get("unlike") and ranks.rank:
            for parameter in job.model.parameters():
                parameter.data += 1.0
        wish = _wish(request.get("stop"), ranks.rank)
        outcome = train(
            job, Path(request["out"]), stop_signal=wish, report=notes.append, ranks=ranks
        )
    weights = [float(p.detach().double().sum()) for p in job.model.parameters()]
    return {"outcome": asdict(outcome) | {"model": None}, "notes": notes, "weights": weights}


def _spoil(request: dict[str, Any], rank: int) -> None:
    strike: dict[str, Any] = request.get("strike") or {}
    if strike.get("rank") == rank:
        _strike(strike["at"], strike["number"], strike["how"])
    if request.get("forget"):
        checkpoints.restore_rng = lambda *states: []
    if request.get("apart"):
        dist.add_in_buckets = lambda gradients, add: None


def _never(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("a rank unpickles what another one sent")


def _rank(request: dict[str, Any], rank: int, store: Path, out: Path) -> int:
    place = {"RANK": rank, "WORLD_SIZE": request["world"], STORE: store}
    place["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.load = distributed_c10d._unpickler = _never  # both of torch's ways
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        _spoil(request, rank)
        out.write_text(json.dumps(_train(request)))
    except PackhorseError as error:
        out.write_text(json.dumps({"error": [type(error).__name__, str(error)]}))
        return error.exit_code
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _run(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fork the ranks and wait for them."""
    store = Path(tempfile.mkdtemp(dir=folder)) / "store"
    files = [folder / f"{rank}.json" for rank in range(request["world"])]
    children: dict[int, int] = {}
    for rank, file in enumerate(files):
        file.unlink(missing_ok=True)
        if not (child := os.fork()):
            os._exit(_rank(request, rank, store, file))
        children[child] = rank
    codes = _codes(children, hangs=(request.get("strike") or {}).get("how") == "hang")
    reports = [json.loads(file.read_text()) if file.exists() else None for file in files]
    return {"codes": [codes[rank] for rank in sorted(codes)], "reports": reports}


def _codes(children: dict[int, int], hangs: bool) -> dict[int, int | None]:
    """How each rank ended; None: it had to be ended."""
    codes: dict[int, int | None] = {}
    end = time.monotonic() + LONGEST
    while children and time.monotonic() < end and not (hangs and codes):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.01)
    for pid, rank in children.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        codes[rank] = None
    return codes


if __name__ == "__main__":
    torch.set_num_threads(1)
    for late in ("torch._dynamo", "pyarrow.ipc", "google_crc32c", "safetensors.torch"):
        import_module(late)  # what the first step would import, in every rank
    with tempfile.TemporaryDirectory() as place:
        for line in sys.stdin:
            print(json.dumps(_run(json.loads(line), Path(place))), flush=True)
