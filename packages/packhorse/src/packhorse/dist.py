"""Processes that work as one: who they are, and what they tell each other.

    with joined(torch.device("cpu")) as team:               # in each process that `launch` started
        total = team.add(sums)
        every = [decode(each) for each in team.gather(encode(mine))]

Who a process is stands in the environment, as `packhorse.launcher` or torchrun puts it there;
without it, it is alone, and each of these is what it is for one. Tensors on an accelerator go by
its own backend (NCCL), those on the host by Gloo, so that counting together never waits for a
device. What is told is tensors and plain values; nothing is pickled, because whoever can reach a
port could then run code.

Where `launch` started the processes they meet in a file that only this user can reach, and listen
on the loopback interface alone. Those that the user's own torchrun starts meet at its address:
torch's store has no password, and torchrun itself listens on every interface and unpickles what it
is sent, so that the network must be one's own.

A process that dies takes the others with it. Gloo notices at once; else the one that waits gives up
after a timeout, and `launch` ends the rest before that. Where `launch` itself is killed, Linux asks
them to stop. Nothing is tried again by itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from packhorse.errors import InputError, RankLost
from packhorse.launcher import LAUNCHER, STORE

ADDRESS, PORT = "127.0.0.1", "29500"
TIMEOUT = 600.0  # seconds: a checkpoint is written, a model compiled, while others wait
TIMEOUTS = (1.0, 1e7)  # what torch can be told
BUCKET = 1 << 25  # bytes that are added up at once
PR_SET_PDEATHSIG = 1  # linux/prctl.h
MEETINGS = count()  # of this process; a second one does not read what the first left in the file


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

    def collect(self, mine: bytes) -> Iterator[bytes]:
        """What every rank brought, one after the other, at rank 0; nothing at the others."""
        if self.rank == 0:
            yield mine
        for rank in range(1, self.world):
            size = torch.tensor([len(mine)])
            if self.rank == 0:
                with listening():
                    distributed.recv(size, rank)
                    message = torch.empty(int(size), dtype=torch.uint8)
                    distributed.recv(message, rank)
                yield _text(message)
            elif self.rank == rank:
                with listening():
                    distributed.send(size, 0)
                    distributed.send(_bytes(mine), 0)

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
    backend, own = "gloo", None
    if device.type != "cpu":
        own = torch.device(device.type, team.local)
        backend = f"cpu:gloo,{device.type}:{distributed.get_default_backend_for_device(device)}"
    store, where = None, os.environ.get(STORE)
    try:
        if where:
            file = distributed.FileStore(where, team.world)  # pyright: ignore[reportPrivateImportUsage]
            meeting = f"meeting {next(MEETINGS)}"
            store = distributed.PrefixStore(meeting, file)  # pyright: ignore[reportPrivateImportUsage]
        else:
            os.environ.setdefault("MASTER_ADDR", ADDRESS)
            os.environ.setdefault("MASTER_PORT", PORT)
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        distributed.init_process_group(
            backend,
            store=store,
            rank=team.rank,
            world_size=team.world,
            timeout=timedelta(seconds=timeout),
            device_id=own,
        )
    except (RuntimeError, ValueError) as error:
        told = f"rank {team.rank} of {team.world} did not meet the others at {where}"
        raise RankLost(f"{told}: {_reason(error)}") from error
