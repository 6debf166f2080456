"""PopTorch's optimizers: torch's own steps, to the bit, with PopTorch's arguments.

    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, loss_scaling=1024)

None means torch's default. Of PopTorch's own arguments these have an effect: `max_grad_norm` (all
gradients clipped together before the step), `bias_correction=False`, `use_tf_variant` (RMSprop as
in TensorFlow: mean squares start at 1, ε inside the root, learning rate inside the momentum).
Weights in half are updated in fp32, from moments in fp32, and rounded once: in half the squares of
gradients would vanish and the steps explode. Scaling of loss and velocity and the dtypes of
accumulators are stored as attributes and logged once. `LAMB` is `packhorse.optim.LAMB` (You et al.
2019) with PopTorch's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from packhorse import optim
from packhorse.optim.lamb import STEP_WITHOUT_CORRECTION
from packhorse_port.casting import HALVES
from packhorse_port.names import nearest
from packhorse_port.notices import UsageError, line_prefix, log_once

OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop", "LAMB")
NO_CLIP = float("inf")
ACCUM_TYPES = (torch.float16, torch.float32)
Betas = tuple[float, float]
Closure = Callable[[], Any]


class VariableAttributes:
    """Which attributes PopTorch would compile as variables; here all may change."""

    def __init__(self, variable_attributes: Iterable[str], allowed: Iterable[str]) -> None:
        self._variable = set(variable_attributes)
        self._allowed = list(allowed)

    def isConstant(self, attr: str) -> bool:
        return attr not in self._variable

    def markAsConstant(self, attr: str) -> None:
        self._variable.discard(self._known(attr))

    def markAsVariable(self, attr: str) -> None:
        self._variable.add(self._known(attr))

    def _known(self, attr: str) -> str:
        if attr not in self._allowed:
            raise UsageError(f"the optimizer has no {attr!r}; it has {', '.join(self._allowed)}")
        return attr


class Optimizer:
    """Base of PopTorch's optimizers: the arguments that all of them have, as attributes."""

    # Set by `_store`.
    loss_scaling: float
    accum_type: torch.dtype
    variable_attrs: VariableAttributes


class SGD(Optimizer, torch.optim.SGD):
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
        arguments = _passed(locals())
        super().__init__(params, **_torch_arguments(arguments))
        _store(
            self,
            arguments,
            velocity_scaling=1.0,
            use_combined_accum=False,
            max_grad_norm=NO_CLIP,
            velocity_accum_type=torch.float32,
        )


class Adam(Optimizer, torch.optim.Adam):
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
        arguments = _passed(locals())
        super().__init__(params, **_torch_arguments(arguments))
        _store(self, arguments, **_MOMENTS, max_grad_norm=NO_CLIP)


class AdamW(Optimizer, torch.optim.AdamW):
    """`torch.optim.AdamW`, optionally without bias correction."""

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
        arguments = _passed(locals())
        super().__init__(params, **_torch_arguments(arguments, "bias_correction"))
        _store(self, arguments, **_MOMENTS, max_grad_norm=NO_CLIP, bias_correction=True)
        if bias_correction is False:
            self.register_step_pre_hook(_skip_bias_correction)


class RMSprop(Optimizer, torch.optim.RMSprop):
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
        arguments = _passed(locals())
        super().__init__(params, **_torch_arguments(arguments))
        _store(self, arguments, **_MOMENTS, use_tf_variant=False)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the weights once."""
        if not self.use_tf_variant:
            return _without_hooks(torch.optim.RMSprop.step)(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _tensorflow_rmsprop(parameter, self.state[parameter], group)
        return loss


class LAMB(Optimizer, optim.LAMB):
    """`packhorse.optim.LAMB` with PopTorch's ε of 1e-8 and weight norms clipped to 65500."""

    bias_correction: bool
    max_weight_norm: float

    def __init__(
        self,
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
    ) -> None:
        arguments = _passed(locals())
        settings: dict[str, Any] = {"eps": 1e-8, "weight_decay": 1e-2, "max_weight_norm": 65500.0}
        super().__init__(params, **(settings | _torch_arguments(arguments)))
        _store(self, arguments, **_MOMENTS, bias_correction=True, max_weight_norm=65500.0)


_MOMENTS = {
    "first_order_momentum_accum_type": torch.float32,
    "second_order_momentum_accum_type": torch.float32,
}
# PopTorch's own arguments; the others are torch's.
_POPTORCH_ONLY = {
    "loss_scaling",
    "velocity_scaling",
    "use_combined_accum",
    "accum_type",
    "max_grad_norm",
    "velocity_accum_type",
    "use_tf_variant",
    *_MOMENTS,
}
_SCALING = "has no effect: nothing is scaled; in fp32 nothing vanishes, in half small gradients may"
_STORED = "has no effect: gradients have the type of their weights, and moments fp32"
_NO_EFFECT = {
    "loss_scaling": _SCALING,
    "velocity_scaling": _SCALING,
    "use_combined_accum": "has no effect: gradient and velocity are two tensors",
    "accum_type": _STORED,
    "velocity_accum_type": _STORED,
    **dict.fromkeys(_MOMENTS, _STORED),
}


def _passed(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that are not None, from a constructor's `locals()`."""
    skipped = ("self", "params", "__class__")
    return {
        name: value
        for name, value in arguments.items()
        if name not in skipped and value is not None
    }


def _torch_arguments(arguments: dict[str, Any], *excluded: str) -> dict[str, Any]:
    """The arguments of torch's constructor: without PopTorch's own and those excluded."""
    skipped = {*_POPTORCH_ONLY, *excluded}
    return {name: value for name, value in arguments.items() if name not in skipped}


def _store(optimizer: Any, arguments: dict[str, Any], **defaults: Any) -> None:
    """Set PopTorch's attributes on the optimizer, and log those without effect."""
    for name, default in {"loss_scaling": 1.0, "accum_type": torch.float32, **defaults}.items():
        value = arguments.get(name, default)
        if name.endswith("accum_type") and value not in ACCUM_TYPES:
            raise UsageError(f"{name} is torch.float32 or torch.float16, not {value!r}")
        setattr(optimizer, name, value)
        if value != default and name in _NO_EFFECT:
            log_once(f"optim.{name}", f"{name}={value} {_NO_EFFECT[name]}")
    allowed = [*optimizer.defaults, "loss_scaling"]
    optimizer.variable_attrs = VariableAttributes(arguments, allowed)
    optimizer.register_step_pre_hook(_widen)
    optimizer.register_step_post_hook(_narrow)
    if getattr(optimizer, "max_grad_norm", NO_CLIP) != NO_CLIP:
        optimizer.register_step_pre_hook(_clip)


def _widen(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Before a step: the weights in half, their gradients and moments become fp32."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer._narrow_data = [
        (parameter, parameter.data, parameter.grad)
        for parameter in parameters
        if parameter.dtype in HALVES and parameter.grad is not None
    ]
    for parameter, data, grad in optimizer._narrow_data:
        parameter.grad = None
        parameter.data = data.float()
        parameter.grad = grad.float()
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if getattr(value, "dtype", None) in HALVES:  # as load_state_dict casts them
                state[name] = value.float()


def _narrow(optimizer: Any, args: Any, kwargs: Any) -> None:
    """After it: the updated weights, rounded to half, where they were."""
    for parameter, data, grad in optimizer.__dict__.pop("_narrow_data", ()):
        data.copy_(parameter.data)
        parameter.grad = None
        parameter.data = data
        parameter.grad = grad


def _clip(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Before a step: clip the gradients, or wrap a closure so that it clips them."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")

    def clip() -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, optimizer.max_grad_norm)

    def clipped_closure() -> Any:
        loss = closure()
        clip()
        return loss

    if closure is not None:
        return (optimizer, clipped_closure), {}
    clip()
    return None


def _skip_bias_correction(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Before a step: start the counter of new state so high that the bias correction is 1."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None or optimizer.state[parameter]:
                continue
            on_device = group["capturable"] or group["fused"]
            device = parameter.device if on_device else "cpu"
            names = ["exp_avg", "exp_avg_sq"]
            if group["amsgrad"]:
                names.append("max_exp_avg_sq")
            state = {name: torch.zeros_like(parameter) for name in names}
            optimizer.state[parameter] = {
                "step": torch.tensor(STEP_WITHOUT_CORRECTION, device=device),
                **state,
            }


def _without_hooks(step: Any) -> Any:
    """torch's `step` without its wrapper that calls hooks: ours has called them already."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _tensorflow_rmsprop(parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        names = ("square_avg", "grad_avg", "momentum_buffer")
        state |= {"step": torch.tensor(0.0)} | {name: torch.zeros_like(parameter) for name in names}
        state["square_avg"].fill_(1)
    state["step"] += 1
    gradient = -parameter.grad if group["maximize"] else parameter.grad
    gradient = gradient + group["weight_decay"] * parameter
    alpha = group["alpha"]
    squares = state["square_avg"]
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
    raise AttributeError(f"{line_prefix()}poptorch.optim has no {name}{near}")
