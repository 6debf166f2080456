"""PopTorch's functions, blocks and scopes within a model: what they compute, on one device.

    with Block("encoder", ipu_id=1): ...
    opts.setExecutionStrategy(PipelinedExecution("embedding", "encoder"))

Functions that control where and how an IPU computes (`set_available_memory`,
`recomputationCheckpoint`) return their argument; the others are written in PyTorch, so that
autograd works. Blocks, stages, phases and strategies distribute a model over IPUs. Results do not
depend on that, so they take PopTorch's arguments, return what PopTorch returns as far as a script
can see, and change no value. A module wrapped by `BeginBlock` keeps its class and its parameters'
names.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from packhorse.errors import InputError
from packhorse_port.enums import AutoStage, Liveness
from packhorse_port.losses import report_side_effect
from packhorse_port.notices import log_once

NEVER = float("-inf")  # logarithm of the probability 0
NO_BLOCKS = (
    "blocks, stages and phases have no effect: one device runs the whole model, same numbers"
)
Function = TypeVar("Function", bound=Callable[..., Any])


def nop(tensor: Tensor) -> Tensor:
    """The tensor itself."""
    return tensor


def recomputationCheckpoint(*tensors: Any) -> Any:
    """The arguments themselves: activations are kept, not recomputed."""
    log_once("recomputationCheckpoint", "recomputationCheckpoint has no effect: activations stay")
    return tensors[0] if len(tensors) == 1 else tensors


def set_available_memory(tensor: Tensor, available_memory_proportion: float) -> Tensor:
    """The tensor itself: memory is not divided into tiles here."""
    return tensor


def set_overlap_for_input(input_tensors: Any, mode: Any) -> Any:
    """The tensors themselves."""
    return input_tensors


def set_overlap_for_output(output_tensors: Any, mode: Any) -> Any:
    """The tensors themselves."""
    return output_tensors


def serializedMatMul(
    lhs: Tensor, rhs: Tensor, mode: Any, factor: int = 0, keep_precision: bool = False
) -> Tensor:
    """lhs @ rhs."""
    log_once("serializedMatMul", "serializedMatMul: the matrix product is made in one piece")
    return torch.matmul(lhs, rhs)


def ipu_print_tensor(
    tensor: Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    **_: Any,
) -> Tensor:
    """Print the tensor, and its gradient when it is computed; returns the tensor."""
    report_side_effect()
    print_tensor(tensor, title or "tensor", summarise_threshold)
    if print_gradient and tensor.requires_grad:
        name = f"Gradient___{title or 'tensor'}"
        tensor.register_hook(lambda gradient: print_tensor(gradient, name, summarise_threshold))
    return tensor


def print_tensor(tensor: Tensor, title: str, threshold: int) -> None:
    """Print to stderr, as PopTorch does at any log level."""
    with torch.no_grad():
        text = torch.Tensor.__repr__(tensor.detach().cpu())
    if tensor.numel() > threshold:
        text = f"{text} ({tuple(tensor.shape)})"
    sys.stderr.write(f"{title}: {text}\n")


def for_loop(count: int, body: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Repeat `inputs = body(*inputs)` `count` times."""
    if not isinstance(inputs, list | tuple) or not all(isinstance(x, Tensor) for x in inputs):
        raise InputError("for_loop(count, body, inputs): inputs is a list of tensors")
    values = list(inputs)
    for _ in range(count):
        outputs = body(*values)
        values = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        if len(values) != len(inputs):
            raise InputError(
                f"for_loop: body took {len(inputs)} tensors and returned {len(values)};"
                " it must return as many as it takes"
            )
    return values


def dynamic_slice(tensor: Tensor, dim: int, start: Tensor, size: int, step: int = 1) -> Tensor:
    """A slice of `size` along `dim`, from an index that is a tensor."""
    return tensor.index_select(dim, _slice_indices(start, size, step))


def dynamic_update(input: Tensor, src: Tensor, dim: int, start: Tensor, size: int) -> Tensor:
    """`input` with the slice of `size` at `start` replaced by `src`."""
    return input.index_copy(dim, _slice_indices(start, size, 1), src)


def _slice_indices(start: Tensor, size: int, step: int) -> Tensor:
    return start.reshape(()).long() + torch.arange(0, size, step, device=start.device)


def ctc_beam_search_decoder(
    probs: Tensor, lengths: Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [N, top], lengths [N, top] and paths [N, top, T] of log probabilities [T, N, C]."""
    beams_per_sequence = [
        _beam_search(probs[: int(length), n].detach().cpu(), blank, beam_width)[:top_paths]
        for n, length in enumerate(lengths)
    ]
    longest = probs.shape[0]
    sequences = len(beams_per_sequence)
    scores = torch.full((sequences, top_paths), NEVER)
    path_lengths = torch.zeros(sequences, top_paths, dtype=torch.int32)
    paths = torch.zeros(sequences, top_paths, longest, dtype=torch.int32)
    for n, beams in enumerate(beams_per_sequence):
        for rank, (path, score) in enumerate(beams):
            scores[n, rank] = score
            path_lengths[n, rank] = len(path)
            paths[n, rank, : len(path)] = torch.tensor(path, dtype=torch.int32)
    return scores, path_lengths, paths


def _beam_search(probs: Tensor, blank: int, width: int) -> list[tuple[tuple[int, ...], float]]:
    """Prefix beam search over log probabilities [T, C]: paths with their scores, best first.

    Each prefix carries two scores: of ending in a blank, and of ending in its last label. Only the
    former may be extended by the same label again.
    """
    beams: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, NEVER)}
    for row in probs.tolist():
        extended: dict[tuple[int, ...], tuple[float, float]] = {}
        for path, (ends_blank, ends_label) in beams.items():
            score = _logadd(ends_blank, ends_label)
            _add_scores(extended, path, score + row[blank], NEVER)
            for label, log_probability in enumerate(row):
                if label == blank:
                    continue
                if path and path[-1] == label:
                    _add_scores(extended, path, NEVER, ends_label + log_probability)
                    _add_scores(extended, (*path, label), NEVER, ends_blank + log_probability)
                else:
                    _add_scores(extended, (*path, label), NEVER, score + log_probability)
        ranked = sorted(extended.items(), key=lambda beam: -_logadd(*beam[1]))
        beams = dict(ranked[:width])
    return [(path, _logadd(*scores)) for path, scores in beams.items()]


def _add_scores(
    beams: dict[tuple[int, ...], tuple[float, float]],
    path: tuple[int, ...],
    blank_score: float,
    label_score: float,
) -> None:
    ends_blank, ends_label = beams.get(path, (NEVER, NEVER))
    beams[path] = (_logadd(ends_blank, blank_score), _logadd(ends_label, label_score))


def _logadd(a: float, b: float) -> float:
    low, high = sorted((a, b))
    return high if low == NEVER else high + math.log1p(math.exp(low - high))


class CPU:
    """A function that PopTorch would run on the host; it is called directly."""

    def __init__(self, layer_to_call: Callable[..., Any], ID: str = "") -> None:
        self._layer = layer_to_call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._layer(*args, **kwargs)

    execute = __call__


class NameScope:
    """A scope that would name operations."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> NameScope:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Attribute(NameScope):
    """A scope that would set an attribute of operations."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(", ".join(attributes))


class MultiConv(NameScope):
    """A scope whose convolutions would run side by side."""

    def __init__(self) -> None:
        super().__init__("multiconv")

    def availableMemoryProportions(self, value: Any) -> MultiConv:
        return self

    def partialsTypes(self, value: Any) -> MultiConv:
        return self

    def planType(self, value: Any) -> MultiConv:
        return self

    def perConvReservedTiles(self, value: int) -> MultiConv:
        return self

    def cycleBackOff(self, value: float) -> MultiConv:
        return self

    def enableConvDithering(self, value: Any) -> MultiConv:
        return self


class Block(nn.Module):
    """A scope, `with Block("name", ipu_id=1):`, or `Block.start("name")` from this line on."""

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__()
        log_once("blocks", NO_BLOCKS)
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @staticmethod
    def useAutoId() -> None:
        """Number blocks without a name; no effect."""

    @staticmethod
    def start(user_id: str | None = None, ipu_id: int | None = None) -> None:
        """Begin a block; no effect."""
        log_once("blocks", NO_BLOCKS)


def BeginBlock(
    layer_to_call: nn.Module, user_id: str | None = None, ipu_id: int | None = None
) -> nn.Module:
    """The module itself; PopTorch would use another device from it on."""
    if not isinstance(layer_to_call, nn.Module):
        raise InputError("BeginBlock takes a torch.nn.Module; for a function use BlockFunction")
    log_once("blocks", NO_BLOCKS)
    return layer_to_call


def BlockFunction(
    user_id: str | None = None, ipu_id: int | None = None
) -> Callable[[Function], Function]:
    """A decorator for a function that is a block; returns the function."""
    log_once("blocks", NO_BLOCKS)
    return lambda function: function


def addBlock(module: nn.Module, user_id: str | None = None, ipu_id: int | None = None) -> nn.Module:
    """The newer name of `BeginBlock`."""
    return BeginBlock(module, user_id, ipu_id)


def removeBlocks(module: nn.Module) -> nn.Module:
    """The module itself: there are no blocks to remove."""
    return module


class Stage:
    """Blocks that would run on one device."""

    def __init__(self, *block_ids: str) -> None:
        self._blocks = block_ids
        self._ipu: int | None = None

    @property
    def blocks(self) -> tuple[str, ...]:
        return self._blocks

    def ipu(self, ipu: int) -> Self:
        """Set the device."""
        self._ipu = ipu
        return self


class Phase:
    """Stages that would run at the same time."""

    def __init__(self, *arg: Any) -> None:
        self.stages = _as_stages(arg)

    def stage(self, idx: int) -> Stage:
        return self.stages[idx]

    def ipus(self, *ipus: int) -> Self:
        """Set the device of each stage."""
        for stage, ipu in zip(self.stages, ipus, strict=True):
            stage.ipu(ipu)
        return self


def _as_stages(items: Iterable[Any]) -> list[Stage]:
    return [item if isinstance(item, Stage) else Stage(item) for item in items]


class ShardedExecution:
    """One device at a time."""

    def __init__(self, *args: AutoStage | str | Stage) -> None:
        self._stages = _as_stages(item for item in args if not isinstance(item, AutoStage))

    def stage(self, block_id: str) -> Stage:
        """The stage of a block."""
        for stage in self._stages:
            if block_id in stage.blocks:
                return stage
        raise InputError(f"no stage has the block {block_id!r}")


class PipelinedExecution:
    """All devices at once, each on another micro batch."""

    stage = ShardedExecution.stage

    def __init__(self, *args: AutoStage | str | Stage) -> None:
        self._stages = _as_stages(item for item in args if not isinstance(item, AutoStage))


class SerialPhasedExecution:
    """One phase after the other, with weights loaded for each."""

    def __init__(self, *phases: Phase | list[Stage] | list[str]) -> None:
        self._phases = [phase if isinstance(phase, Phase) else Phase(*phase) for phase in phases]

    def phase(self, phase: int) -> Phase:
        return self._phases[phase]

    def stage(self, block_id: str) -> Stage:
        """The stage of a block."""
        for stage in (stage for phase in self._phases for stage in phase.stages):
            if block_id in stage.blocks:
                return stage
        raise InputError(f"no stage has the block {block_id!r}")

    def useSeparateBackwardPhase(self, use: bool = True) -> Self:
        return self

    def setTensorsLiveness(self, liveness: Liveness) -> Self:
        return self


class ParallelPhasedExecution:
    """Two groups of devices that alternate."""

    phase = SerialPhasedExecution.phase
    stage = SerialPhasedExecution.stage
    useSeparateBackwardPhase = SerialPhasedExecution.useSeparateBackwardPhase
    setTensorsLiveness = SerialPhasedExecution.setTensorsLiveness

    def __init__(self, *phases: Phase | list[Stage] | list[str]) -> None:
        self._phases = [phase if isinstance(phase, Phase) else Phase(*phase) for phase in phases]

    def sendBackwardPhase(self, phase: int) -> Self:
        return self
