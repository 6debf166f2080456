"""Process groups: ranks that work together, and the messages between them.

    with joined(torch.device("cpu")) as team:               # in each process that `launch` started
        total = team.add(sums)
        values = [decode(message) for message in team.gather(encode(value))]

The rank of a process is in the environment, where `packhorse.launcher` or torchrun puts it. A
process without it is alone, and all these functions work for one process too. Tensors on an
accelerator go through its own backend (NCCL), those on the host through Gloo, so that adding up
counts never waits for a device. Messages are tensors and plain values. Nothing is pickled, because
whoever can reach a port could then run code.

If `launch` started the processes, they meet in a file that only this user can access, and listen on
the loopback interface only. Processes that the user starts with torchrun meet at its address:
torch's store has no password, and torchrun itself listens on every interface and unpickles what it
receives, so that the network has to be trusted.

A process that dies takes the others with it. Gloo notices at once; otherwise the process that waits
gives up after a timeout, and `launch` ends the others before that. If `launch` itself is killed,
Linux sends its ranks SIGTERM. Nothing is retried automatically.
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

ADDRESS = "127.0.0.1"
PORT = "29500"
TIMEOUT = 600.0  # seconds: one rank may write a checkpoint or compile a model while others wait
TIMEOUTS = (1.0, 1e7)  # limits of what torch accepts
BUCKET = 1 << 25  # bytes that are added up at once
PR_SET_PDEATHSIG = 1  # linux/prctl.h
MEETINGS = count()  # per process: a second process group must not read the keys of the first


@dataclass(frozen=True, slots=True)
class Team:
    """This process among those that work together; its methods work inside `joined`."""

    rank: int = 0
    world: int = 1
    local: int = 0  # rank among the processes of this machine
    local_world: int = 1  # number of processes on this machine

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, on host or device; bitwise equal on every rank."""
        if self.world == 1:
            return tensor
        total = tensor.clone(memory_format=torch.contiguous_format)
        with rank_errors():
            distributed.all_reduce(total)
        return total

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast rank 0's tensors to all ranks, in place."""
        for tensor in tensors if self.world > 1 else ():
            with rank_errors():
                distributed.broadcast(tensor, 0)

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in rank order, at every rank."""
        if self.world == 1:
            return [message]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        with rank_errors():
            distributed.all_gather(sizes, torch.tensor([len(message)]))
            # all_gather needs tensors of one size, so messages are padded to the longest.
            longest = max(int(size) for size in sizes)
            buffers = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
            distributed.all_gather(buffers, _to_tensor(message.ljust(longest, b"\0")))
        return [_to_bytes(buffer[: int(size)]) for buffer, size in zip(buffers, sizes, strict=True)]

    def collect(self, message: bytes) -> Iterator[bytes]:
        """The messages of all ranks, one after the other, at rank 0; nothing at the others."""
        if self.rank == 0:
            yield message
        for rank in range(1, self.world):
            size = torch.tensor([len(message)])
            if self.rank == 0:
                with rank_errors():
                    distributed.recv(size, rank)
                    buffer = torch.empty(int(size), dtype=torch.uint8)
                    distributed.recv(buffer, rank)
                yield _to_bytes(buffer)
            elif self.rank == rank:
                with rank_errors():
                    distributed.send(size, 0)
                    distributed.send(_to_tensor(message), 0)

    def broadcast(self, message: bytes | None) -> bytes:
        """Rank 0's message, at every rank; the other ranks pass None."""
        if self.world == 1:
            return message or b""
        size = torch.tensor([len(message or b"")])
        with rank_errors():
            distributed.broadcast(size, 0)
            if self.rank == 0:
                buffer = _to_tensor(message or b"")
            else:
                buffer = torch.empty(int(size), dtype=torch.uint8)
            distributed.broadcast(buffer, 0)
        return _to_bytes(buffer)

    def wait(self) -> None:
        """Wait until all ranks have come here."""
        self.add(torch.zeros(1))


def add_in_buckets(
    tensors: Sequence[Tensor], add: Callable[[Tensor], Tensor], size: int = BUCKET
) -> None:
    """Add up many tensors over ranks, in place: small ones together, up to `size` bytes."""
    for bucket in _buckets(tensors, size):
        if len(bucket) == 1:
            bucket[0].copy_(add(bucket[0]))
            continue
        total = add(torch.cat([tensor.flatten() for tensor in bucket]))
        parts = total.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype and device, up to `size` bytes."""
    bucket: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        if bucket:
            same_kind = (bucket[0].dtype, bucket[0].device) == (tensor.dtype, tensor.device)
            if not same_kind or nbytes + tensor.nbytes > size:
                yield bucket
                bucket = []
                nbytes = 0
        bucket.append(tensor)
        nbytes += tensor.nbytes
    if bucket:
        yield bucket


def encode(value: Any) -> bytes:
    """Encode tensors, arrays and plain values (None, numbers, texts; lists, tuples, dicts)."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_to_json(value, tensors)).encode()
    return save({"tree": _to_tensor(tree), **tensors})


def decode(message: bytes) -> Any:
    """The value that was passed to `encode`; tensors are on the host."""
    from safetensors.torch import load

    tensors = load(message)
    return _from_json(json.loads(_to_bytes(tensors["tree"])), tensors)


def _to_json(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON, with its tensors moved to `tensors` and referred to by number.

    A JSON object always has one key, which tells the kind of a value that JSON does not have:
    {"tensor": number}, {"array": number}, {"tuple": items}, {"dict": items}.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, Tensor) else "array"
        number = str(len(tensors))
        tensors[number] = torch.as_tensor(value).detach().cpu().clone().contiguous()
        return {kind: number}
    if isinstance(value, list | tuple):
        items = [_to_json(item, tensors) for item in value]
        return items if type(value) is list else {"tuple": items}
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {"dict": {key: _to_json(item, tensors) for key, item in value.items()}}
    raise TypeError(f"{type(value).__name__} cannot be sent to other ranks")


def _from_json(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_from_json(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tuple":
        return tuple(_from_json(item, tensors) for item in content)
    if kind == "dict":
        return {key: _from_json(item, tensors) for key, item in content.items()}
    return tensors[content].numpy() if kind == "array" else tensors[content]


def _to_tensor(message: bytes) -> Tensor:
    if not message:  # which torch.frombuffer refuses
        return torch.empty(0).byte()
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


@contextmanager
def rank_errors() -> Iterator[None]:
    """Raise errors of communication as `RankLost`: they mean that another rank is gone."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RankLost(
            f"another rank has ended or does not answer, so this one ends too ({_reason(error)}); "
            "look for the error of the first rank that ended, and start again"
        ) from error


def _reason(error: Exception) -> str:
    """The first sentence of an error, without the position in torch's source."""
    line = re.sub(r"^\[\S+\] ", "", str(error).strip().partition("\n")[0])
    return line.partition(". ")[0][:200]


def team_from_environment(environ: Mapping[str, str] = os.environ) -> Team:
    """The team that the environment describes; alone if this was not started as one of several."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return Team()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    defaults = {"LOCAL_RANK": environ["RANK"], "LOCAL_WORLD_SIZE": environ["WORLD_SIZE"]}
    values = [environ.get(name, defaults.get(name, "")) for name in names]
    if not all(value.isdecimal() for value in values) or int(values[0]) >= int(values[1]):
        listing = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        raise InputError(
            f"the environment names no rank: {listing}; start with torchrun or --nproc"
        )
    return Team(*map(int, values))


@contextmanager
def joined(device: torch.device, timeout: float = TIMEOUT) -> Iterator[Team]:
    """Join the other ranks; at the end wait for them and leave. Each rank takes an accelerator.

    device: only its type counts, such as "cuda". timeout: seconds after which a rank that does not
    answer counts as lost.
    """
    team = team_from_environment()
    if team.world == 1:
        yield team
        return
    check_timeout(timeout)
    _end_with_launcher()
    if not distributed.is_available():
        raise InputError("this torch was built without torch.distributed; train in one process")
    if device.type != "cpu":
        _take_device(device, team)
    _meet(device, team, timeout)
    succeeded = False
    try:
        yield team
        team.wait()
        succeeded = True
    finally:
        # After a failure an accelerator's backend would wait here for ranks that are gone; the
        # end of the process ends it too.
        if succeeded or device.type == "cpu":
            distributed.destroy_process_group()


def check_timeout(seconds: float) -> None:
    """Raise a clear error for a timeout that torch would not accept."""
    least, most = TIMEOUTS
    if not least <= seconds <= most:
        raise InputError(f"the timeout is {seconds:g} s; it must be from {least:g} to {most:,.0f}")


def _end_with_launcher() -> None:
    """On Linux, get SIGTERM when `launch` dies, even of SIGKILL, which it cannot pass on."""
    launcher = os.environ.get(LAUNCHER, "")
    if sys.platform != "linux" or not launcher.isdecimal():
        return
    if os.getppid() == int(launcher):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    # After prctl, not before: `launch` may have died in between, and then no signal comes.
    try:
        os.kill(int(launcher), 0)
    except ProcessLookupError:
        raise RankLost(
            "the process that started this rank has ended, so this one ends too"
        ) from None


def _take_device(device: torch.device, team: Team) -> None:
    devices = torch.accelerator.device_count()
    if device.index is not None:
        raise InputError(f"{device} is one device; each rank takes its own: say {device.type}")
    if team.local_world > devices:
        raise InputError(
            f"{team.local_world} ranks, but {devices} of {device.type} here; start no more ranks "
            "than that, or use the CPU"
        )
    torch.accelerator.set_device_index(team.local)


def _meet(device: torch.device, team: Team, timeout: float) -> None:
    """Create the process group, through the launcher's file or torchrun's address."""
    backend = "gloo"
    device_id = None
    if device.type != "cpu":
        device_id = torch.device(device.type, team.local)
        backend = f"cpu:gloo,{device.type}:{distributed.get_default_backend_for_device(device)}"
    store = None
    meeting_point = os.environ.get(STORE)
    try:
        if meeting_point:
            file = distributed.FileStore(meeting_point, team.world)  # pyright: ignore[reportPrivateImportUsage]
            prefix = f"meeting {next(MEETINGS)}"
            store = distributed.PrefixStore(prefix, file)  # pyright: ignore[reportPrivateImportUsage]
        else:
            os.environ.setdefault("MASTER_ADDR", ADDRESS)
            os.environ.setdefault("MASTER_PORT", PORT)
            meeting_point = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        distributed.init_process_group(
            backend,
            store=store,
            rank=team.rank,
            world_size=team.world,
            timeout=timedelta(seconds=timeout),
            device_id=device_id,
        )
    except (RuntimeError, ValueError) as error:
        raise RankLost(
            f"rank {team.rank} of {team.world} did not meet the others at {meeting_point}: "
            f"{_reason(error)}"
        ) from error
