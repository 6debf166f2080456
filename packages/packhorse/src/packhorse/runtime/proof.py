"""Proof on a given model and machine that the result for a sequence ignores its neighbors.

Every head goes through five checks on random packs: a changed neighbor leaves the output of a
sequence *bit-equal*; a neighbor full of NaN does too; a sequence alone and in a pack agree; the
kernel agrees with the reference; and, as a control, the first check must fail once attention may
cross the boundaries. The tests use it on small models, `packhorse prove` on the user's model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

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
from packhorse.runtime.invariant import SyntheticSequence as SyntheticSequence

Outputs = dict[str, list[np.ndarray]]  # by head, one array per sequence

# How far two computations of the same output may differ, relative to its largest value.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 6e-2,
    torch.float16: 1e-2,
    # A number that another kernel rounds differently may move to the next of 256 steps.
    torch.int8: 1e-1,
    torch.float8_e4m3fn: 2e-1,  # likewise, to the next of 8 steps of a binade
}
LONGEST = 512  # tokens of a synthetic sequence; most are far shorter
CONTROLS = 8  # packs, at least: in a single one the sequence may be alone in its row


@dataclass(frozen=True, slots=True)
class Proof:
    """One check of one head: the largest difference, and the largest that is allowed."""

    kernel: str
    dtype: str
    head: str
    check: str
    largest: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the difference is allowed; that of the control must not be."""
        return (self.largest <= self.allowed) != (self.check == "control")


def prove(
    model: Model,
    device: torch.device,
    kernels: Sequence[str],
    packs: int = 20,
    seed: int = 0,
    products: torch.dtype | None = None,
    scales: Mapping[str, float] = MappingProxyType({}),
    kept: Collection[str] = (),
) -> Iterator[Proof]:
    """Run all checks of all heads under each kernel, in the dtype of the model or of `products`.

    `scales` are for float8, see `float8_inference.calibrate`; layers that are `kept` stay floats.
    """
    backend = TorchBackend(model, device, products=products, kept=kept, scales=scales)
    floats = next(model.parameters()).dtype
    dtype = products or floats
    for name in kernels:
        choice = attention.pick(device, floats, name=name, **model.bert.config.needs)
        prover = Prover(backend, choice.kernel, packs, seed)
        for check, measure in CHECKS.items():
            allowed = TOLERANCE[dtype] if check in ("alone", "reference") else 0.0
            for head, largest in measure(prover).items():
                yield Proof(name, dtype_name(dtype), head, check, largest, allowed)


class Prover:
    """One backend under one kernel, and a supply of random packs."""

    def __init__(self, backend: TorchBackend, kernel: Kernel, packs: int, seed: int) -> None:
        self.backend = backend
        self.kernel = kernel
        self.packs = packs
        self.heads = ("hidden", *backend.model.heads)
        self.config = backend.model.bert.config
        self.random = np.random.default_rng(seed)
        self.capacity = LONGEST if kernel.serves.rows else 0

    def neighbor(self) -> dict[str, float]:
        """Change every token of every neighbor, keep the shapes."""
        return self._worst(self._changed_neighbors, self.kernel)

    def control(self) -> dict[str, float]:
        """Do the same with attention across boundaries, which that check must detect."""
        unbounded = _UnboundedKernel(self.kernel)
        return self._worst(self._changed_neighbors, unbounded, max(self.packs, CONTROLS))

    def poison(self) -> dict[str, float]:
        """Fill a neighbor with a token whose embedding is NaN."""
        return self._worst(self._poisoned_neighbors, self.kernel)

    def alone(self) -> dict[str, float]:
        """Compare a sequence alone and in a pack, relative to its largest value."""
        return self._worst(self._alone_and_packed, self.kernel)

    def reference(self) -> dict[str, float]:
        """Compare with the reference kernel, relative to the largest value."""
        return self._worst(self._both_kernels, self.kernel)

    def _worst(
        self,
        compare: Callable[[list[SyntheticSequence], int, Kernel], dict[str, float]],
        kernel: Kernel,
        packs: int = 0,
    ) -> dict[str, float]:
        """Return the largest difference of each head over `packs` packs, by default all."""
        worst = dict.fromkeys(self.heads, 0.0)
        for _ in range(packs or self.packs):
            pack = self._pack()
            target = int(self.random.integers(len(pack)))
            for head, difference in compare(pack, target, kernel).items():
                worst[head] = max(worst[head], difference)
        return worst

    def _changed_neighbors(
        self, pack: list[SyntheticSequence], target: int, kernel: Kernel
    ) -> dict[str, float]:
        changed = [s if i == target else self._sequence(len(s.ids)) for i, s in enumerate(pack)]
        return _difference(self._run(pack, kernel), self._run(changed, kernel), target)

    def _poisoned_neighbors(
        self, pack: list[SyntheticSequence], target: int, kernel: Kernel
    ) -> dict[str, float]:
        victim = (target + 1) % len(pack)
        with self._nan_token() as token:
            poisoned = list(pack)
            poisoned[victim] = SyntheticSequence(
                np.full_like(pack[victim].ids, token), pack[victim].types
            )
            after = self._run(poisoned, kernel)
        if np.isfinite(after["hidden"][victim]).any():
            # NaN did not even reach the poisoned sequence: the check itself does not work.
            return dict.fromkeys(self.heads, np.inf)
        return _difference(self._run(pack, kernel), after, target)

    def _alone_and_packed(
        self, pack: list[SyntheticSequence], target: int, kernel: Kernel
    ) -> dict[str, float]:
        alone = self._run([pack[target]], kernel)
        packed = self._run(pack, kernel)
        in_pack = {head: [rows[target]] for head, rows in packed.items()}
        return _difference(in_pack, alone, 0, relative=True)

    def _both_kernels(
        self, pack: list[SyntheticSequence], target: int, kernel: Kernel
    ) -> dict[str, float]:
        outputs = self._run(pack, kernel)
        expected = self._run(pack, attention.kernel("reference"))
        return _difference(outputs, expected, target, relative=True)

    def _run(self, pack: list[SyntheticSequence], kernel: Kernel) -> Outputs:
        self.backend.model.bert.use(kernel)
        packed = batches.lay(pack, self.capacity)
        outputs = self.backend(packed, self.heads)
        return {head: _rows(x, packed) for head, x in zip(self.heads, outputs, strict=True)}

    def _pack(self) -> list[SyntheticSequence]:
        """Draw two to eight sequences, short ones as likely as long ones."""
        longest = min(LONGEST, self.config.max_positions)
        count = self.random.integers(2, 9)
        return [self._sequence(int(longest ** self.random.random())) for _ in range(count)]

    def _sequence(self, length: int) -> SyntheticSequence:
        ids = self.random.integers(0, self.config.vocab_size - 1, length)
        return SyntheticSequence(
            ids, self.random.integers(0, max(1, self.config.type_vocab_size), length)
        )

    @contextmanager
    def _nan_token(self) -> Generator[int]:
        """Embed the vocabulary's last token as NaN; no synthetic sequence contains it."""
        token = self.config.vocab_size - 1

        def spoil(module: nn.Module, inputs: tuple[Packed], out: Tensor) -> Tensor:
            return out.masked_fill((inputs[0].ids == token).unsqueeze(-1), float("nan"))

        hook = self.backend.model.bert.embed.register_forward_hook(spoil)
        try:
            yield token
        finally:
            hook.remove()


# Values in `packhorse prove --json`, whose spelling stays as it was.
CHECKS: dict[str, Callable[[Prover], dict[str, float]]] = {
    "neighbour": Prover.neighbor,
    "poison": Prover.poison,
    "alone": Prover.alone,
    "reference": Prover.reference,
    "control": Prover.control,
}


class _UnboundedKernel:
    """A kernel that takes the whole batch for one sequence: isolation broken on purpose."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.serves = kernel.serves

    def plan(self, packed: Packed, *args: Any, **kwargs: Any) -> Any:
        """Plan as if there were no boundaries."""
        bounds = packed.cu_seqlens[[0, -1]].contiguous()
        whole = replace(packed, cu_seqlens=bounds, max_seqlen=len(packed.ids))
        return self.kernel.plan(whole, *args, **kwargs)

    def __call__(self, qkv: Tensor, plan: Any, *positions: Any) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        return self.kernel(qkv, plan, *positions)


def _rows(output: Tensor, packed: Packed) -> list[np.ndarray]:
    per_token = len(output) == len(packed.ids)
    rows = packed.split(output) if per_token else packed.pick(output)
    return [row.double().cpu().numpy() for row in rows]


def _difference(a: Outputs, b: Outputs, target: int, relative: bool = False) -> dict[str, float]:
    """Return per head the largest difference in sequence `target`; NaN counts as infinite."""
    differences: dict[str, float] = {}
    for head in a:
        scale = max(1.0, float(np.abs(b[head][target]).max())) if relative else 1.0
        largest = float(np.abs(a[head][target] - b[head][target]).max()) / scale
        differences[head] = np.inf if np.isnan(largest) else largest
    return differences
