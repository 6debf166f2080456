"""Replicas: copies of the model that each take a share of every step.

    group = Group.of(options)
    for replica, leaves in group.shares(batches): ...
    group.add_gradients(model)

In one process, replicas run one after the other with the numbers of n devices: weights and
optimizer are one, gradients of all are added up before the step, and each replica has buffers of
its own (the running statistics of a batch norm, say), begun from the module's. The module keeps
those of the first, which is what PopTorch copies to the host.

Started as several processes (`torchrun --nproc-per-node n script.py`, or `packhorse.dist.launch`),
each runs its share of the replicas, on a GPU of its own where there are any, and gradients are
added up between them. Every process runs the whole script; the first one's weights and data count,
so that nothing about seeds must be written, and all get the outputs of all. With
`Options.Distributed` on top each process reads its own part of the data and has its own outputs.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from packhorse import dist
from packhorse.device import choose_device
from packhorse.errors import InputError
from packhorse_port.enums import OutputMode
from packhorse_port.options import Options
from packhorse_port.weights import DeviceWeights


@dataclass
class Group:
    """The replicas that this process runs, and the processes that run the others."""

    count: int = 1
    local: range = range(1)  # numbers of those that run here
    apart: int = 1  # processes with data of their own
    team: dist.Team = field(default_factory=dist.Team)
    own: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # buffers, by replica
    meeting: ExitStack = field(default_factory=ExitStack)
    met: bool = False

    @classmethod
    def of(cls, options: Options) -> Group:
        """Who runs what; refused where processes and replicas do not go together."""
        team, count = dist.team_from_environment(), options.replication_factor
        apart = options.Distributed.numProcesses
        if apart > 1:
            if team.world != apart:
                raise InputError(
                    f"Options.Distributed says {apart} processes and {team.world} run; start them"
                    f" with torchrun --nproc-per-node {apart} SCRIPT"
                )
            return cls(count, range(count), apart, team)
        if count % team.world:
            raise InputError(
                f"replicationFactor({count}) cannot be shared by {team.world} processes; write"
                f" replicationFactor({team.world}), or start torchrun --nproc-per-node {count}"
            )
        share = count // team.world
        return cls(count, range(team.rank * share, (team.rank + 1) * share), 1, team)

    @property
    def shared(self) -> bool:
        """Do several processes work on one batch?"""
        return self.team.world > 1 and self.apart == 1

    def meet(self, weights: DeviceWeights, device: torch.device) -> bool:
        """Before the first call: find the others and have the first one's weights; if there are."""
        if self.met or self.team.world == 1:
            return False
        self.meeting.enter_context(dist.joined(device))
        atexit.register(self.meeting.close)
        self.met = True
        with torch.no_grad():
            self.team.share([tensor.detach() for tensor in weights.counterparts.values()])
        return True

    def first_ones(self, leaves: Sequence[Any]) -> None:
        """The inputs become those of the first process, in place."""
        if self.shared:
            self.team.share([leaf for leaf in leaves if isinstance(leaf, Tensor)])

    def shares(self, batches: Sequence[list[Any]]) -> Iterator[tuple[int, list[Any]]]:
        """Replica and inputs of each micro batch of an iteration that runs here."""
        for number, leaves in enumerate(batches):
            if number % self.count in self.local:
                yield number % self.count, leaves

    def give_buffers(self, model: nn.Module) -> None:
        """Before the first step: every replica begins with the module's buffers as they are."""
        for replica in self.local[1:]:
            if replica not in self.own:
                self.own[replica] = {name: b.clone() for name, b in model.named_buffers()}

    def buffers(self, replica: int) -> dict[str, Tensor] | None:
        """A replica's own; None for the first one here, whose are the module's."""
        return self.own.get(replica)

    def add_gradients(self, model: nn.Module) -> None:
        """Over all processes."""
        if self.team.world > 1:
            found = [p.grad for p in model.parameters() if p.grad is not None]
            dist.add_in_buckets(found, self.team.add)

    def outputs(self, values: list[Any], setting: Any) -> list[Any]:
        """Those of all replicas, in the order of one process."""
        if not self.shared:
            return values
        per_replica = setting.iterations * setting.accumulation // setting.every
        steps = per_replica if setting.mode in (OutputMode.All, OutputMode.EveryN) else 1
        parts = [dist.decode(said) for said in self.team.gather(dist.encode(list(values)))]
        return [_interleaved(column, steps) for column in zip(*parts, strict=True)]


def _interleaved(parts: tuple[Any, ...], steps: int) -> Any:
    """Rows of `steps` micro batches of each process, as one process would have them."""
    if not isinstance(parts[0], Tensor):
        return parts[0]
    rows = [part if part.dim() else part[None] for part in parts]
    chunks = [part.chunk(steps) for part in rows]
    return torch.cat([part[step] for step in range(steps) for part in chunks])


def local_device() -> torch.device:
    """Where this process runs its replicas: its own accelerator of several, or the CPU."""
    device, team = choose_device(), dist.team_from_environment()
    return (
        device if device.type == "cpu" or team.world == 1 else torch.device(device.type, team.local)
    )
