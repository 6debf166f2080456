"""Training in several processes: what they do together, and what rank 0 does for all.

    with joined(settings.device) as ranks:
        job = assemble(settings, ranks.rank, ranks.world)
        outcome = train(job, out, ranks=ranks)

Each rank learns from its share of a step, gradients are added up in buckets behind the last of its
parts, and every rank holds the whole model. Not DistributedDataParallel: it averages where sums are
wanted, and to begin adding before the backward pass has ended saves at most what adding costs, on
paper 7 ms of a step of 300 (BERT-Large on eight H200: 1.3 GB of gradients at 350 GB/s), for a
wrapper around the model that must know of accumulation, of compiled layers and of uneven shares.

The optimizer's state is divided (ZeRO-1, Rajbhandari et al. 2019, as torch has it): a rank keeps
and updates whole tensors, as LAMB needs, and then tells the others. To be saved it is brought to
rank 0 (`optimizer_state.consolidate`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from packhorse import dist
from packhorse.device import choose_device
from packhorse.dist import Team, decode, encode, rank_errors
from packhorse.errors import CheckpointError, InputError, KernelError, PackhorseError
from packhorse.train.objectives.stats import Gather, Stats, alone
from packhorse.train.optimizer_state import is_sharded

KINDS = {kind.__name__: kind for kind in (CheckpointError, InputError, KernelError)}

T = TypeVar("T")
Lead = Callable[[Callable[[], Any]], Any]
Divide = Callable[[nn.Module, Optimizer], Optimizer]


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train together; alone, every sum is what it is."""

    rank: int = 0
    world: int = 1
    add: Callable[[Tensor], Tensor] = lambda mine: mine  # over all ranks, on host or device
    gather: Gather = alone
    lead: Lead = lambda work: work()  # rank 0 does it; all get what came of it, or its error
    divide: Divide = lambda model, optimizer: optimizer  # its state among ranks that begin alike


@contextmanager
def joined(device: str = "auto", timeout: float = dist.TIMEOUT) -> Iterator[Ranks]:
    """Meet those that were started together with this process, if any, and part at the end."""
    with dist.joined(choose_device(device), timeout) as team:
        yield of(team)


def of(team: Team) -> Ranks:
    """What training asks of a team."""
    if team.world == 1:
        return Ranks()
    return Ranks(
        team.rank,
        team.world,
        team.add,
        lambda mine: _gather(team, mine),
        lambda work: _lead(team, work),
        lambda model, optimizer: _divide(team, model, optimizer),
    )


def _gather(team: Team, mine: list[Any]) -> list[Any]:
    told = [_told(each) for each in mine]
    every = [decode(each) for each in team.gather(encode(told))]
    return [_heard(each) for rank in every for each in rank]


def _told(each: Any) -> Any:
    if isinstance(each, Stats):
        return {"stats": (each.names, each.sums, each.sequences, each.tokens)}
    return {"plain": each}


def _heard(each: dict[str, Any]) -> Any:
    return Stats(*each["stats"]) if "stats" in each else each["plain"]


def _lead(team: Team, work: Callable[[], T]) -> T:
    """Rank 0's work; where it fails, all fail, and none waits for what will not come."""
    said = failed = None
    if team.rank == 0:
        try:
            said = {"did": work()}
        except Exception as error:
            said, failed = {"failed": (type(error).__name__, str(error))}, error
    heard = decode(team.broadcast(encode(said) if team.rank == 0 else None))
    if failed is not None:
        raise failed
    if "failed" in heard:
        kind, message = heard["failed"]
        raise KINDS.get(kind, PackhorseError)(f"rank 0: {message}")
    return heard["did"]


def _divide(team: Team, model: nn.Module, optimizer: Optimizer) -> Optimizer:
    """Rank 0's weights and state for all, whatever they read; then each keeps its share of it."""
    team.share([parameter.detach() for parameter in model.parameters()])
    for kinds in optimizer.state.values():
        team.share([kinds[kind] for kind in sorted(kinds)])
    divided = _zero()([dict(group) for group in optimizer.param_groups], type(optimizer))
    for group in divided.optim.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                divided.optim.state[parameter] = optimizer.state[parameter]
    return divided


def _zero() -> Any:
    with warnings.catch_warnings():
        # torch compiles optimizers that nobody asked for when this is imported.
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


def add_gradients(gradients: Sequence[Tensor], ranks: Ranks) -> None:
    """Those of all ranks, in place of this one's."""
    if ranks.world > 1:
        dist.add_in_buckets(gradients, ranks.add)


def update(optimizer: Optimizer) -> None:
    """A step of it; where it is divided, each rank then hears of the parameters of the others."""
    with rank_errors() if is_sharded(optimizer) else nullcontext():
        optimizer.step()
