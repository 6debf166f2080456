"""LAMB (You et al. 2019, arXiv 1904.00962): Adam whose step is scaled tensor by tensor.

    m ← β₁m + (1 − β₁)g        v ← β₂v + (1 − β₂)g²
    d = m̂ / (√v̂ + ε) + λw     the direction, weight decay inside it; hats: corrected for the start
    w ← w − η · ‖w‖/‖d‖ · d    the trust ratio: each tensor moves by η of its own length

The order is the paper's and that of MLPerf's reference, which leaves the hats out
(`bias_correction=False`) and gives biases and normalisations ratio 1 and no decay
(`parameter_groups`). The ratio is also 1 where a tensor or its direction is zero. Clipping the
gradient's norm over all tensors is the training loop's work. The ratio needs whole tensors: shard
the optimizer by parameter (ZeRO-1), not within one.

A parameter may hold several of the paper's tensors end to end, as our model stores query, key and
value. Its group then says how many (`stacked`), and each of them has its own ratio, as it would if
it were stored by itself. Only the norms and the ratios know of that; all else is number by number.

`update_one` says this for one tensor. `update_together` does the same for many at once: torch's
fused Adam, pointed at λw instead of the weights with a rate of −1, leaves exactly d there, so that
m, v and g are read once. That is 14 passes over the tensors' memory where the same in `_foreach`
calls takes 23. Norms and ratios stay on the device; nothing waits for it.

m and v (and `master`, where asked for) are fp32 for half-precision parameters, fp64 for fp64.
"""
# pyright: reportPrivateImportUsage=false
# torch's own optimizers are built from these calls; they have no public names.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packhorse.errors import InputError

FUSED = ("cpu", "cuda", "xpu", "mps")  # where torch has a fused Adam
# Tensors are taken together up to this many elements: on a CPU for the cache, elsewhere to bound
# the memory of the directions.
TOGETHER_ON_CPU, TOGETHER = 1 << 20, 1 << 26
SETTLED = 1e30  # an age at which βᵗ is 0 and bias correction divides by 1

Group = dict[str, Any]


class LAMB(torch.optim.Optimizer):
    """Every option may differ between parameter groups, and change between steps.

    adapt: scale by the trust ratio. clamp: (least, most) for that ratio. max_weight_norm: ‖w‖
    counts as no more than this, the paper's φ. master_weights: keep half-precision parameters in
    fp32 beside themselves, so that small steps add up instead of being rounded away; made at the
    first step, so load weights before it. stacked: how many tensors of equal size each parameter
    holds along its first dimension. foreach: take many tensors at once.
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
        """A further group; what it does not say is as it was said for all."""
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
            # One call for all: adding 1 to each counter took a tenth of the host's time.
            if learning:
                torch._foreach_add_([state["step"] for _, state, _ in learning], 1)
            entries = [Entry.of(*each) for each in learning]
            for alike, fused in _alike(entries, groups[0]["foreach"]):
                _update(alike, fused, groups[0])
        return loss

    def _state(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        """The parameter's moments, age and master weights, made before its first step."""
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
        """Go on from `state_dict()`, to the bit; the tensors are copied.

        torch would round fp32 state to the parameters' dtype, and share memory with the dictionary.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        placed = {
            parameter: _placed(parameter, state_dict["state"][number], f"parameter {number}")
            for parameter, number in zip(parameters, numbers, strict=False)  # torch refuses next
            if number in state_dict["state"]
        }
        super().load_state_dict(dict(state_dict))
        for group in self.param_groups:
            group.setdefault("stacked", 1)  # written before there was this option
        self.state.update(placed)


class Entry(NamedTuple):
    """A parameter and what its update needs; `weight` is the parameter itself, or its master."""

    parameter: Tensor
    weight: Tensor
    gradient: Tensor
    m: Tensor
    v: Tensor
    step: int
    stacked: int  # tensors that the parameter holds along its first dimension

    @classmethod
    def of(cls, parameter: Tensor, state: dict[str, Tensor], stacked: int) -> Entry:
        """A parameter that has a gradient."""
        weight, gradient = state.get("master", parameter), parameter.grad
        if gradient is None:
            raise InputError("LAMB was given a parameter without a gradient")
        return cls(parameter, weight, gradient, state["m"], state["v"], int(state["step"]), stacked)

    @property
    def plain(self) -> bool:
        """Does a fused kernel serve it? They walk memory, so all must lie in the same order."""
        return (
            self.gradient.is_contiguous()
            and self.parameter.is_contiguous()
            and self.m.is_contiguous()
            and (self.weight is self.parameter or self.weight.is_contiguous())
            and self.parameter.device.type in FUSED
        )


def _same_options(groups: list[Group]) -> Iterator[list[Group]]:
    """Groups that differ in nothing but their parameters and how these are stacked."""
    left = list(groups)
    while left:
        first = left[0]
        alike = [group for group in left if group is first or _equal(first, group)]
        left = [group for group in left if all(group is not other for other in alike)]
        yield alike


def _equal(one: Group, other: Group) -> bool:
    if one.keys() != other.keys():
        return False
    return all(
        one[name] is other[name]
        # A tensor (the rate of a recorded step) is equal only to itself.
        or (not isinstance(one[name], Tensor) and one[name] == other[name])
        for name in one.keys() - {"params", "stacked"}
    )


def _alike(entries: list[Entry], foreach: bool) -> Iterator[tuple[list[Entry], bool]]:
    """Entries that one fused call can update, none too large, with True; each other one alone."""
    found: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        if foreach and entry.plain:
            kind = entry.parameter.device, entry.parameter.dtype, entry.step
            found.setdefault(kind, []).append(entry)
        else:
            yield [entry], False
    for same in found.values():
        yield from ((part, True) for part in _divided(same))


def _divided(entries: list[Entry]) -> Iterator[list[Entry]]:
    most = TOGETHER_ON_CPU if entries[0].parameter.device.type == "cpu" else TOGETHER
    begin = size = 0
    for at, entry in enumerate(entries):
        if size and size + entry.m.numel() > most:
            yield entries[begin:at]
            begin, size = at, 0
        size += entry.m.numel()
    yield entries[begin:]


def _update(entries: list[Entry], fused: bool, group: Group) -> None:
    dtype, parameters = entries[0].m.dtype, [entry.parameter for entry in entries]
    weights = _converted([entry.weight for entry in entries], dtype)
    gradients = _converted([entry.gradient for entry in entries], dtype)
    moments = [entry.m for entry in entries], [entry.v for entry in entries]
    stacked = [entry.stacked for entry in entries]
    if fused:
        update_together(weights, gradients, *moments, stacked, entries[0].step, group)
    else:
        for count, *tensors in zip(stacked, weights, gradients, *moments, strict=True):
            cut = [_unstacked([tensor], [count]) for tensor in tensors]
            for weight, gradient, m, v in zip(*cut, strict=True):
                update_one(weight, gradient, m, v, entries[0].step, group)
    if weights[0] is not parameters[0]:
        torch._foreach_copy_(parameters, weights)


def _converted(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors in another dtype, in few launches; themselves where they have it already."""
    if all(tensor.dtype == dtype for tensor in tensors):
        return tensors
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def update_one(
    weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, step: int, group: Group
) -> None:
    """LAMB as it is written down, in place; the reference for `update_together`."""
    (beta1, beta2), step = group["betas"], group.get("age", step)
    m.mul_(beta1).add_(gradient, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    corrected = group["bias_correction"]
    m_hat = m / (1 - beta1**step) if corrected else m
    v_hat = v / (1 - beta2**step) if corrected else v
    direction = m_hat / (v_hat.sqrt() + group["eps"]) + group["weight_decay"] * weight
    if group["adapt"]:
        norms = torch.linalg.vector_norm(weight), torch.linalg.vector_norm(direction)
        direction *= trust_ratio(*norms, group)
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
    lengths = torch.stack(torch._foreach_norm(_unstacked(weights, stacked)))
    steps = torch.stack(torch._foreach_norm(_unstacked(directions, stacked)))
    ratios = trust_ratio(lengths, steps, group)
    rate = group["lr"]
    if isinstance(rate, Tensor):  # on the device, for a recorded step
        ratios, rate = ratios * rate, 1.0
    weights = list(weights)  # the caller's list keeps its shapes
    single = ratios.unbind()
    columns = ratios[:, None].split(stacked)
    factors = []
    first = 0
    for at, count in enumerate(stacked):
        if count == 1:
            factors.append(single[first])
        else:  # one launch for all of them: [count, the rest] times [count, 1]
            weights[at] = weights[at].view(count, -1)
            directions[at] = directions[at].view(count, -1)
            factors.append(columns[at])
        first += count
    torch._foreach_addcmul_(weights, directions, factors, value=-rate)


def _unstacked(tensors: list[Tensor], stacked: list[int]) -> list[Tensor]:
    """All tensors one by one; those that are stacked in a parameter are views of it."""
    return [
        part
        for tensor, count in zip(tensors, stacked, strict=True)
        for part in (tensor.chunk(count) if count > 1 else (tensor,))
    ]


def _move(weights: list[Tensor], directions: list[Tensor], rate: float | Tensor) -> None:
    """Against the directions; the rate may lie on the device, for a recorded step."""
    if isinstance(rate, Tensor):
        torch._foreach_mul_(directions, rate)
        torch._foreach_sub_(weights, directions)
    else:
        torch._foreach_add_(weights, directions, alpha=-rate)


def _age(step: int, group: Group, device: torch.device) -> Tensor:
    """What bias correction is for; it may lie on the device, for a recorded step."""
    if not group["bias_correction"]:
        return torch.full((), SETTLED, dtype=torch.float32, device=device)
    held = group.get("age")
    return torch.full((), step, dtype=torch.float32, device=device) if held is None else held


def trust_ratio(weight_norm: Tensor, direction_norm: Tensor, group: Group) -> Tensor:
    """‖w‖/‖d‖ within its bounds, for one tensor or, stacked, for many; 1 where either is zero."""
    most = group["max_weight_norm"]
    counted = weight_norm if most is None else weight_norm.clamp(max=most)
    ratio = counted / direction_norm
    if group["clamp"] is not None:
        ratio = ratio.clamp(*group["clamp"])
    return torch.where((weight_norm > 0) & (direction_norm > 0), ratio, 1.0)


def load_slots(
    optimizer: LAMB,
    named_parameters: Iterable[tuple[str, Tensor]],
    slots: Mapping[str, Mapping[str, Tensor]],
    step: int,
) -> None:
    """Put a checkpoint's optimizer state in place and go on from `step`.

    `slots` has "m" and "v", each by parameter name and shaped as the parameter: what
    `checkpoint.read(path, slots=True)` finds, under this model's names. Strict: every parameter the
    optimizer has needs both, and no slot may be left over.
    """
    held = {p for group in optimizer.param_groups for p in group["params"]}
    named = {name: parameter for name, parameter in named_parameters if parameter in held}
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
    """fp64 for fp64, fp32 for all else."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _placed(parameter: Tensor, state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """A copy of a parameter's state, where and as the parameter needs it."""
    if missing := [key for key in ("step", "m", "v") if key not in state]:
        raise InputError(
            f"the state of {name} has no {missing[0]!r}: LAMB did not write it; start without it"
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
    """A group's options and parameters, after the defaults are filled in."""
    rules = {
        "lr": group["lr"] >= 0,
        "betas": len(group["betas"]) == 2 and all(0 <= beta < 1 for beta in group["betas"]),
        "eps": group["eps"] > 0,  # at 0 a gradient that was always zero would make NaN
        "weight_decay": group["weight_decay"] >= 0,
        "clamp": group["clamp"] is None or 0 <= group["clamp"][0] <= group["clamp"][1],
        "max_weight_norm": group["max_weight_norm"] is None or group["max_weight_norm"] > 0,
    }
    if wrong := [name for name, kept in rules.items() if not kept]:
        raise InputError(
            f"LAMB cannot use {wrong[0]}={group[wrong[0]]!r}: rates are not negative, eps is above "
            "0, betas are two numbers from 0 to below 1, a clamp is (least, most)"
        )
    if any(not parameter.is_floating_point() for parameter in group["params"]):
        raise InputError("LAMB trains real floating-point parameters only; leave the others out")
    count = group["stacked"]
    for parameter in group["params"] if count != 1 else ():
        if count < 1 or not parameter.ndim or parameter.shape[0] % count:
            raise InputError(
                f"stacked is {count!r}, and a parameter has shape {list(parameter.shape)}: it must "
                "be a whole number from 1 up that divides the first dimension"
            )
