"""Which part of a model runs where: kept as written, without effect, as one device runs it all.

    with Block("encoder", ipu_id=1): ...
    opts.setExecutionStrategy(PipelinedExecution("embedding", "encoder"))

Blocks, stages, phases and strategies divide a model among IPUs. The numbers do not depend on that,
so everything here takes PopTorch's arguments, answers as PopTorch does as far as a script can see,
and changes no value. A module wrapped by `BeginBlock` keeps its class and its parameters' names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self, TypeVar

from torch import nn

from packhorse.errors import InputError
from packhorse_port.enums import AutoStage, Liveness
from packhorse_port.notices import say_once

Function = TypeVar("Function", bound=Callable[..., Any])
SAID = "blocks, stages and phases have no effect: one device runs the whole model, same numbers"


class Block(nn.Module):
    """A scope, `with Block("name", ipu_id=1):`, or `Block.start("name")` from here on."""

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__()
        say_once("blocks", SAID)
        self._user_id, self._ipu_id = user_id, ipu_id

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @staticmethod
    def useAutoId() -> None:
        """Blocks without a name are numbered; nothing asks for the number here."""

    @staticmethod
    def start(user_id: str | None = None, ipu_id: int | None = None) -> None:
        say_once("blocks", SAID)


def BeginBlock(
    layer_to_call: nn.Module, user_id: str | None = None, ipu_id: int | None = None
) -> nn.Module:
    """The module itself: from it on, PopTorch would use another device."""
    if not isinstance(layer_to_call, nn.Module):
        raise InputError("BeginBlock takes a torch.nn.Module; for a function use BlockFunction")
    say_once("blocks", SAID)
    return layer_to_call


def BlockFunction(
    user_id: str | None = None, ipu_id: int | None = None
) -> Callable[[Function], Function]:
    """A decorator of a function that is a block."""
    say_once("blocks", SAID)
    return lambda function: function


def addBlock(module: nn.Module, user_id: str | None = None, ipu_id: int | None = None) -> nn.Module:
    """`BeginBlock` under its later name."""
    return BeginBlock(module, user_id, ipu_id)


def removeBlocks(module: nn.Module) -> nn.Module:
    """There are none."""
    return module


class Stage:
    """Blocks that would run on one device."""

    def __init__(self, *block_ids: str) -> None:
        self._blocks, self._ipu = block_ids, None

    @property
    def blocks(self) -> tuple[str, ...]:
        return self._blocks

    def ipu(self, ipu: int) -> Self:
        """Its device."""
        self._ipu = ipu
        return self


class Phase:
    """Stages that would run at one time."""

    def __init__(self, *arg: Any) -> None:
        self.stages = _stages(arg)

    def stage(self, idx: int) -> Stage:
        return self.stages[idx]

    def ipus(self, *ipus: int) -> Self:
        """A device for each stage."""
        for stage, ipu in zip(self.stages, ipus, strict=True):
            stage.ipu(ipu)
        return self


def _stages(given: Iterable[Any]) -> list[Stage]:
    return [each if isinstance(each, Stage) else Stage(each) for each in given]


class ShardedExecution:
    """One device at a time."""

    def __init__(self, *args: AutoStage | str | Stage) -> None:
        self._stages = _stages(each for each in args if not isinstance(each, AutoStage))

    def stage(self, block_id: str) -> Stage:
        """The stage of a block."""
        for stage in self._stages:
            if block_id in stage.blocks:
                return stage
        raise InputError(f"no stage has the block {block_id!r}")


class PipelinedExecution:
    """All devices at once, each on another micro batch; same numbers, stage after stage."""

    stage = ShardedExecution.stage

    def __init__(self, *args: AutoStage | str | Stage) -> None:
        self._stages = _stages(each for each in args if not isinstance(each, AutoStage))


class SerialPhasedExecution:
    """Phase after phase, weights fetched for each."""

    def __init__(self, *phases: Phase | list[Stage] | list[str]) -> None:
        self._phases = [each if isinstance(each, Phase) else Phase(*each) for each in phases]

    def phase(self, phase: int) -> Phase:
        return self._phases[phase]

    def stage(self, block_id: str) -> Stage:
        """The stage of a block."""
        for stage in (each for phase in self._phases for each in phase.stages):
            if block_id in stage.blocks:
                return stage
        raise InputError(f"no stage has the block {block_id!r}")

    def useSeparateBackwardPhase(self, use: bool = True) -> Self:
        return self

    def setTensorsLiveness(self, liveness: Liveness) -> Self:
        return self


class ParallelPhasedExecution:
    """Two groups of devices that take turns."""

    phase = SerialPhasedExecution.phase
    stage = SerialPhasedExecution.stage
    useSeparateBackwardPhase = SerialPhasedExecution.useSeparateBackwardPhase
    setTensorsLiveness = SerialPhasedExecution.setTensorsLiveness

    def __init__(self, *phases: Phase | list[Stage] | list[str]) -> None:
        self._phases = [each if isinstance(each, Phase) else Phase(*each) for each in phases]

    def sendBackwardPhase(self, phase: int) -> Self:
        return self
