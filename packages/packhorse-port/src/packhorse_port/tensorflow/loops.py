"""`ipu.loops` and `ipu_compiler.compile`: loops in a graph, fed by an `IPUInfeedQueue`.

    ipu_compiler.compile(lambda: loops.repeat(10, body, [0.0], infeed))

Loops are `tf.while_loop`, one iteration at a time. The body gets the loop's values, then those of
the infeed's next element, and returns the values, then operations to run. `compile` calls the
computation in the graph that is being built; without one it is run at once as a `tf.function`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from packhorse_port.notices import input_error
from packhorse_port.tensorflow.queues import IPUInfeedQueue, body_arguments

Function = Callable[..., Any]


def while_loop(
    condition: Function,
    body: Function,
    inputs: Any = None,
    infeed_queue: IPUInfeedQueue | None = None,
    maximum_iterations: Any = None,
    use_while_v1: bool = True,
) -> Any:
    """Repeat `body` while `condition` of the loop's values holds; returns the last values."""
    arrays = tf.TensorArray
    values = [
        value if isinstance(value, arrays) else tf.convert_to_tensor(value)
        for value in to_list(inputs)
    ]
    _check_arguments(body, len(values), infeed_queue)
    types = [value.dtype for value in values]
    # A loop needs a value, so one without any carries a zero.
    carried = values or [tf.constant(0)]

    def wrapped_condition(*loop_values: Any) -> Any:
        return condition(*loop_values[: len(values)])

    def wrapped_body(*loop_values: Any) -> list[Any]:
        args, kwargs = body_arguments(infeed_queue._dequeue()) if infeed_queue else ([], {})
        outputs = to_list(body(*loop_values[: len(values)], *args, **kwargs))
        tensors, operations = separate_operations(outputs)
        if [tensor.dtype for tensor in tensors] != types:
            raise input_error(
                f"the loop's body returns values of the types {[t.dtype.name for t in tensors]}"
                f" for {[dtype.name for dtype in types]}: return one for each input, of its type"
            )
        with tf.control_dependencies(operations):
            return [
                tensor if isinstance(tensor, arrays) else tf.identity(tensor)
                for tensor in tensors or [tf.constant(0)]
            ]

    outputs = tf.while_loop(
        wrapped_condition,
        wrapped_body,
        carried,
        parallel_iterations=1,
        maximum_iterations=maximum_iterations,
    )
    outputs = to_list(outputs)
    if not values:
        return None if tf.executing_eagerly() else outputs[0].op
    return outputs[0] if len(outputs) == 1 else outputs


def repeat(
    n: Any,
    body: Function,
    inputs: Any = None,
    infeed_queue: IPUInfeedQueue | None = None,
    use_while_v1: bool = True,
) -> Any:
    """Run `body` n times; returns the last values of the loop."""
    return while_loop(lambda *_: True, body, inputs, infeed_queue, n, use_while_v1)


def to_list(values: Any) -> list[Any]:
    """A list of values; of one value, if it is no sequence; [] of None."""
    if values is None:
        return []
    return list(values) if isinstance(values, list | tuple) else [values]


def separate_operations(outputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(tensors, operations) of what a function returned: tensors first, None left out."""
    returned = [output for output in outputs if output is not None]
    operations = [output for output in returned if isinstance(output, tf.Operation)]
    tensors = returned[: len(returned) - len(operations)]
    if any(isinstance(tensor, tf.Operation) for tensor in tensors):
        raise input_error("return the tensors first and the operations after them")
    return [
        tensor if isinstance(tensor, tf.TensorArray) else tf.convert_to_tensor(tensor)
        for tensor in tensors
    ], operations


def _check_arguments(body: Function, inputs: int, infeed: IPUInfeedQueue | None) -> None:
    """Raise unless the body can be called with the loop's values and those of the infeed."""
    elements = infeed.number_of_tuple_elements if infeed else 0
    args, kwargs = body_arguments(infeed._dataset.element_spec) if infeed else ([], {})
    try:
        inspect.signature(body).bind(*range(inputs), *args, **kwargs)
    except TypeError as error:
        raise input_error(
            f"the loop's body cannot be called with {inputs} inputs and {elements} values of the"
            f" infeed: {error}"
        ) from error
    except ValueError:  # a builtin without a signature
        return


def compile(computation: Function, inputs: Any = None) -> Any:
    """Run `computation` on `inputs`; a single value comes as a list of one, as the SDK's does."""
    if tf.executing_eagerly():

        @tf.function
        def function(*values: Any) -> Any:
            outputs = _call(computation, values)
            return None if isinstance(outputs, tf.Operation) else outputs

        return function(*_as_tensors(inputs))
    return _call(computation, _as_tensors(inputs))


def _as_tensors(inputs: Any) -> list[Any]:
    return [tf.nest.map_structure(tf.convert_to_tensor, value) for value in to_list(inputs)]


def _call(computation: Function, inputs: Sequence[Any]) -> Any:
    outputs = computation(*inputs)
    if isinstance(outputs, dict):
        return outputs
    tensors, operations = separate_operations(to_list(outputs))
    if not tensors:
        return tf.group(*operations)
    with tf.control_dependencies(operations):
        return [tf.identity(tensor) for tensor in tensors]


PROVIDES = {
    "ipu.loops": (repeat, while_loop),
    "ipu.ipu_compiler": (compile,),
}
