"""The SDK's optimizers: those around another one, and those of `ipu_tensorflow_addons`.

    GradientAccumulationOptimizerV2(GradientDescentOptimizer(0.1), num_mini_batches=4)
    AdamIpuOptimizer(0.001, m_dtype=tf.float16)

`ipu.optimizers` has optimizers of `tf.compat.v1` that hold another one. Accumulation adds the
gradients of `num_mini_batches` calls, or averages them (`reduction_method`), and then applies them;
the other calls change nothing. Those over replicas have one replica here.

The optimizers of the addons are Keras's, with the SDK's arguments. Types of moments and of the
computation save an IPU's memory; here both have the variable's type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from packhorse_port.notices import input_error, log_once
from packhorse_port.tensorflow.extensions import GradientAccumulationReductionMethod
from packhorse_port.tensorflow.pipelining import Accumulator, lifted_variable

Pairs = Iterable[tuple[Any, Any]]


class IpuOptimizer(tf.compat.v1.train.Optimizer):
    """An optimizer around another one, to which it passes everything on."""

    def __init__(self, opt: Any, name: str | None = None) -> None:
        super().__init__(False, name=name or type(self).__name__)
        self._opt = opt

    def compute_gradients(self, loss: Any, var_list: Any = None, **kwargs: Any) -> Any:
        return self._opt.compute_gradients(loss, var_list=var_list, **kwargs)

    def apply_gradients(
        self, grads_and_vars: Pairs, global_step: Any = None, name: str | None = None
    ) -> Any:
        return self._opt.apply_gradients(grads_and_vars, global_step, name)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        return self._opt.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        return self._opt.get_slot_names(*args, **kwargs)

    def variables(self) -> Any:
        return self._opt.variables()


@contextmanager
def replicas_in_turn(count: int) -> Iterator[None]:
    """Within it a function is traced which each step calls `count` times, once per replica."""
    _replicas.append(count)
    try:
        yield
    finally:
        _replicas.pop()


_replicas = [1]


class CrossReplicaOptimizer(IpuOptimizer):
    """Averages gradients over replicas: of an estimator; elsewhere one runs."""

    def apply_gradients(
        self, grads_and_vars: Pairs, global_step: Any = None, name: str | None = None
    ) -> Any:
        opt = self._opt
        if _replicas[-1] > 1:
            mean = GradientAccumulationReductionMethod.MEAN
            opt = GradientAccumulationOptimizerV2(opt, _replicas[-1], reduction_method=mean)
        return opt.apply_gradients(grads_and_vars, global_step, name)


class ShardedOptimizer(IpuOptimizer):
    """Assigns gradients to the IPUs of their variables: there is one device."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, "ShardedOptimizer")


class MapGradientOptimizer(IpuOptimizer):
    """Changes each gradient by a function of it and its variable."""

    def __init__(
        self,
        wrapped_optimizer: Any,
        gradient_mapping_function: Callable[[Any, Any], Any],
        name: str = "MapGradientOptimizer",
    ) -> None:
        super().__init__(wrapped_optimizer, name)
        self._function = gradient_mapping_function

    def compute_gradients(self, loss: Any, var_list: Any = None, **kwargs: Any) -> Any:
        pairs = self._opt.compute_gradients(loss, var_list=var_list, **kwargs)
        return [
            (self._function(gradient, variable.value()), variable) for gradient, variable in pairs
        ]


class AccumulatingOptimizer(IpuOptimizer):
    """Abstract: applies the gradients of several calls at once."""

    def __init__(
        self,
        opt: Any,
        num_mini_batches: int,
        offload_weight_update_variables: bool | None = None,
        replicated_optimizer_state_sharding: bool = False,
        dtype: Any = None,
        reduction_method: Any = GradientAccumulationReductionMethod.SUM,
        name: str | None = None,
    ) -> None:
        super().__init__(opt, name)
        if num_mini_batches < 1:
            raise input_error(f"num_mini_batches is 1 or more, not {num_mini_batches}")
        method = GradientAccumulationReductionMethod.parse(reduction_method)
        self._mean = method is not GradientAccumulationReductionMethod.SUM
        self._batches = num_mini_batches
        self._sums: Accumulator | None = None
        self._calls: Any = None

    def apply_gradients(
        self, grads_and_vars: Pairs, global_step: Any = None, name: str | None = None
    ) -> Any:
        pairs = [
            (gradient, variable) for gradient, variable in grads_and_vars if gradient is not None
        ]
        gradients = [tf.convert_to_tensor(gradient) for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]
        if self._sums is None:
            self._sums = Accumulator(gradients)
            with tf.init_scope():
                self._calls = lifted_variable(0, tf.int32)
                if isinstance(self._opt, tf.compat.v1.train.Optimizer):
                    self._opt._create_slots(variables)  # not in the branch below
        sums = self._sums

        def apply() -> Any:
            scale = 1 / self._batches if self._mean else 1.0
            totals = [tensor * tf.cast(scale, tensor.dtype) for tensor in sums.read()]
            with tf.control_dependencies(totals):
                operations = sums.reset()
            applied = self._opt.apply_gradients(
                list(zip(totals, variables, strict=True)), global_step, name
            )
            return tf.group(*[step for step in [*operations, applied] if step is not None])

        with tf.control_dependencies([step for step in sums.add(gradients) if step is not None]):
            calls = self._calls.assign_add(1)
        with tf.control_dependencies([calls]):
            return tf.cond(tf.equal(calls % self._batches, 0), apply, tf.no_op)


class GradientAccumulationOptimizerV2(AccumulatingOptimizer):
    """Adds or averages gradients."""


class CrossReplicaGradientAccumulationOptimizerV2(AccumulatingOptimizer):
    """Accumulates gradients, then averages them over replicas, of which there is one."""


class OlderAccumulatingOptimizer(AccumulatingOptimizer):
    """Abstract: the older form, which adds."""

    def __init__(
        self, opt: Any, num_mini_batches: int, verify_usage: bool = True, name: str | None = None
    ) -> None:
        super().__init__(opt, num_mini_batches, name=name)


class GradientAccumulationOptimizer(OlderAccumulatingOptimizer):
    """Adds gradients."""


class CrossReplicaGradientAccumulationOptimizer(OlderAccumulatingOptimizer):
    """Adds gradients, then averages them over replicas, of which there is one."""


# Of ipu_tensorflow_addons

PRECISION = (
    "optimizer_compute_precisions",
    "outline_apply_gradients",
    "outline_apply_gradients_kwargs",
    "m_dtype",
    "v_dtype",
    "vhat_dtype",
    "accumulator_dtype",
)


def _without_precision(arguments: dict[str, Any]) -> dict[str, Any]:
    """Keras's arguments; those about types and memory are logged."""
    for name in PRECISION:
        if arguments.pop(name, None) is not None:
            text = f"{name} has no effect: moments and updates have the variable's type"
            log_once(f"optimizer.{name}", text)
    return arguments


class IpuOptimizerBase(keras.optimizers.Optimizer):
    """The base class of the addons' optimizers, for a script's own."""

    def __init__(self, name: str, learning_rate: Any = 0.001, **kwargs: Any) -> None:
        super().__init__(learning_rate, name=name, **_without_precision(kwargs))


class SGDIpuOptimizer(keras.optimizers.SGD):
    """Keras's SGD."""

    def __init__(self, learning_rate: Any = 0.01, *args: Any, **kwargs: Any) -> None:
        super().__init__(learning_rate, *args, **_without_precision(kwargs))


def update_moments(optimizer: Any, m: Any, v: Any, gradient: Any) -> tuple[Any, Any]:
    """Adam's two moments after a gradient, corrected for their start if `debiasing` is set."""
    ops: Any = keras.ops
    gradient = ops.cast(gradient, m.dtype)
    optimizer.assign(m, optimizer.beta_1 * m + (1 - optimizer.beta_1) * gradient)
    optimizer.assign(v, optimizer.beta_2 * v + (1 - optimizer.beta_2) * ops.square(gradient))
    if not optimizer.debiasing:
        return m, v
    step = ops.cast(optimizer.iterations + 1, m.dtype)
    corrections = [
        1 - ops.power(ops.cast(beta, m.dtype), step)
        for beta in (optimizer.beta_1, optimizer.beta_2)
    ]
    return m / corrections[0], v / corrections[1]


class AdamIpuOptimizer(keras.optimizers.Adam):
    """Keras's Adam, with the form of the SDK's: epsilon within the correction, which can be off.

    The SDK divides by sqrt(v / (1 - beta_2^t)) + epsilon, as the paper's algorithm 1 does; Keras
    scales the rate instead and adds epsilon to the uncorrected sqrt(v).
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        name: str = "Adam",
        m_dtype: Any = None,
        v_dtype: Any = None,
        vhat_dtype: Any = None,
        debiasing: bool = True,
        **kwargs: Any,
    ) -> None:
        types = {"m_dtype": m_dtype, "v_dtype": v_dtype, "vhat_dtype": vhat_dtype}
        super().__init__(
            learning_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            amsgrad=amsgrad,
            name=name,
            **_without_precision(kwargs | types),
        )
        self.debiasing = debiasing

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        ops: Any = keras.ops
        rate = ops.cast(learning_rate, variable.dtype)
        at = self._get_variable_index(variable)
        mean, square = update_moments(self, self._momentums[at], self._velocities[at], gradient)
        if self.amsgrad:
            largest = self._velocity_hats[at]
            self.assign(largest, ops.maximum(largest, square))
            square = largest
        self.assign_sub(variable, rate * mean / (ops.sqrt(square) + self.epsilon))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "debiasing": self.debiasing}


class LAMBIpuOptimizer(keras.optimizers.Optimizer):
    """LAMB, with the decay within the layer's ratio and patterns of names that are left out."""

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay_rate: float = 0.0,
        exclude_from_weight_decay: Sequence[str] | None = None,
        exclude_from_layer_adaptation: Sequence[str] | None = None,
        name: str = "LAMB",
        debiasing: bool = True,
        m_dtype: Any = None,
        v_dtype: Any = None,
        weight_norm_clip: float | None = None,
        **kwargs: Any,
    ) -> None:
        types = {"m_dtype": m_dtype, "v_dtype": v_dtype}
        super().__init__(learning_rate, name=name, **_without_precision(kwargs | types))
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.weight_decay_rate = weight_decay_rate
        self.undecayed = list(exclude_from_weight_decay or [])
        self.unadapted = list(exclude_from_layer_adaptation or [])
        self.debiasing = debiasing
        self.weight_norm_clip = weight_norm_clip

    def build(self, variables: Any) -> None:
        if self.built:
            return
        super().build(variables)
        self._moments = self.add_optimizer_variables(variables, "m")
        self._squares = self.add_optimizer_variables(variables, "v")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        ops: Any = keras.ops
        kind = variable.dtype
        at = self._get_variable_index(variable)
        mean, square = update_moments(self, self._moments[at], self._squares[at], gradient)
        update = mean / (ops.sqrt(square) + self.epsilon)
        name = self._trainable_variables[at].path
        if not any(re.search(pattern, name) for pattern in self.undecayed):
            update += self.weight_decay_rate * variable
        ratio = ops.cast(1.0, kind)
        if not any(re.search(pattern, name) for pattern in self.unadapted):
            weight = ops.norm(ops.reshape(variable, (-1,)))
            size = ops.norm(ops.reshape(update, (-1,)))
            if self.weight_norm_clip is not None:
                weight = ops.minimum(weight, self.weight_norm_clip)
            usable = ops.logical_and(weight > 0, size > 0)
            ratio = ops.where(usable, weight / ops.where(usable, size, 1.0), 1.0)
        self.assign_sub(variable, ops.cast(learning_rate, kind) * ratio * update)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "weight_decay_rate": self.weight_decay_rate,
            "exclude_from_weight_decay": self.undecayed,
            "exclude_from_layer_adaptation": self.unadapted,
            "debiasing": self.debiasing,
            "weight_norm_clip": self.weight_norm_clip,
        }


class ALSOptimizer(keras.mixed_precision.LossScaleOptimizer):
    """A loss scale that adapts itself: Keras's, which halves and doubles it."""

    def __init__(self, inner_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        text = (
            "ALSOptimizer is Keras's LossScaleOptimizer: it adapts to overflow, not to histograms"
        )
        log_once("ALSOptimizer", text)
        super().__init__(inner_optimizer, name=kwargs.pop("name", None))


PROVIDES = {
    "ipu.optimizers": (
        CrossReplicaOptimizer,
        ShardedOptimizer,
        MapGradientOptimizer,
        GradientAccumulationOptimizer,
        GradientAccumulationOptimizerV2,
        CrossReplicaGradientAccumulationOptimizer,
        CrossReplicaGradientAccumulationOptimizerV2,
        GradientAccumulationReductionMethod,
        IpuOptimizer,
    ),
    "ipu.optimizers.cross_replica_optimizer": (CrossReplicaOptimizer,),
    "ipu.optimizers.sharded_optimizer": (ShardedOptimizer,),
    "ipu.optimizers.map_gradient_optimizer": (MapGradientOptimizer,),
    "ipu.optimizers.ipu_optimizer": (IpuOptimizer,),
    "ipu.optimizers.gradient_accumulation_optimizer": (
        GradientAccumulationOptimizer,
        GradientAccumulationOptimizerV2,
        CrossReplicaGradientAccumulationOptimizer,
        CrossReplicaGradientAccumulationOptimizerV2,
    ),
    "ipu.gradient_accumulation": (GradientAccumulationReductionMethod,),
    "keras.ipu": (ALSOptimizer,),
    "keras.ipu.optimizers": (ALSOptimizer,),
    "ipu_tensorflow_addons.keras.optimizers": (
        IpuOptimizerBase,
        SGDIpuOptimizer,
        AdamIpuOptimizer,
        LAMBIpuOptimizer,
    ),
}
