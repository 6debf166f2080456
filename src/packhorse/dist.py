"""Processes that work as one: who they are, what they tell each other, how they are started.

    launch(2, [sys.executable, "train.py"], say=note)       # what a user starts; it starts two
    with joined(torch.device("cpu")) as team:               # in each of the two
        total = team.add(sums)
        every = [decode(each) for each in team.gather(encode(mine))]

Who a process is stands in the environment, as torchrun puts it there; without it, it is alone, and
each of these is what it is for one. Tensors on an accelerator go by its own backend (NCCL), those
on the host by Gloo, so that counting together never waits for a device. What is told is tensors and
plain values; nothing is pickled, because whoever can reach the port could then run code. No more
than that is guarded: torch's store has no password, so the network must be one's own. By default,
and always where `launch` starts the processes, they meet on 127.0.0.1.

A process that dies takes the others with it. Gloo notices at once; else the one that waits gives up
after a timeout, and `launch` ends the rest before that. Where `launch` itself is killed, Linux asks
them to stop. Nothing is tried again by itself.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from packhorse.errors import InputError, PackhorseError

ADDRESS, PORT = "127.0.0.1", "29500"
TIMEOUT = 600.0  # seconds: a checkpoint is written, a model compiled, while others wait
TIMEOUTS = (1.0, 1e7)  # what torch can be told
PATIENCE = 300  # seconds that a process which was asked to stop has for it
BUCKET = 1 << 25  # bytes that are added up at once
LOOPBACK = {"linux": "lo", "darwin": "lo0"}
LAUNCHER, PR_SET_PDEATHSIG = "PACKHORSE_LAUNCHER", 1  # the process id of `launch`; linux/prctl.h
FOLDER = "packhorse-ranks-"  # what ranks other than 0 say goes there
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")  # that torchrun takes over


class RankLost(PackhorseError):
    """Another process of the team has ended, or does not answer; this one cannot go on alone."""

    exit_code = 4


@dataclass(frozen=True, slots=True)
class Team:
    """This process among those that work together; made by `told`, of use within `joined`."""

    rank: int = 0
    world: int = 1
    local: int = 0  # which of those on this machine
    local_world: int = 1

    def add(self, mine: Tensor) -> Tensor:
        """The sum over all ranks, on host or device; the same bits everywhere."""
        if self.world == 1:
            return mine
        total = mine.clone(memory_format=torch.contiguous_format)
        with listening():
            distributed.all_reduce(total)
        return total

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Make them what rank 0 has, in place."""
        for tensor in tensors if self.world > 1 else ():
            with listening():
                distributed.broadcast(tensor, 0)

    def gather(self, mine: bytes) -> list[bytes]:
        """What every rank brought, in their order."""
        if self.world == 1:
            return [mine]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        with listening():
            distributed.all_gather(sizes, torch.tensor([len(mine)]))
            longest = max(int(size) for size in sizes)
            every = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
            distributed.all_gather(every, _bytes(mine.ljust(longest, b"\0")))
        return [_text(one[: int(size)]) for one, size in zip(every, sizes, strict=True)]

    def hear(self, said: bytes | None) -> bytes:
        """What rank 0 says; the others say None."""
        if self.world == 1:
            return said or b""
        size = torch.tensor([len(said or b"")])
        with listening():
            distributed.broadcast(size, 0)
            what = torch.empty(int(size), dtype=torch.uint8) if self.rank else _bytes(said or b"")
            distributed.broadcast(what, 0)
        return _text(what)

    def wait(self) -> None:
        """Until all have come here."""
        self.add(torch.zeros(1))


def add_in_buckets(
    tensors: Sequence[Tensor], add: Callable[[Tensor], Tensor], size: int = BUCKET
) -> None:
    """Add up many tensors over ranks, in place: small ones together, up to `size` bytes."""
    for alike in _alike(tensors, size):
        if len(alike) == 1:
            alike[0].copy_(add(alike[0]))
            continue
        total = add(torch.cat([tensor.flatten() for tensor in alike]))
        parts = total.split([tensor.numel() for tensor in alike])
        for tensor, part in zip(alike, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _alike(tensors: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Neighbours of one kind and device."""
    bucket, held = [], 0
    for tensor in tensors:
        other = bucket and (bucket[0].dtype, bucket[0].device) != (tensor.dtype, tensor.device)
        if bucket and (other or held + tensor.nbytes > size):
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += tensor.nbytes
    if bucket:
        yield bucket


def encode(value: Any) -> bytes:
    """Tensors, arrays and plain values (None, numbers, texts; lists, tuples, dicts of them)."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_planted(value, tensors)).encode()
    return save({"tree": _bytes(tree), **tensors})


def decode(said: bytes) -> Any:
    """What was given to `encode`; tensors are on the host."""
    from safetensors.torch import load

    tensors = load(said)
    return _grown(json.loads(_text(tensors["tree"])), tensors)


def _planted(value: Any, tensors: dict[str, Tensor]) -> Any:
    """As JSON; an object in it says what is not, and tensors are put aside under their number."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, Tensor) else "array"
        number = str(len(tensors))
        tensors[number] = torch.as_tensor(value).detach().cpu().clone().contiguous()
        return {kind: number}
    if isinstance(value, list | tuple):
        items = [_planted(item, tensors) for item in value]
        return items if type(value) is list else {"tuple": items}
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {"dict": {key: _planted(item, tensors) for key, item in value.items()}}
    raise TypeError(f"{type(value).__name__} cannot be told to other ranks")


def _grown(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_grown(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, what),) = tree.items()
    if kind == "tuple":
        return tuple(_grown(item, tensors) for item in what)
    if kind == "dict":
        return {key: _grown(item, tensors) for key, item in what.items()}
    return tensors[what].numpy() if kind == "array" else tensors[what]


def _bytes(said: bytes) -> Tensor:
    return torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else torch.empty(0).byte()


def _text(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


@contextmanager
def listening() -> Iterator[None]:
    """What goes wrong while others are waited for is that one of them is gone."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RankLost(
            f"another rank has ended or does not answer, so this one ends too ({_reason(error)}); "
            "look for what the first of them said, and start again"
        ) from error


def _reason(error: Exception) -> str:
    """The first sentence, without the place in torch's source."""
    line = re.sub(r"^\[\S+\] ", "", str(error).strip().partition("\n")[0])
    return line.partition(". ")[0][:200]


def told(environ: Mapping[str, str] = os.environ) -> Team:
    """Who this process is; alone where nobody started it as one of several."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return Team()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    usual = {"LOCAL_RANK": environ["RANK"], "LOCAL_WORLD_SIZE": environ["WORLD_SIZE"]}
    said = [environ.get(name, usual.get(name, "")) for name in names]
    if not all(text.isdecimal() for text in said) or int(said[0]) >= int(said[1]):
        shown = ", ".join(f"{name}={text}" for name, text in zip(names, said, strict=True))
        raise InputError(f"the environment names no rank: {shown}; start with torchrun or --nproc")
    return Team(*map(int, said))


@contextmanager
def joined(device: torch.device, timeout: float = TIMEOUT) -> Iterator[Team]:
    """Meet the others; afterwards wait for them, and part. One accelerator becomes this process's.

    device: of what kind, "cuda" say. timeout: seconds after which one that does not answer is lost.
    """
    team = told()
    if team.world == 1:
        yield team
        return
    check_timeout(timeout)
    _end_with_launcher()
    if not distributed.is_available():
        raise InputError("this torch was built without torch.distributed; train in one process")
    if device.type != "cpu":
        _take(device, team)
    _meet(device, team, timeout)
    well = False
    try:
        yield team
        team.wait()
        well = True
    finally:
        # An accelerator's backend would wait here for those that are gone; leaving ends it too.
        if well or device.type == "cpu":
            distributed.destroy_process_group()


def check_timeout(seconds: float) -> None:
    """Refuse what torch would answer with a trace."""
    least, most = TIMEOUTS
    if not least <= seconds <= most:
        raise InputError(f"the timeout is {seconds:g} s; it must be from {least:g} to {most:,.0f}")


def _end_with_launcher() -> None:
    """Be asked to stop when `launch` dies, even of SIGKILL, which it cannot pass on; on Linux."""
    launcher = os.environ.get(LAUNCHER, "")
    if sys.platform != "linux" or not launcher.isdecimal():
        return
    if os.getppid() == int(launcher):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    try:
        os.kill(int(launcher), 0)
    except ProcessLookupError:
        raise RankLost(
            "the process that started this rank has ended, so this one ends too"
        ) from None


def _take(device: torch.device, team: Team) -> None:
    have = torch.accelerator.device_count()
    if device.index is not None:
        raise InputError(f"{device} is one device; each rank takes its own: say {device.type}")
    if team.local_world > have:
        raise InputError(
            f"{team.local_world} ranks, but {have} of {device.type} here; start no more ranks than "
            "that, or use the CPU"
        )
    torch.accelerator.set_device_index(team.local)


def _meet(device: torch.device, team: Team, timeout: float) -> None:
    os.environ.setdefault("MASTER_ADDR", ADDRESS)
    os.environ.setdefault("MASTER_PORT", PORT)
    backend, own = "gloo", None
    if device.type != "cpu":
        own = torch.device(device.type, team.local)
        backend = f"cpu:gloo,{device.type}:{distributed.get_default_backend_for_device(device)}"
    try:
        distributed.init_process_group(
            backend,
            rank=team.rank,
            world_size=team.world,
            timeout=timedelta(seconds=timeout),
            device_id=own,
        )
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        told = f"rank {team.rank} of {team.world} did not meet the others at {where}"
        raise RankLost(f"{told}: {_reason(error)}") from error


def launch(
    nproc: int,
    argv: Sequence[str],
    *,
    environ: Mapping[str, str | None] | None = None,
    say: Callable[[str], None] = lambda line: None,
    patience: int = PATIENCE,
) -> int:
    """Run a command as so many ranks on this machine, by torchrun; the exit code of all.

    Rank 0 has this process's streams, and only it. Signals are passed on, and who is asked to stop
    has `patience` seconds for it. If one fails the others are ended; `say` is told which it was,
    and why if rank 0 did not say so itself. environ: changes to theirs; None takes a name away.
    """
    if nproc < 1:
        raise InputError(f"{nproc} processes cannot be started; at least one is needed")
    ours = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(patience), LAUNCHER: str(os.getpid())}
    changes = {**ours, **(environ or {})}
    with tempfile.TemporaryDirectory(prefix=FOLDER) as folder:
        with _quietly(nproc, changes):
            stopped, codes = _torchrun(nproc, argv, folder)
        if stopped:
            return 128 + stopped
        return _blame(codes, Path(folder), say) if codes else 0


def _torchrun(nproc: int, argv: Sequence[str], folder: str) -> tuple[int, dict[int, int]]:
    """The signal that ended it, if one did, and the exit codes of ranks that failed."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        logs_specs=DefaultLogsSpecs(folder, {rank: Std.ALL for rank in range(1, nproc)}),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{ADDRESS}:0",
        local_addr=ADDRESS,
        max_restarts=0,
    )
    try:
        elastic_launch(config, argv[0])(*argv[1:])
    except SignalException as stopped:
        return int(stopped.sigval), {}
    except ChildFailedError as error:
        return 0, {rank: failure.exitcode for rank, failure in error.failures.items()}
    return 0, {}


@contextmanager
def _quietly(nproc: int, changes: Mapping[str, str | None]) -> Iterator[None]:
    """What torchrun changes is as before afterwards, and its log is not ours."""
    before, level = dict(os.environ), logging.root.manager.disable
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.filterwarnings("ignore", f"unclosed file .*{FOLDER}", ResourceWarning)
        stack.callback(logging.disable, level)
        stack.callback(_put_back, before)
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in SIGNALS if hasattr(signal, name)):
                stack.callback(signal.signal, number, signal.getsignal(number))
        logging.disable(logging.CRITICAL)
        wanted = {**_usual(nproc), **before, **changes}
        _put_back({name: value for name, value in wanted.items() if value is not None})
        yield


def _usual(nproc: int) -> dict[str, str]:
    """The environment of ranks on one machine, where it does not say otherwise."""
    own = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if own else os.cpu_count() or 1
    usual = {"OMP_NUM_THREADS": str(max(1, cores // nproc))}
    if loopback := LOOPBACK.get(sys.platform):
        usual |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return usual


def _put_back(environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)


def _blame(codes: Mapping[int, int], folder: Path, say: Callable[[str], None]) -> int:
    """The exit code of the one that failed by itself, and a word about it."""
    # Those that are left end as lost or, if they do not notice, by torchrun's SIGTERM.
    last = (-signal.SIGTERM, RankLost.exit_code)
    order = {rank: (code == last[0], code == last[1], code > 0) for rank, code in codes.items()}
    rank = min(codes, key=lambda rank: (order[rank], rank))
    code = codes[rank]
    if code < 0:
        name = signal.Signals(-code).name
        why = " (the system does that where memory runs out)" if -code == signal.SIGKILL else ""
        say(f"rank {rank} was killed by {name}{why}; the others were ended")
        return 128 - code
    if rank:
        said = [path.read_text(errors="replace") for path in folder.glob(f"*/*/{rank}/stderr.log")]
        lines = "".join(said).strip().splitlines() or ["it said nothing"]
        say(f"rank {rank} ended with exit code {code}, and the others with it: {lines[-1]}")
    return code
