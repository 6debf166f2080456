"""The invariant, checked on a given model and machine: a result does not depend on neighbours.

Every head is put through five checks on random packs: a changed neighbour leaves the own output
*bit-equal*; a neighbour full of NaN does too; a sequence alone and in a pack agree; the kernel
agrees with the reference; and, the control, once attention is let loose across the boundaries the
first check must fail. The tests use it on small models, `packhorse prove` on the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from packhorse import attention
from packhorse.attention import Kernel
from packhorse.device import dtype_name
from packhorse.model.model import Model
from packhorse.packing.batch import Packed
from packhorse.runtime import batches
from packhorse.runtime.backend import TorchBackend

Outputs = dict[str, list[np.ndarray]]  # head to one array a sequence

# How far two ways to compute the same may lie apart, relative to the output's largest value.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 6e-2,
    torch.float16: 1e-2,
}
LONGEST = 512  # tokens of a made-up sequence; most are far shorter
CONTROLS = 8  # packs, at least: in one alone a sequence may have its row for itself


class Made(NamedTuple):
    """A made-up sequence."""

    ids: np.ndarray
    types: np.ndarray


@dataclass(frozen=True, slots=True)
class Proof:
    """One check of one head: the largest difference found, and what was allowed."""

    kernel: str
    dtype: str
    head: str
    check: str
    largest: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Within bounds; the control must be out of them."""
        return (self.largest <= self.allowed) != (self.check == "control")


def prove(
    model: Model, device: torch.device, kernels: Sequence[str], packs: int = 20, seed: int = 0
) -> Iterator[Proof]:
    """Run all checks of all heads under each kernel; the dtype is the model's own."""
    dtype = next(model.parameters()).dtype
    backend = TorchBackend(model, device)
    for name in kernels:
        choice = attention.pick(device, dtype, name=name, **model.bert.config.needs)
        prover = Prover(backend, choice.kernel, packs, seed)
        for check, measure in CHECKS.items():
            allowed = TOLERANCE[dtype] if check in ("alone", "reference") else 0.0
            for head, largest in measure(prover).items():
                yield Proof(name, dtype_name(dtype), head, check, largest, allowed)


class Prover:
    """One backend under one kernel, and a supply of random packs."""

    def __init__(self, backend: TorchBackend, kernel: Kernel, packs: int, seed: int) -> None:
        self.backend, self.kernel, self.packs = backend, kernel, packs
        self.heads = ("hidden", *backend.model.heads)
        self.config = backend.model.bert.config
        self.random = np.random.default_rng(seed)
        self.capacity = LONGEST if kernel.serves.rows else 0

    def neighbour(self) -> dict[str, float]:
        """Change every token of every neighbour, keep the shapes."""
        return self._worst(self._changed_neighbours, self.kernel)

    def control(self) -> dict[str, float]:
        """The same with attention let loose: what the first check must be able to see."""
        loose = _Loose(self.kernel)
        return self._worst(self._changed_neighbours, loose, max(self.packs, CONTROLS))

    def poison(self) -> dict[str, float]:
        """Fill a neighbour with a word whose embedding is NaN."""
        return self._worst(self._poisoned_neighbours, self.kernel)

    def alone(self) -> dict[str, float]:
        """A sequence by itself against the same in a pack, relative to its largest value."""
        return self._worst(self._alone_and_packed, self.kernel)

    def reference(self) -> dict[str, float]:
        """The same packs under the reference kernel, relative to the largest value."""
        return self._worst(self._both_kernels, self.kernel)

    def _worst(
        self,
        compare: Callable[[list[Made], int, Kernel], dict[str, float]],
        kernel: Kernel,
        packs: int = 0,
    ) -> dict[str, float]:
        """The largest difference each head showed over all packs, or so many."""
        worst = dict.fromkeys(self.heads, 0.0)
        for _ in range(packs or self.packs):
            pack = self._pack()
            own = int(self.random.integers(len(pack)))
            for head, found in compare(pack, own, kernel).items():
                worst[head] = max(worst[head], found)
        return worst

    def _changed_neighbours(self, pack: list[Made], own: int, kernel: Kernel) -> dict[str, float]:
        changed = [s if i == own else self._sequence(len(s.ids)) for i, s in enumerate(pack)]
        return _difference(self._run(pack, kernel), self._run(changed, kernel), own)

    def _poisoned_neighbours(self, pack: list[Made], own: int, kernel: Kernel) -> dict[str, float]:
        victim = (own + 1) % len(pack)
        with self._nan_word() as word:
            poisoned = list(pack)
            poisoned[victim] = Made(np.full_like(pack[victim].ids, word), pack[victim].types)
            after = self._run(poisoned, kernel)
        if np.isfinite(after["hidden"][victim]).any():
            return dict.fromkeys(self.heads, np.inf)  # the poison did not even reach its victim
        return _difference(self._run(pack, kernel), after, own)

    def _alone_and_packed(self, pack: list[Made], own: int, kernel: Kernel) -> dict[str, float]:
        alone, packed = self._run([pack[own]], kernel), self._run(pack, kernel)
        return _difference({h: [rows[own]] for h, rows in packed.items()}, alone, 0, relative=True)

    def _both_kernels(self, pack: list[Made], own: int, kernel: Kernel) -> dict[str, float]:
        here, there = self._run(pack, kernel), self._run(pack, attention.kernel("reference"))
        return _difference(here, there, own, relative=True)

    def _run(self, pack: list[Made], kernel: Kernel) -> Outputs:
        self.backend.model.bert.use(kernel)
        packed = batches.lay(pack, self.capacity)
        found = self.backend(packed, self.heads)
        return {head: _rows(x, packed) for head, x in zip(self.heads, found, strict=True)}

    def _pack(self) -> list[Made]:
        """Two to eight sequences, short ones as likely as long ones."""
        longest = min(LONGEST, self.config.max_positions)
        count = self.random.integers(2, 9)
        return [self._sequence(int(longest ** self.random.random())) for _ in range(count)]

    def _sequence(self, length: int) -> Made:
        ids = self.random.integers(0, self.config.vocab_size - 1, length)
        return Made(ids, self.random.integers(0, max(1, self.config.type_vocab_size), length))

    @contextmanager
    def _nan_word(self) -> Iterator[int]:
        """The vocabulary's last word is embedded as NaN; no made-up sequence uses it otherwise."""
        word = self.config.vocab_size - 1

        def spoil(module: nn.Module, inputs: tuple[Packed], out: Tensor) -> Tensor:
            return out.masked_fill((inputs[0].ids == word).unsqueeze(-1), float("nan"))

        hook = self.backend.model.bert.embed.register_forward_hook(spoil)
        try:
            yield word
        finally:
            hook.remove()


CHECKS: dict[str, Callable[[Prover], dict[str, float]]] = {
    "neighbour": Prover.neighbour,
    "poison": Prover.poison,
    "alone": Prover.alone,
    "reference": Prover.reference,
    "control": Prover.control,
}


class _Loose:
    """A kernel told that the whole batch is one sequence: isolation broken on purpose."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.serves = kernel.serves

    def plan(self, packed: Packed, *how: Any, **named: Any) -> Any:
        """As if there were no boundaries."""
        bounds = packed.cu_seqlens[[0, -1]].contiguous()
        whole = replace(packed, cu_seqlens=bounds, max_seqlen=len(packed.ids))
        return self.kernel.plan(whole, *how, **named)

    def __call__(self, qkv: Tensor, plan: Any) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        return self.kernel(qkv, plan)


def _rows(found: Tensor, packed: Packed) -> list[np.ndarray]:
    per_token = len(found) == len(packed.ids)
    pieces = packed.split(found) if per_token else packed.pick(found)
    return [piece.double().cpu().numpy() for piece in pieces]


def _difference(a: Outputs, b: Outputs, own: int, relative: bool = False) -> dict[str, float]:
    """Per head the largest difference in sequence `own`; NaN counts as infinite."""
    found = {}
    for head in a:
        scale = max(1.0, float(np.abs(b[head][own]).max())) if relative else 1.0
        largest = float(np.abs(a[head][own] - b[head][own]).max()) / scale
        found[head] = np.inf if np.isnan(largest) else largest
    return found
