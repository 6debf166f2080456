"""LAMB (You et al. 2019, arXiv 1904.00962): Adam with a step that is scaled per tensor.

    m ← β₁m + (1 − β₁)g        v ← β₂v + (1 − β₂)g²
    d = m̂ / (√v̂ + ε) + λw     the direction, which includes weight decay; hats: bias correction
    w ← w − η · ‖w‖/‖d‖ · d    the trust ratio: each tensor moves by η of its own norm

The order is that of the paper and of MLPerf's reference, which has no bias correction
(`bias_correction=False`) and gives biases and normalizations ratio 1 and no decay
(`parameter_groups`). The ratio is also 1 if a tensor or its direction is zero. Clipping the
gradient's norm over all tensors is left to the training loop. The ratio needs whole tensors: shard
the optimizer by parameter (ZeRO-1), not within one.

A parameter may hold several of the paper's tensors, concatenated, as our model stores query, key
and value. Its group then says how many (`stacked`), and each of them has its own ratio, as if it
were stored separately. This concerns only norms and ratios; everything else is elementwise.

`update_one` is the reference, for one tensor. `update_together` does the same for many at once:
torch's fused Adam, applied to λw instead of the weights with a learning rate of −1, leaves exactly
d there, so that m, v and g are read once. That is 14 passes over the tensors' memory, where
`_foreach` calls need 23. Norms and ratios stay on the device; the host never waits for it. On CUDA,
large tensors are updated one by one by `lamb_kernels`, in ten.

A step that is recorded as a CUDA graph replays fixed arguments. For such a step the caller keeps
what changes in tensors on the device: the learning rate in `lr`, and the number of the step in the
group option `age`, which is absent otherwise.

m and v (and `master`, if enabled) are fp32 for half-precision parameters, fp64 for fp64.
"""

# torch leaves some of its functions untyped (from_numpy, tolist, split …).
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# Its functions over lists of tensors, which its own optimizers use, have private names only.
# pyright: reportPrivateUsage=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packhorse.device import current, runs_triton
from packhorse.errors import InputError

FUSED = ("cpu", "cuda", "xpu", "mps")  # where torch has a fused Adam
# Tensors are updated together up to this many elements: on a CPU to stay in the cache, elsewhere to
# bound the memory that the directions take.
TOGETHER_ON_CPU = 1 << 20
TOGETHER = 1 << 26
LARGE = 1 << 18  # elements from which on CUDA kernels of our own take less time than their launch
STEP_WITHOUT_CORRECTION = 1e30  # at this step βᵗ is 0, and bias correction divides by 1

Group = dict[str, Any]


class LAMB(torch.optim.Optimizer):
    """The optimizer; every option may differ between parameter groups, and change between steps.

    adapt: scale by the trust ratio. clamp: (minimum, maximum) of that ratio. max_weight_norm: an
    upper limit for ‖w‖ in the ratio, the paper's φ. master_weights: keep an fp32 copy of
    half-precision parameters, so that small steps add up instead of being rounded away; it is made
    at the first step, so load weights before. stacked: number of tensors of equal size that each
    parameter holds along its first dimension. foreach: update many tensors at once.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        adapt: bool = True,
        clamp: tuple[float, float] | None = None,
        max_weight_norm: float | None = None,
        master_weights: bool = False,
        stacked: int = 1,
        foreach: bool = True,
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "adapt": adapt,
            "clamp": clamp,
            "max_weight_norm": max_weight_norm,
            "master_weights": master_weights,
            "stacked": stacked,
            "foreach": foreach,
        }
        super().__init__(params, options)

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group; options that it does not set have the optimizer's defaults."""
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except InputError:
            del self.param_groups[-1]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for groups in _same_options(self.param_groups):
            learning = [
                (parameter, self._state(parameter, group), group["stacked"])
                for group in groups
                for parameter in group["params"]
                if parameter.grad is not None and parameter.numel()
            ]
            # One call for all counters: separate additions took a tenth of the host's time.
            if learning:
                torch._foreach_add_([state["step"] for _, state, _ in learning], 1)
            updates = [
                ParameterUpdate.of(parameter, state, stacked)
                for parameter, state, stacked in learning
            ]
            others = [update for update in updates if not _update_large(update, groups[0])]
            for batch, fused in _batches(others, groups[0]["foreach"]):
                _update(batch, fused, groups[0])
        return loss

    def _state(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        """The parameter's moments, step count and master weights, created before its first step."""
        if parameter.grad is None or parameter.grad.is_sparse:
            raise InputError("LAMB needs dense gradients; build the embedding with sparse=False")
        state = self.state[parameter]
        if "m" not in state:
            state["step"] = torch.zeros((), dtype=torch.int64)  # on the CPU: reading it is free
            for name in ("m", "v"):
                state[name] = torch.zeros(
                    parameter.shape, dtype=state_dtype(parameter), device=parameter.device
                )
        if group["master_weights"] and "master" not in state:
            dtype = state_dtype(parameter)
            if parameter.dtype != dtype:
                copy = parameter.detach().to(dtype, memory_format=torch.contiguous_format)
                state["master"] = copy
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Restore a `state_dict()` bit by bit; the tensors are copied.

        torch would round fp32 state to the parameters' dtype, and share memory with the dictionary.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        pairs = zip(parameters, numbers, strict=False)  # torch checks the lengths below
        placed = {
            parameter: _placed(parameter, state_dict["state"][number], f"parameter {number}")
            for parameter, number in pairs
            if number in state_dict["state"]
        }
        super().load_state_dict(dict(state_dict))
        for group in self.param_groups:
            group.setdefault("stacked", 1)  # older files do not have this option
        self.state.update(placed)


class ParameterUpdate(NamedTuple):
    """A parameter with all that its update needs; `weight` is the parameter or its master copy."""

    parameter: Tensor
    weight: Tensor
    gradient: Tensor
    m: Tensor
    v: Tensor
    step: int
    stacked: int  # tensors that the parameter holds along its first dimension

    @classmethod
    def of(cls, parameter: Tensor, state: dict[str, Tensor], stacked: int) -> ParameterUpdate:
        """The update of a parameter that has a gradient."""
        if parameter.grad is None:
            raise InputError("LAMB cannot update a parameter that has no gradient")
        return cls(
            parameter=parameter,
            weight=state.get("master", parameter),
            gradient=parameter.grad,
            m=state["m"],
            v=state["v"],
            step=int(state["step"]),
            stacked=stacked,
        )

    @property
    def can_be_fused(self) -> bool:
        """Can a fused kernel update it? These walk memory, so all tensors need the same layout."""
        return (
            self.gradient.is_contiguous()
            and self.parameter.is_contiguous()
            and self.m.is_contiguous()
            and (self.weight is self.parameter or self.weight.is_contiguous())
            and self.parameter.device.type in FUSED
        )


def _update_large(update: ParameterUpdate, group: Group) -> bool:
    """Update a large tensor on CUDA by kernels of its own; False if they do not serve it.

    They take rates from the host, so steps that are recorded go without them.
    """
    serves = (
        (update.parameter.device.type == "cuda" and update.m.numel() >= LARGE)
        and (group["foreach"] and group["adapt"] and update.can_be_fused)
        and update.weight.dtype == update.m.dtype == torch.float32
        and not isinstance(group["lr"], Tensor)
        and runs_triton(update.parameter.device)
    )
    if serves:
        kernels = import_module("packhorse.optim.lamb_kernels")
        tensors = (update.parameter, update.weight, update.gradient, update.m, update.v)
        with current(update.parameter.device):
            kernels.update(*tensors, update.stacked, update.step, group)
    return serves


def _same_options(groups: list[Group]) -> Iterator[list[Group]]:
    """Groups that differ in nothing but their parameters and how these are stacked."""
    remaining = list(groups)
    while remaining:
        first = remaining[0]
        same: list[Group] = []
        different: list[Group] = []
        for group in remaining:
            matches = group is first or _have_equal_options(first, group)
            (same if matches else different).append(group)
        remaining = different
        yield same


def _have_equal_options(a: Group, b: Group) -> bool:
    if a.keys() != b.keys():
        return False
    return all(
        a[name] is b[name]
        # A tensor (the learning rate of a recorded step) is equal only to itself: comparing
        # values would wait for the device.
        or (not isinstance(a[name], Tensor) and a[name] == b[name])
        for name in a.keys() - {"params", "stacked"}
    )


def _batches(
    updates: list[ParameterUpdate], foreach: bool
) -> Iterator[tuple[list[ParameterUpdate], bool]]:
    """Updates that one fused call can do, with True; every other one alone, with False."""
    by_kind: dict[tuple[Any, ...], list[ParameterUpdate]] = {}
    for update in updates:
        if foreach and update.can_be_fused:
            kind = (update.parameter.device, update.parameter.dtype, update.step)
            by_kind.setdefault(kind, []).append(update)
        else:
            yield [update], False
    for same_kind in by_kind.values():
        yield from ((part, True) for part in _split_by_size(same_kind))


def _split_by_size(updates: list[ParameterUpdate]) -> Iterator[list[ParameterUpdate]]:
    """Consecutive parts of at most `TOGETHER` elements; a larger parameter is a part of its own."""
    on_cpu = updates[0].parameter.device.type == "cpu"
    limit = TOGETHER_ON_CPU if on_cpu else TOGETHER
    begin = 0
    size = 0
    for index, update in enumerate(updates):
        if size and size + update.m.numel() > limit:
            yield updates[begin:index]
            begin = index
            size = 0
        size += update.m.numel()
    yield updates[begin:]


def _update(updates: list[ParameterUpdate], fused: bool, group: Group) -> None:
    """Update parameters of one dtype, device, step and set of options."""
    dtype = updates[0].m.dtype
    step = updates[0].step
    parameters = [update.parameter for update in updates]
    weights = _converted([update.weight for update in updates], dtype)
    gradients = _converted([update.gradient for update in updates], dtype)
    moments = ([update.m for update in updates], [update.v for update in updates])
    stacked = [update.stacked for update in updates]
    if fused:
        update_together(weights, gradients, *moments, stacked, step, group)
    else:
        for count, *tensors in zip(stacked, weights, gradients, *moments, strict=True):
            parts = [_unstacked([tensor], [count]) for tensor in tensors]
            for weight, gradient, m, v in zip(*parts, strict=True):
                update_one(weight, gradient, m, v, step, group)
    if weights[0] is not parameters[0]:
        torch._foreach_copy_(parameters, weights)


def _converted(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors in `dtype`, converted in few launches; unchanged if they have it already."""
    if all(tensor.dtype == dtype for tensor in tensors):
        return tensors
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def update_one(
    weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, step: int, group: Group
) -> None:
    """LAMB as in the formulas above, in place; the reference for `update_together`."""
    beta1, beta2 = group["betas"]
    step = group.get("age", step)  # a tensor, for a recorded step
    m.mul_(beta1).add_(gradient, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    corrected = group["bias_correction"]
    m_hat = m / (1 - beta1**step) if corrected else m
    v_hat = v / (1 - beta2**step) if corrected else v
    direction = m_hat / (v_hat.sqrt() + group["eps"]) + group["weight_decay"] * weight
    if group["adapt"]:
        weight_norm = torch.linalg.vector_norm(weight)
        direction_norm = torch.linalg.vector_norm(direction)
        direction *= trust_ratio(weight_norm, direction_norm, group)
    _move([weight], [direction], group["lr"])


def update_together(
    weights: list[Tensor],
    gradients: list[Tensor],
    m: list[Tensor],
    v: list[Tensor],
    stacked: list[int],
    step: int,
    group: Group,
) -> None:
    """`update_one` for many contiguous tensors of one dtype and device, some of them stacked."""
    age = _age(step, group, weights[0].device)
    # Adam with a learning rate of −1 adds m̂ / (√v̂ + ε) to λw, which gives d.
    directions = list(torch._foreach_mul(weights, group["weight_decay"]))
    torch._fused_adam_(
        directions,
        gradients,
        m,
        v,
        [],
        [age] * len(weights),
        lr=-1.0,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=0.0,
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
    if not group["adapt"]:
        _move(weights, directions, group["lr"])
        return
    weight_norms = torch.stack(torch._foreach_norm(_unstacked(weights, stacked)))
    direction_norms = torch.stack(torch._foreach_norm(_unstacked(directions, stacked)))
    ratios = trust_ratio(weight_norms, direction_norms, group)  # [all tensors, unstacked]
    rate = group["lr"]
    if isinstance(rate, Tensor):  # on the device, for a recorded step
        ratios = ratios * rate
        rate = 1.0
    weights = list(weights)  # the caller's list keeps its shapes
    single = ratios.unbind()
    columns = ratios[:, None].split(stacked)
    factors = []
    first = 0
    for index, count in enumerate(stacked):
        if count == 1:
            factors.append(single[first])
        else:  # the stacked tensors in one operation: [count, elements] times [count, 1]
            weights[index] = weights[index].view(count, -1)
            directions[index] = directions[index].view(count, -1)
            factors.append(columns[index])
        first += count
    torch._foreach_addcmul_(weights, directions, factors, value=-rate)


def _unstacked(tensors: list[Tensor], stacked: list[int]) -> list[Tensor]:
    """All tensors separately; those that are stacked in a parameter are views of it."""
    return [
        part
        for tensor, count in zip(tensors, stacked, strict=True)
        for part in (tensor.chunk(count) if count > 1 else (tensor,))
    ]


def _move(weights: list[Tensor], directions: list[Tensor], rate: float | Tensor) -> None:
    """Subtract rate × direction; the rate may be on the device, for a recorded step."""
    if isinstance(rate, Tensor):
        torch._foreach_mul_(directions, rate)
        torch._foreach_sub_(weights, directions)
    else:
        torch._foreach_add_(weights, directions, alpha=-rate)


def _age(step: int, group: Group, device: torch.device) -> Tensor:
    """The step for bias correction; it may be on the device, for a recorded step."""
    if not group["bias_correction"]:
        return torch.full((), STEP_WITHOUT_CORRECTION, dtype=torch.float32, device=device)
    age = group.get("age")
    return torch.full((), step, dtype=torch.float32, device=device) if age is None else age


def trust_ratio(weight_norm: Tensor, direction_norm: Tensor, group: Group) -> Tensor:
    """‖w‖/‖d‖ within its limits, for one tensor or a vector of them; 1 where a norm is zero."""
    limit = group["max_weight_norm"]
    limited_norm = weight_norm if limit is None else weight_norm.clamp(max=limit)
    ratio = limited_norm / direction_norm
    if group["clamp"] is not None:
        ratio = ratio.clamp(*group["clamp"])
    return torch.where((weight_norm > 0) & (direction_norm > 0), ratio, 1.0)


def load_slots(
    optimizer: LAMB,
    named_parameters: Iterable[tuple[str, Tensor]],
    slots: Mapping[str, Mapping[str, Tensor]],
    step: int,
) -> None:
    """Load a checkpoint's optimizer state and continue from `step`.

    `slots` has "m" and "v", each by parameter name and with the parameter's shape, as
    `checkpoint.read(path, slots=True)` returns them under this model's names. Strict: every
    parameter of the optimizer needs both, and no slot may remain unused.
    """
    own_parameters = {p for group in optimizer.param_groups for p in group["params"]}
    named = {name: parameter for name, parameter in named_parameters if parameter in own_parameters}
    for kind in ("m", "v"):
        if wrong := sorted(named.keys() ^ slots.get(kind, {}).keys()):
            raise InputError(
                f"optimizer state {kind!r} and parameters do not match: {', '.join(wrong[:3])}"
                f"{' …' if len(wrong) > 3 else ''} ({len(wrong)}) has only one of the two"
            )
    age = torch.tensor(step, dtype=torch.int64)
    placed = {
        parameter: _placed(
            parameter, {"step": age, "m": slots["m"][name], "v": slots["v"][name]}, name
        )
        for name, parameter in named.items()
    }
    optimizer.state.update(placed)


def state_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's state: fp64 for fp64, fp32 for everything else."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _placed(parameter: Tensor, state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """A copy of a parameter's state, on its device and in the dtype of its state."""
    if missing := [key for key in ("step", "m", "v") if key not in state]:
        raise InputError(
            f"the state of {name} has no {missing[0]!r}, so LAMB did not write it; start without it"
        )
    placed = {"step": state["step"].to("cpu", torch.int64, copy=True)}
    for key in ("m", "v", "master"):
        if key in state and state[key].shape != parameter.shape:
            shapes = f"{list(state[key].shape)}, the parameter {list(parameter.shape)}"
            raise InputError(f"{key!r} of {name} has shape {shapes}; use the model it belongs to")
        if key in state:
            dtype = state_dtype(parameter)
            placed[key] = state[key].to(parameter.device, dtype, copy=True).contiguous()
    return placed


def _check(group: Group) -> None:
    """Check a group's options and parameters, after the defaults are filled in."""
    rules = {
        "lr": group["lr"] >= 0,
        "betas": len(group["betas"]) == 2 and all(0 <= beta < 1 for beta in group["betas"]),
        "eps": group["eps"] > 0,  # with 0, a gradient that was always zero gives 0/0
        "weight_decay": group["weight_decay"] >= 0,
        "clamp": group["clamp"] is None or 0 <= group["clamp"][0] <= group["clamp"][1],
        "max_weight_norm": group["max_weight_norm"] is None or group["max_weight_norm"] > 0,
    }
    if wrong := [name for name, holds in rules.items() if not holds]:
        raise InputError(
            f"LAMB cannot use {wrong[0]}={group[wrong[0]]!r}: rates are not negative, eps is above "
            "0, betas are two numbers from 0 to below 1, a clamp is (minimum, maximum)"
        )
    if any(not parameter.is_floating_point() for parameter in group["params"]):
        raise InputError("LAMB trains only real floating-point parameters; leave the others out")
    count = group["stacked"]
    for parameter in group["params"] if count != 1 else ():
        if count < 1 or not parameter.ndim or parameter.shape[0] % count:
            raise InputError(
                f"stacked is {count!r}, and a parameter has shape {list(parameter.shape)}: it must "
                "be an integer of at least 1 that divides the first dimension"
            )
