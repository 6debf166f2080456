"""Training in several processes: what they do together, and what rank 0 does for all.

    with joined(settings.device) as ranks:
        job = assemble(settings, ranks.rank, ranks.world)
        outcome = train(job, out, ranks=ranks)

Each rank trains on its share of a step. Gradients are summed in buckets after the last of its
parts, and every rank holds the whole model. DistributedDataParallel is not used: it averages where
sums are needed, and starting to sum before the backward pass has ended saves at most what summing
costs, on paper 7 ms of a step of 300 (BERT-Large on eight H200: 1.3 GB of gradients at 350 GB/s).
For that it wraps the model, and the wrapper would have to know about accumulation, compiled layers
and uneven shares.

The optimizer's state is sharded (ZeRO-1, Rajbhandari et al. 2019, torch's implementation): a rank
keeps and updates whole tensors, as LAMB requires, and then sends them to the others. To be saved,
the state is gathered on rank 0 (`optimizer_state.consolidate`).
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
from packhorse.train.objectives.stats import BatchStats, Gather, single_process
from packhorse.train.optimizer_state import is_sharded

# Errors that other ranks raise as the same class when rank 0 has failed.
ERRORS = {kind.__name__: kind for kind in (CheckpointError, InputError, KernelError)}

T = TypeVar("T")
OnRank0 = Callable[[Callable[[], Any]], Any]
Divide = Callable[[nn.Module, Optimizer], Optimizer]


@dataclass(frozen=True, slots=True)
class RankGroup:
    """This process among those that train together; the defaults are for a single process."""

    rank: int = 0
    world: int = 1
    add: Callable[[Tensor], Tensor] = lambda tensor: tensor  # sum over ranks, on host or device
    gather: Gather = single_process
    on_rank_0: OnRank0 = lambda work: work()  # rank 0 calls it; all get its result or its error
    divide: Divide = lambda model, optimizer: optimizer  # shard the optimizer's state


@contextmanager
def joined(device: str = "auto", timeout: float = dist.TIMEOUT) -> Iterator[RankGroup]:
    """Join the processes that were started together with this one, if any; leave at the end."""
    with dist.joined(choose_device(device), timeout) as team:
        yield rank_group(team)


def rank_group(team: Team) -> RankGroup:
    """The operations of training on a team of processes."""
    if team.world == 1:
        return RankGroup()
    return RankGroup(
        rank=team.rank,
        world=team.world,
        add=team.add,
        gather=lambda items: _gather(team, items),
        on_rank_0=lambda work: _on_rank_0(team, work),
        divide=lambda model, optimizer: _divide(team, model, optimizer),
    )


def _gather(team: Team, items: list[Any]) -> list[Any]:
    message = encode([_to_message(item) for item in items])
    lists = [decode(received) for received in team.gather(message)]
    return [_from_message(item) for rank_items in lists for item in rank_items]


def _to_message(item: Any) -> Any:
    if isinstance(item, BatchStats):
        return {"stats": (item.names, item.sums, item.sequences, item.tokens)}
    return {"plain": item}


def _from_message(message: dict[str, Any]) -> Any:
    return BatchStats(*message["stats"]) if "stats" in message else message["plain"]


def _on_rank_0(team: Team, work: Callable[[], T]) -> T:
    """Call `work` on rank 0 and send its result to all ranks; if it raises, all ranks raise."""
    message: dict[str, Any] | None = None
    failure: Exception | None = None
    if team.rank == 0:
        try:
            message = {"result": work()}
        except Exception as error:
            message = {"error": (type(error).__name__, str(error))}
            failure = error
    received = decode(team.broadcast(encode(message) if team.rank == 0 else None))
    if failure is not None:
        raise failure
    if "error" in received:
        kind, text = received["error"]
        raise ERRORS.get(kind, PackhorseError)(f"rank 0: {text}")
    return received["result"]


def _divide(team: Team, model: nn.Module, optimizer: Optimizer) -> Optimizer:
    """Give all ranks rank 0's weights and state, whatever they read; then keep a shard on each."""
    team.share([parameter.detach() for parameter in model.parameters()])
    for kinds in optimizer.state.values():
        team.share([kinds[kind] for kind in sorted(kinds)])
    groups = [dict(group) for group in optimizer.param_groups]
    sharded = _zero_redundancy_optimizer()(groups, type(optimizer))
    for group in sharded.optim.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                sharded.optim.state[parameter] = optimizer.state[parameter]
    return sharded


def _zero_redundancy_optimizer() -> Any:
    with warnings.catch_warnings():
        # On import torch compiles optimizers that nobody uses here, with a deprecation warning.
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


def add_gradients(gradients: Sequence[Tensor], ranks: RankGroup) -> None:
    """Replace the gradients by their sums over all ranks."""
    if ranks.world > 1:
        dist.add_in_buckets(gradients, ranks.add)


def update(optimizer: Optimizer) -> None:
    """Take an optimizer step; a sharded one then receives the parameters of the other ranks."""
    with rank_errors() if is_sharded(optimizer) else nullcontext():
        optimizer.step()
