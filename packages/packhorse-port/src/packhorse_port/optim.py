"""PopTorch's optimizers: torch's own steps, to the bit, behind PopTorch's arguments.

    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, loss_scaling=1024)

An argument left None has torch's default. What PopTorch adds falls in two kinds. With a meaning
here: `max_grad_norm` (all gradients clipped together before the step), `bias_correction=False`,
`use_tf_variant` (RMSprop as TensorFlow has it: mean squares begin at 1, ε inside the root, the rate
inside the momentum). Without: scaling of loss and velocity and the types of accumulators, which
only keep half precision in range; they are kept as attributes and said once. `LAMB` is
`packhorse.optim.LAMB` (You et al. 2019) with PopTorch's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from packhorse import optim
from packhorse.errors import InputError
from packhorse.optim.lamb import STEP_WITHOUT_CORRECTION
from packhorse_port.names import nearest
from packhorse_port.notices import place, say_once

OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop", "LAMB")
NO_CLIP = float("inf")
ACCUM_TYPES = (torch.float16, torch.float32)
Betas = tuple[float, float]
Closure = Callable[[], Any]


class VariableAttributes:
    """Which attributes PopTorch would compile as variables: those given. All may change here."""

    def __init__(self, variable_attributes: Iterable[str], allowed: Iterable[str]) -> None:
        self._variable, self._allowed = set(variable_attributes), list(allowed)

    def isConstant(self, attr: str) -> bool:
        return attr not in self._variable

    def markAsConstant(self, attr: str) -> None:
        self._variable.discard(self._known(attr))

    def markAsVariable(self, attr: str) -> None:
        self._variable.add(self._known(attr))

    def _known(self, attr: str) -> str:
        if attr not in self._allowed:
            raise InputError(f"the optimizer has no {attr!r}; it has {', '.join(self._allowed)}")
        return attr


class _Kept:
    """What every optimizer here keeps of PopTorch's arguments; `_keep` sets it."""

    loss_scaling: float
    accum_type: torch.dtype
    variable_attrs: VariableAttributes


class SGD(_Kept, torch.optim.SGD):
    """`torch.optim.SGD`; `use_combined_accum` and the scalings change nothing but memory."""

    max_grad_norm: float

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | None = None,
        nesterov: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        velocity_scaling: float | None = None,
        use_combined_accum: bool | None = None,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        given = _given(locals())
        super().__init__(params, **_torchs(given))
        own = {"velocity_scaling": 1.0, "use_combined_accum": False, "max_grad_norm": NO_CLIP}
        _keep(self, given, **own, velocity_accum_type=torch.float32)


class Adam(_Kept, torch.optim.Adam):
    """`torch.optim.Adam`."""

    max_grad_norm: float

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        betas: Betas | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        given = _given(locals())
        super().__init__(params, **_torchs(given))
        _keep(self, given, **_MOMENTS, max_grad_norm=NO_CLIP)


class AdamW(_Kept, torch.optim.AdamW):
    """`torch.optim.AdamW`, and without bias correction where asked."""

    max_grad_norm: float
    bias_correction: bool

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        betas: Betas | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        bias_correction: bool | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        given = _given(locals())
        super().__init__(params, **_torchs(given, "bias_correction"))
        _keep(self, given, **_MOMENTS, max_grad_norm=NO_CLIP, bias_correction=True)
        if bias_correction is False:
            self.register_step_pre_hook(_settle)


class RMSprop(_Kept, torch.optim.RMSprop):
    """`torch.optim.RMSprop`, or TensorFlow's with `use_tf_variant=True`."""

    use_tf_variant: bool

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        alpha: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        centered: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        use_tf_variant: bool | None = None,
    ) -> None:
        given = _given(locals())
        super().__init__(params, **_torchs(given))
        _keep(self, given, **_MOMENTS, use_tf_variant=False)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update."""
        if not self.use_tf_variant:
            return _unhooked(torch.optim.RMSprop.step)(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _tensorflow_rmsprop(parameter, self.state[parameter], group)
        return loss


def LAMB(
    params: Iterable[Any],
    lr: float | None = None,
    betas: Betas | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    bias_correction: bool | None = None,
    loss_scaling: float | None = None,
    max_weight_norm: float | None = None,
    accum_type: torch.dtype | None = None,
    first_order_momentum_accum_type: torch.dtype | None = None,
    second_order_momentum_accum_type: torch.dtype | None = None,
) -> optim.LAMB:
    """`packhorse.optim.LAMB` with PopTorch's ε of 1e-8; a weight norm counts up to 65500."""
    given = _given(locals())
    settings: dict[str, Any] = {"eps": 1e-8, "weight_decay": 1e-2, "max_weight_norm": 65500.0}
    optimizer = optim.LAMB(params, **(settings | _torchs(given)))
    _keep(optimizer, given, **_MOMENTS, bias_correction=True, max_weight_norm=65500.0)
    return optimizer


_MOMENTS = {
    "first_order_momentum_accum_type": torch.float32,
    "second_order_momentum_accum_type": torch.float32,
}
# PopTorch's own arguments; the others are torch's.
_OWN = {
    *("loss_scaling", "velocity_scaling", "use_combined_accum", "accum_type", "max_grad_norm"),
    *("velocity_accum_type", "use_tf_variant", *_MOMENTS),
}
_SCALING = "has no effect: nothing is scaled; in fp32 nothing vanishes, in half small gradients may"
_STORED = "has no effect: gradients and moments have the types torch gives them"
_WHY = {
    "loss_scaling": _SCALING,
    "velocity_scaling": _SCALING,
    "use_combined_accum": "has no effect: gradient and velocity are two tensors",
    "accum_type": _STORED,
    "velocity_accum_type": _STORED,
    **dict.fromkeys(_MOMENTS, _STORED),
}


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that were given, of a constructor's `locals()`."""
    skipped = ("self", "params", "__class__")
    return {
        name: value
        for name, value in arguments.items()
        if name not in skipped and value is not None
    }


def _torchs(given: dict[str, Any], *also: str) -> dict[str, Any]:
    """What torch's constructor takes: all that is not PopTorch's own, nor one of `also`."""
    return {name: value for name, value in given.items() if name not in {*_OWN, *also}}


def _keep(optimizer: Any, given: dict[str, Any], **defaults: Any) -> None:
    """PopTorch's attributes on the optimizer; what has no effect is said."""
    for name, default in {"loss_scaling": 1.0, "accum_type": torch.float32, **defaults}.items():
        value = given.get(name, default)
        if name.endswith("accum_type") and value not in ACCUM_TYPES:
            raise InputError(f"{name} is torch.float32 or torch.float16, not {value!r}")
        setattr(optimizer, name, value)
        if value != default and name in _WHY:
            say_once(f"optim.{name}", f"{name}={value} {_WHY[name]}")
    allowed = [*optimizer.defaults, "loss_scaling"]
    optimizer.variable_attrs = VariableAttributes(given, allowed)
    if getattr(optimizer, "max_grad_norm", NO_CLIP) != NO_CLIP:
        optimizer.register_step_pre_hook(_clip)


def _clip(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Before a step: clip the gradients, or have a closure that makes them clip them."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")

    def clip() -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, optimizer.max_grad_norm)

    def closed() -> Any:
        loss = closure()
        clip()
        return loss

    if closure is not None:
        return (optimizer, closed), {}
    clip()
    return None


def _settle(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Before a step: new state begins so old that correcting its bias divides by 1."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None or optimizer.state[parameter]:
                continue
            on_device = group["capturable"] or group["fused"]
            place = parameter.device if on_device else "cpu"
            names = ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * bool(group["amsgrad"])]
            state = {name: torch.zeros_like(parameter) for name in names}
            optimizer.state[parameter] = {
                "step": torch.tensor(STEP_WITHOUT_CORRECTION, device=place),
                **state,
            }


def _unhooked(step: Any) -> Any:
    """torch wraps the step of a class it makes to call hooks; ours has called them already."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _tensorflow_rmsprop(parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        names = ("square_avg", "grad_avg", "momentum_buffer")
        state |= {"step": torch.tensor(0.0)} | {name: torch.zeros_like(parameter) for name in names}
        state["square_avg"].fill_(1)
    state["step"] += 1
    gradient = -parameter.grad if group["maximize"] else parameter.grad
    gradient = gradient + group["weight_decay"] * parameter
    alpha, squares = group["alpha"], state["square_avg"]
    squares.mul_(alpha).addcmul_(gradient, gradient, value=1 - alpha)
    variance = squares
    if group["centered"]:
        state["grad_avg"].lerp_(gradient, 1 - alpha)
        variance = squares - state["grad_avg"] ** 2
    update = group["lr"] * gradient / (variance + group["eps"]).sqrt()
    if group["momentum"]:
        update = state["momentum_buffer"].mul_(group["momentum"]).add_(update)
    parameter.sub_(update)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    near = nearest(name, OPTIMIZERS)
    if hasattr(torch.optim, name):
        near = f"; write torch.optim.{name}, which trainingModel takes as well"
    raise AttributeError(f"{place()}poptorch.optim has no {name}{near}")
