"""PopTorch's functions for use within a model: what they compute, without what they arrange.

Some arrange where and how an IPU computes (`set_available_memory`, `recomputationCheckpoint`): the
value is the argument. The others are written in PyTorch, so that autograd knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from packhorse.errors import InputError
from packhorse_port.losses import speak
from packhorse_port.notices import say_once

AT_ONCE = "the matrix product is made in one piece"


def nop(tensor: Tensor) -> Tensor:
    """The tensor."""
    return tensor


def recomputationCheckpoint(*tensors: Any) -> Any:
    """What was given: activations are kept, not computed again."""
    say_once("recomputationCheckpoint", "recomputationCheckpoint has no effect: activations stay")
    return tensors[0] if len(tensors) == 1 else tensors


def set_available_memory(tensor: Tensor, available_memory_proportion: float) -> Tensor:
    """The tensor: memory is not divided into tiles here."""
    return tensor


def set_overlap_for_input(input_tensors: Any, mode: Any) -> Any:
    return input_tensors


def set_overlap_for_output(output_tensors: Any, mode: Any) -> Any:
    return output_tensors


def serializedMatMul(
    lhs: Tensor, rhs: Tensor, mode: Any, factor: int = 0, keep_precision: bool = False
) -> Tensor:
    """lhs @ rhs."""
    say_once("serializedMatMul", f"serializedMatMul: {AT_ONCE}")
    return torch.matmul(lhs, rhs)


def ipu_print_tensor(
    tensor: Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    **_: Any,
) -> Tensor:
    """Log the tensor now, and its gradient when it is known; the tensor."""
    speak()
    show(tensor, title or "tensor", summarise_threshold)
    if print_gradient and tensor.requires_grad:
        name = f"Gradient___{title or 'tensor'}"
        tensor.register_hook(lambda gradient: show(gradient, name, summarise_threshold))
    return tensor


def show(tensor: Tensor, title: str, threshold: int) -> None:
    """One value, on stderr as PopTorch does, whatever level is logged."""
    import sys

    with torch.no_grad():
        text = torch.Tensor.__repr__(tensor.detach().cpu())
    shown = text if tensor.numel() <= threshold else f"{text} ({tuple(tensor.shape)})"
    sys.stderr.write(f"{title}: {shown}\n")


def for_loop(count: int, body: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """`inputs = body(*inputs)`, so many times."""
    if not isinstance(inputs, list | tuple) or not all(isinstance(x, Tensor) for x in inputs):
        raise InputError("for_loop(count, body, inputs): inputs is a list of tensors")
    values = list(inputs)
    for _ in range(count):
        made = body(*values)
        values = [made] if isinstance(made, Tensor) else list(made)
        if len(values) != len(inputs):
            raise InputError(
                f"for_loop: body took {len(inputs)} tensors and returned {len(values)};"
                " it must return as many as it takes"
            )
    return values


def dynamic_slice(tensor: Tensor, dim: int, start: Tensor, size: int, step: int = 1) -> Tensor:
    """`size` places of a dimension from `start` on, which is a tensor."""
    return tensor.index_select(dim, _places(start, size, step))


def dynamic_update(input: Tensor, src: Tensor, dim: int, start: Tensor, size: int) -> Tensor:
    """`input` with those places replaced by `src`'s."""
    return input.index_copy(dim, _places(start, size, 1), src)


def _places(start: Tensor, size: int, step: int) -> Tensor:
    return start.reshape(()).long() + torch.arange(0, size, step, device=start.device)


def ctc_beam_search_decoder(
    probs: Tensor, lengths: Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [N, top], lengths [N, top] and paths [N, top, T] of log probabilities [T, N, C]."""
    found = [
        _beams(probs[: int(length), n].detach().cpu(), blank, beam_width)[:top_paths]
        for n, length in enumerate(lengths)
    ]
    longest, many = probs.shape[0], len(found)
    scores = torch.full((many, top_paths), float("-inf"))
    sizes = torch.zeros(many, top_paths, dtype=torch.int32)
    paths = torch.zeros(many, top_paths, longest, dtype=torch.int32)
    for n, beams in enumerate(found):
        for place, (path, score) in enumerate(beams):
            scores[n, place], sizes[n, place] = score, len(path)
            paths[n, place, : len(path)] = torch.tensor(path, dtype=torch.int32)
    return scores, sizes, paths


def _beams(probs: Tensor, blank: int, width: int) -> list[tuple[tuple[int, ...], float]]:
    """Prefix beam search: each prefix with how likely it ends in a blank, and in its last label."""
    never = float("-inf")
    beams = {(): (0.0, never)}
    for row in probs.tolist():
        fresh: dict[tuple[int, ...], tuple[float, float]] = {}

        def add(path: tuple[int, ...], blank_score: float, label_score: float, into: Any) -> None:
            have = into.get(path, (never, never))
            into[path] = (_logadd(have[0], blank_score), _logadd(have[1], label_score))

        for path, (ends_blank, ends_label) in beams.items():
            both = _logadd(ends_blank, ends_label)
            add(path, both + row[blank], never, fresh)
            for label, score in enumerate(row):
                if label == blank:
                    continue
                if path and path[-1] == label:
                    add(path, never, ends_label + score, fresh)
                    add((*path, label), never, ends_blank + score, fresh)
                else:
                    add((*path, label), never, both + score, fresh)
        ranked = sorted(fresh.items(), key=lambda one: -_logadd(*one[1]))
        beams = dict(ranked[:width])
    return [(path, _logadd(*scores)) for path, scores in beams.items()]


def _logadd(a: float, b: float) -> float:
    import math

    low, high = sorted((a, b))
    return high if low == float("-inf") else high + math.log1p(math.exp(low - high))


class CPU:
    """A function that PopTorch would run on the host; it is called where it stands."""

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
    """A scope that would give operations an attribute."""

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
