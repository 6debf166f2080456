"""Replicas: copies of the model that each process a share of every step.

    group = ReplicaGroup.of(options)
    for replica, leaves in group.local_batches(batches): ...
    group.add_gradients(model)

In one process, replicas run one after the other with the results of n devices: they share weights
and optimizer, gradients of all are summed before the step, and each replica has its own buffers
(such as the running statistics of a batch norm), initialized from the module's. The module keeps
those of the first replica, which is what PopTorch copies to the host.

Started as several processes (by `torchrun --nproc-per-node n script.py`, or by
`packhorse.launcher.launch`), each process runs its share of the replicas, on its own GPU if there
are any, and gradients are summed across processes. Every process runs the whole script; weights and
data of the first one are used, so that the script needs no seeds, and all get the outputs of all.
With `Options.Distributed` each process instead reads its own part of the data and returns its own
outputs.
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
from packhorse_port.device_state import DeviceWeights
from packhorse_port.enums import OutputMode
from packhorse_port.notices import UsageError
from packhorse_port.options import Options


@dataclass
class ReplicaGroup:
    """The replicas that this process runs, and the processes that run the others."""

    count: int = 1
    local: range = range(1)  # numbers of the replicas that run here
    data_processes: int = 1  # processes that each read their own data
    team: dist.Team = field(default_factory=dist.Team)
    replica_buffers: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # by replica
    connected: bool = False

    @classmethod
    def of(cls, options: Options) -> ReplicaGroup:
        """Assign replicas to processes; raises if their numbers do not fit."""
        team = dist.team_from_environment()
        count = options.replication_factor
        data_processes = options.Distributed.numProcesses
        if data_processes > 1:
            if team.world != data_processes:
                raise UsageError(
                    f"Options.Distributed says {data_processes} processes and {team.world} run;"
                    f" start them with torchrun --nproc-per-node {data_processes} SCRIPT"
                )
            return cls(count, range(count), data_processes, team)
        if count % team.world:
            raise UsageError(
                f"replicationFactor({count}) cannot be shared by {team.world} processes; write"
                f" replicationFactor({team.world}), or start torchrun --nproc-per-node {count}"
            )
        share = count // team.world
        return cls(count, range(team.rank * share, (team.rank + 1) * share), 1, team)

    @property
    def shares_batches(self) -> bool:
        """Whether several processes work on one batch."""
        return self.team.world > 1 and self.data_processes == 1

    def connect(self, weights: DeviceWeights, device: torch.device) -> bool:
        """Join the other processes, if any, and take the first one's weights; whether it did."""
        if self.connected or self.team.world == 1:
            return False
        join_once(device)
        self.connected = True
        with torch.no_grad():
            self.team.share([tensor.detach() for tensor in weights.counterparts.values()])
        return True

    def share_inputs(self, leaves: Sequence[Any]) -> None:
        """Overwrite the inputs with those of the first process, in place."""
        if self.shares_batches:
            self.team.share([leaf for leaf in leaves if isinstance(leaf, Tensor)])

    def local_batches(self, batches: Sequence[list[Any]]) -> Iterator[tuple[int, list[Any]]]:
        """(replica, inputs) of each micro batch of an iteration that runs in this process."""
        for number, leaves in enumerate(batches):
            if number % self.count in self.local:
                yield number % self.count, leaves

    def initialize_buffers(self, model: nn.Module) -> None:
        """Copy the module's buffers for each local replica but the first, unless it has some."""
        for replica in self.local[1:]:
            if replica not in self.replica_buffers:
                copies = {name: buffer.clone() for name, buffer in model.named_buffers()}
                self.replica_buffers[replica] = copies

    def buffers(self, replica: int) -> dict[str, Tensor] | None:
        """A replica's buffers; None for the first local one, which uses the module's."""
        return self.replica_buffers.get(replica)

    def add_gradients(self, model: nn.Module) -> None:
        """Sum the gradients over all processes, in place."""
        if self.team.world > 1:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            dist.add_in_buckets(gradients, self.team.add)

    def gather_outputs(self, values: list[Any], settings: Any) -> list[Any]:
        """The outputs of all replicas, in the order that a single process returns them."""
        if not self.shares_batches:
            return values
        per_replica = settings.iterations * settings.accumulation // settings.output_period
        steps = per_replica if settings.mode in (OutputMode.All, OutputMode.EveryN) else 1
        parts = [dist.decode(message) for message in self.team.gather(dist.encode(list(values)))]
        return [_interleave(column, steps) for column in zip(*parts, strict=True)]


def _interleave(parts: tuple[Any, ...], steps: int) -> Any:
    """Rows of `steps` micro batches per process, in the order of a single process."""
    if not isinstance(parts[0], Tensor):
        return parts[0]
    rows = [part if part.dim() else part[None] for part in parts]
    chunks = [part.chunk(steps) for part in rows]
    return torch.cat([part[step] for step in range(steps) for part in chunks])


def join_once(device: torch.device | None = None) -> dist.Team:
    """Join the other processes, if any, until this one ends; a process has one such group."""
    team = dist.team_from_environment()
    if team.world > 1 and not torch.distributed.is_initialized():
        connection = ExitStack()
        connection.enter_context(dist.joined(choose_device() if device is None else device))
        atexit.register(connection.close)
    return team


def local_device() -> torch.device:
    """The device of this process: its own accelerator if there are several, or the CPU."""
    device = choose_device()
    team = dist.team_from_environment()
    if device.type == "cpu" or team.world == 1:
        return device
    return torch.device(device.type, team.local)
