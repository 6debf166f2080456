"""`horovod.torch`: what scripts for PopDist ask of Horovod, over torch.distributed.

    hvd.init()
    mean = hvd.allreduce(torch.tensor([loss]))

The processes are those of `popdist`. Their process group is the one that a model's replicas use.
Gradients need none of this: `trainingModel` adds them over processes itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from packhorse import dist
from packhorse_port.notices import UsageError, line_prefix
from packhorse_port.replicas import join_once

Average = "average"
Sum = "sum"


def init(*_: object, **__: object) -> None:
    """Nothing to do: processes meet at the first exchange."""


shutdown = init


def is_initialized() -> bool:
    """True: nothing has to be initialized."""
    return True


def rank() -> int:
    """The number of this process."""
    return dist.team_from_environment().rank


def size() -> int:
    """How many processes there are."""
    return dist.team_from_environment().world


def local_rank() -> int:
    """The number of this process on its machine."""
    return dist.team_from_environment().local


def local_size() -> int:
    """How many processes this machine runs."""
    return dist.team_from_environment().local_world


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: object = None,
    op: str | None = None,
) -> torch.Tensor:
    """The mean of a tensor over all processes, or its sum."""
    if op not in (None, Average, Sum):
        raise UsageError(f"{line_prefix()}allreduce: op is hvd.Average or hvd.Sum, not {op!r}")
    total = _team().add(tensor.detach().clone())
    averaged = average is not False if op is None else op == Average
    return total / size() if averaged else total


def grouped_allreduce(
    tensors: Sequence[torch.Tensor], average: bool | None = None, op: str | None = None
) -> list[torch.Tensor]:
    """`allreduce` of several tensors."""
    return [allreduce(tensor, average, op=op) for tensor in tensors]


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """The tensors of all processes, one after the other along the first dimension."""
    messages = _team().gather(dist.encode(tensor.detach()))
    return torch.cat([dist.decode(message).to(tensor.device) for message in messages])


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """The first process's tensor."""
    result = tensor.detach().clone()
    _team(root_rank).share([result])
    return result


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0
) -> None:
    """Overwrite tensors with those of the first process."""
    named = params.items() if isinstance(params, Mapping) else params
    tensors = [value.detach() for _, value in named if isinstance(value, torch.Tensor)]
    _team(root_rank).share(tensors)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The first process's object: tensors and plain values."""
    team = _team(root_rank)
    return dist.decode(team.broadcast(dist.encode(obj) if team.rank == 0 else None))


def _team(root_rank: int = 0) -> dist.Team:
    if root_rank:
        raise UsageError(f"{line_prefix()}root_rank={root_rank}: only the first process sends")
    return join_once()


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"{line_prefix()}horovod.torch.{name} is not provided here; trainingModel adds gradients"
        " over processes itself, and torch.distributed has the rest"
    )
