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
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from packhorse_port.enums import AutoStage, Liveness, MultiConvPlanType
from packhorse_port.losses import report_side_effect
from packhorse_port.notices import UsageError, line_prefix, log_once
from packhorse_port.settings import check_member

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
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> Tensor:
    """Print the tensor, and its gradient when it is computed; returns the tensor.

    summarise_threshold: with more elements, only `edge_items` at either end of a dimension.
    float_format: "auto" or "fixed" for `digits` digits, "scientific" for an exponent.
    """
    report_side_effect()
    layout = PrintLayout(
        summarise_threshold,
        edge_items,
        max_line_width,
        digits,
        float_format,
        separator,
        (open_bracket, close_bracket),
    )
    layout.print(title or "tensor", tensor)
    if print_gradient and tensor.requires_grad:
        tensor.register_hook(lambda gradient: layout.print(f"Gradient___{title}", gradient))
    return tensor


class PrintLayout(NamedTuple):
    """How `ipu_print_tensor` writes a tensor: the arguments of the same names."""

    threshold: int
    edge_items: int
    width: int
    digits: int
    float_format: str
    separator: str
    brackets: tuple[str, str]

    def print(self, title: str, tensor: Tensor) -> None:
        """Write to stderr, as PopTorch does at any log level."""
        tensor = tensor.detach().cpu()
        sys.stderr.write(f"{title}: {self._text(tensor, 0, tensor.numel() > self.threshold)}\n")

    def _text(self, tensor: Tensor, depth: int, summarized: bool) -> str:
        if tensor.dim() == 0:
            return self._number(tensor.item())
        begin, end = self.brackets
        items = list(tensor)
        shortened = summarized and len(items) > 2 * self.edge_items
        if shortened:
            items = items[: self.edge_items] + items[-self.edge_items :]
        texts = [self._text(item, depth + 1, summarized) for item in items]
        if shortened:
            texts.insert(self.edge_items, "...")
        indent = " " * (depth + 1)
        if tensor.dim() > 1:
            rows = "\n".join(indent + text for text in texts)
            return f"{begin}\n{rows}\n{' ' * depth}{end}"
        return begin + self._wrapped(texts, indent) + end

    def _wrapped(self, texts: list[str], indent: str) -> str:
        """The numbers of a row, on several lines if they are wider than the limit."""
        lines = [""]
        for position, text in enumerate(texts):
            last = position == len(texts) - 1
            text = text if last else text + self.separator
            if lines[-1] and len(lines[-1]) + len(text) > self.width:
                lines[-1] = lines[-1].rstrip()
                lines.append("")
            lines[-1] += text
        return f"\n{indent} ".join(lines)

    def _number(self, value: Any) -> str:
        if not isinstance(value, float):
            return str(value)
        decimals = max(self.digits - 1, 0)
        if self.float_format == "scientific":
            return f"{value:.{decimals}e}"
        return f"{value:.{max(decimals - _exponent(value), 0)}f}"


def _exponent(value: float) -> int:
    """The power of ten of a number; 0 for 0, an infinity or NaN."""
    return math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0


def for_loop(count: int, body: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """Repeat `inputs = body(*inputs)` `count` times; the caller's tensors are not changed."""
    values = _copies("for_loop", "inputs", inputs)
    for _ in range(count):
        values = _as_list(body(*values))
        if len(values) != len(inputs):
            raise UsageError(
                f"for_loop: body took {len(inputs)} tensors and returned {len(values)};"
                " it must return as many as it takes"
            )
    return values


def cond(
    condition: Tensor,
    then_body: Callable[..., Any],
    then_inps: list[Tensor],
    else_body: Callable[..., Any],
    else_inps: list[Tensor],
) -> list[Tensor]:
    """The outputs of `then_body` or of `else_body`; the caller's tensors are not changed."""
    then_copies = _copies("cond", "then_inps", then_inps)
    else_copies = _copies("cond", "else_inps", else_inps)
    return _as_list(then_body(*then_copies) if condition else else_body(*else_copies))


def _copies(function: str, name: str, tensors: Any) -> list[Tensor]:
    """Copies of a list of tensors, because a body may change them in place."""
    expects = f"{line_prefix()}{function} expects {name} to be a list of tensors"
    if not isinstance(tensors, list):
        raise UsageError(f"{expects}. (Object is not list)")
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise UsageError(
                f"{expects}. (Object contained in list at index {index} is not torch.tensor)"
            )
    return [tensor.clone() for tensor in tensors]


def _as_list(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def dynamic_slice(tensor: Tensor, dim: int, start: Tensor, size: int, step: int = 1) -> Tensor:
    """A slice of `size` along `dim`, from an index that is a tensor."""
    return tensor.index_select(dim, _slice_indices(start, size, step))


def dynamic_update(input: Tensor, src: Tensor, dim: int, start: Tensor, size: int) -> Tensor:
    """`input` with the slice of `size` at `start` replaced by `src`."""
    if input.dim() != src.dim():
        raise UsageError(
            f"{line_prefix()}dynamic_update: input and src tensors must have same dimensionality."
            f" ({input.dim()}) vs ({src.dim()})"
        )
    if input.dtype != src.dtype:
        raise UsageError(
            f"{line_prefix()}dynamic_update: input and src tensor must have same dtype."
            f" ({input.dtype} vs {src.dtype})"
        )
    return input.index_copy(dim, _slice_indices(start, size, 1), src)


def _slice_indices(start: Tensor, size: int, step: int) -> Tensor:
    if size == 0:
        raise UsageError(f"{line_prefix()}The start and end of a slice must be different.")
    if size < 0:
        raise UsageError(
            f"{line_prefix()}Taking a slice of a tensor with the end less than the start is not"
            " supported."
        )
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
    """A scope whose convolutions would run side by side; its settings have no effect."""

    _active: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__("multiconv")

    def __enter__(self) -> MultiConv:
        if MultiConv._active:
            raise UsageError(f"{line_prefix()}Nested poptorch.MultiConv is not supported")
        MultiConv._active = True
        return self

    def __exit__(self, *_: object) -> None:
        MultiConv._active = False

    def availableMemoryProportions(self, value: Any) -> MultiConv:
        return self

    def partialsTypes(self, value: Any) -> MultiConv:
        values = value if isinstance(value, list | tuple) else [value]
        if not all(item in (torch.float32, torch.float16) for item in values):
            raise UsageError(
                f"{line_prefix()}Invalid partials types {value!r}: torch.float or torch.half"
            )
        return self

    def planType(self, value: Any) -> MultiConv:
        if value is not None:
            check_member("Invalid plan type: planType", value, MultiConvPlanType)
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


BLOCK = "_begin_block"  # the attribute of a module in which a block begins: (user_id, ipu_id)


def BeginBlock(
    layer_to_call: Any, user_id: str | None = None, ipu_id: int | None = None
) -> nn.Module:
    """The module itself; PopTorch would use another device from it on."""
    log_once("blocks", NO_BLOCKS)
    if not isinstance(layer_to_call, nn.Module):
        if not callable(layer_to_call):
            raise UsageError(f"{line_prefix()}BeginBlock takes a torch.nn.Module or a function")
        return FunctionBlock(layer_to_call, user_id, ipu_id)
    if BLOCK in vars(layer_to_call):
        raise UsageError(f"{line_prefix()}this module has already been assigned to a block")
    layer_to_call.__dict__[BLOCK] = (user_id, ipu_id)
    return layer_to_call


class FunctionBlock(nn.Module):
    """A function with which a block begins."""

    def __init__(
        self, function: Callable[..., Any], user_id: str | None, ipu_id: int | None
    ) -> None:
        super().__init__()
        self._function = function
        self._user_id = user_id
        self._ipu_id = ipu_id

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def module_repr(m: nn.Module) -> str:
    """A module as text, as `repr` writes it, with the blocks that begin in it."""
    extra = m.extra_repr()
    children = [
        f"({name}): {module_repr(child)}".replace("\n", "\n  ")
        for name, child in m.named_children()
    ]
    lines = [*extra.split("\n"), *children] if extra else children
    inside = extra if lines == [extra] else "".join(f"\n  {line}" for line in lines) + "\n"
    user_id, ipu_id = vars(m).get(BLOCK, (None, None))
    block = f"BeginBlock(user_id={user_id}, ipu_id={ipu_id}) " if BLOCK in vars(m) else ""
    return f"{block}{m._get_name()}({inside if lines else ''})"


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
    """The module, without the blocks that began in it."""
    for inner in module.modules():
        inner.__dict__.pop(BLOCK, None)
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
        blocks = arg and all(isinstance(item, str) for item in arg)
        self.stages = [Stage(*arg)] if blocks else _as_stages(arg)  # names are one stage's blocks

    def stage(self, idx: int) -> Stage:
        return self.stages[idx]

    def ipus(self, *ipus: int) -> Self:
        """Set the device of each stage."""
        for stage, ipu in zip(self.stages, ipus, strict=True):
            stage.ipu(ipu)
        return self


def _as_stages(items: Iterable[Any]) -> list[Stage]:
    """Stages of stages, names of blocks, and lists of names."""
    return [
        item if isinstance(item, Stage) else Stage(item) if isinstance(item, str) else Stage(*item)
        for item in items
    ]


def _as_phase(phase: Phase | list[Any] | Stage | str) -> Phase:
    if isinstance(phase, Phase):
        return phase
    return Phase(*phase) if isinstance(phase, list) else Phase(phase)


class ShardedExecution:
    """One device at a time."""

    def __init__(self, *args: AutoStage | str | Stage) -> None:
        self._stages = _as_stages(item for item in args if not isinstance(item, AutoStage))

    def stage(self, block_id: str) -> Stage:
        """The stage of a block."""
        for stage in self._stages:
            if block_id in stage.blocks:
                return stage
        raise UsageError(f"no stage has the block {block_id!r}")


class PipelinedExecution:
    """All devices at once, each on another micro batch."""

    stage = ShardedExecution.stage

    def __init__(self, *args: AutoStage | str | Stage) -> None:
        self._stages = _as_stages(item for item in args if not isinstance(item, AutoStage))


class SerialPhasedExecution:
    """One phase after the other, with weights loaded for each."""

    def __init__(self, *phases: Phase | list[Stage] | list[str]) -> None:
        self._phases = [_as_phase(phase) for phase in phases]

    def phase(self, phase: int) -> Phase:
        return self._phases[phase]

    def stage(self, block_id: str) -> Stage:
        """The stage of a block."""
        for stage in (stage for phase in self._phases for stage in phase.stages):
            if block_id in stage.blocks:
                return stage
        raise UsageError(f"no stage has the block {block_id!r}")

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
        self._phases = [_as_phase(phase) for phase in phases]

    def sendBackwardPhase(self, phase: int) -> Self:
        return self
