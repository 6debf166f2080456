"""`IPUInfeedQueue` and `IPUOutfeedQueue`: data into a loop, and results out of it.

    infeed = IPUInfeedQueue(dataset)
    outfeed = IPUOutfeedQueue()
    loops.repeat(10, body, [], infeed)      # `body` gets a batch and calls outfeed.enqueue(loss)
    outfeed.dequeue()                       # ten losses, as one tensor

An infeed is an iterator over the data set, which a loop advances. An outfeed is a list on the host:
`enqueue` becomes an operation of the graph that appends to it each time it runs, and `dequeue`
empties it. Values are copied on their way, so that a variable which is enqueued and then changed
stays as it was. Both work in `tf.function` and in a `tf.compat.v1.Session`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from packhorse_port.notices import input_error
from packhorse_port.tensorflow.extensions import IPUOutfeedMode


class IPUInfeedQueue:
    """A data set that a loop reads from."""

    def __init__(
        self,
        dataset: Any,
        device_ordinal: int | None = None,
        prefetch_depth: int | None = None,
        optimise_latency: bool = False,
        **_: Any,
    ) -> None:
        for spec in tf.nest.flatten(dataset.element_spec):
            if not spec.shape.is_fully_defined():
                raise input_error(
                    f"the infeed's elements have the shape {spec.shape}, which is not fully"
                    " defined: use .batch(n, drop_remainder=True)"
                )
        self._dataset = dataset
        self._iterator: Any = None
        self._dequeued = False
        if not tf.executing_eagerly():  # a session runs `initializer`, which must then exist
            self._iterator = tf.compat.v1.data.make_initializable_iterator(dataset)

    def _dequeue(self) -> Any:
        """The next element; called by loops and pipelines."""
        if self._iterator is None:
            with tf.init_scope():
                self._iterator = iter(self._dataset)
        self._dequeued = True
        return self._iterator.get_next()

    @property
    def dequeued(self) -> bool:
        """Whether a loop has read from it."""
        return self._dequeued

    @property
    def number_of_tuple_elements(self) -> int:
        """How many arguments an element is for the body of a loop."""
        args, kwargs = body_arguments(self._dataset.element_spec)
        return len(args) + len(kwargs)

    @property
    def initializer(self) -> Any:
        """Start at the first element: at once, or by the operation that is returned."""
        if tf.executing_eagerly():
            self._iterator = iter(self._dataset)
            return None
        return self._iterator.initializer

    @property
    def deleter(self) -> Any:
        """Free the iterator; an operation without effect in a session."""
        if tf.executing_eagerly():
            self._iterator = None
            return None
        return tf.no_op()

    def get_next(self) -> Any:
        """Not available: a loop reads the queue."""
        raise input_error(
            "IPUInfeedQueue has no get_next(): pass the queue to ipu.loops.repeat, whose body gets"
            " the elements"
        )


def body_arguments(element: Any) -> tuple[list[Any], dict[str, Any]]:
    """The positional and the keyword arguments that an element is for the body of a loop."""
    values = list(element) if isinstance(element, list | tuple) else [element]
    if len(values) == 1 and isinstance(values[0], dict) and all(map(_is_name, values[0])):
        return [], values[0]
    return values, {}


def _is_name(key: Any) -> bool:
    return isinstance(key, str)


class IPUOutfeedQueue:
    """Results of a loop, kept on the host until they are dequeued."""

    def __init__(
        self,
        outfeed_mode: IPUOutfeedMode | None = None,
        device_ordinal: int | None = None,
        buffer_depth: int = 3,
        optimise_latency: bool = False,
    ) -> None:
        mode = outfeed_mode or IPUOutfeedMode.ALL
        if not isinstance(mode, IPUOutfeedMode):
            choices = " or ".join(f"IPUOutfeedMode.{choice.name}" for choice in IPUOutfeedMode)
            raise input_error(f"outfeed_mode is {choices}, not {outfeed_mode!r}")
        self._outfeed_mode = mode
        self._lock = threading.Lock()
        self._elements: list[list[np.ndarray]] = []
        self._structure: Any = None
        self._specs: list[tf.TensorSpec] = []
        self._graphs: set[Any] = set()  # those with an enqueue operation, and all around them
        self._thread: int | None = None  # that enqueued
        self._thread_graph: Any = None  # its default graph

    def enqueue(self, tensors: Any) -> Any:
        """Append tensors, in any structure; returns the operation in a graph, else None."""
        graph = tf.compat.v1.get_default_graph()
        if self.enqueued and not tf.executing_eagerly():
            raise input_error(
                "this IPUOutfeedQueue is enqueued twice: enqueue one tuple or dictionary, or use"
                " another queue"
            )
        flat = [tf.convert_to_tensor(tensor) for tensor in tf.nest.flatten(tensors)]
        self._structure = tf.nest.map_structure(lambda _: 0, tensors)
        self._specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in flat]
        self._thread = threading.get_ident()
        self._thread_graph = graph
        while graph is not None:
            self._graphs.add(graph)
            graph = getattr(graph, "outer_graph", None)
        operation = tf.numpy_function(self._append, flat, Tout=[])
        return None if tf.executing_eagerly() else operation

    def _append(self, *values: Any) -> None:
        # A copy, because TensorFlow may pass its own memory.
        element = [np.array(value) for value in values]
        with self._lock:
            if self._outfeed_mode == IPUOutfeedMode.LAST:
                self._elements.clear()
            self._elements.append(element)

    @property
    def enqueued(self) -> bool:
        """Whether the graph that is being built, or one inside it, has an enqueue operation."""
        if self._thread is None:
            return False
        if threading.get_ident() != self._thread:
            return self._thread_graph in self._graphs
        return tf.compat.v1.get_default_graph() in self._graphs

    def dequeue(self, wait_for_completion: bool = False) -> Any:
        """The elements since the last call: [elements, …] per tensor, or the last one.

        In a session it is the operation that returns them.
        """
        if not self.enqueued:
            if tf.executing_eagerly() and threading.get_ident() != self._thread:
                return []  # another thread reads before the first result is there
            raise input_error("this IPUOutfeedQueue was not enqueued: run the loop first")
        if tf.executing_eagerly():
            return self._pack([tf.convert_to_tensor(value) for value in self._take()])
        types = [spec.dtype for spec in self._specs]
        outputs = tf.numpy_function(self._take, [], Tout=types)
        for output, spec in zip(outputs, self._specs, strict=True):
            count = [None] if self._outfeed_mode == IPUOutfeedMode.ALL else []
            output.set_shape([*count, *spec.shape])
        return self._pack(outputs)

    def _take(self) -> list[np.ndarray]:
        """One array per tensor; empties the queue."""
        with self._lock:
            elements = self._elements
            self._elements = []
        if self._outfeed_mode == IPUOutfeedMode.LAST:
            if not elements:
                raise input_error("this IPUOutfeedQueue has no last element: run the loop first")
            return elements[-1]
        if not elements:
            return [
                np.empty((0, *(size or 0 for size in spec.shape)), spec.dtype.as_numpy_dtype)
                for spec in self._specs
            ]
        return [np.stack(column) for column in zip(*elements, strict=True)]

    def _pack(self, flat: list[Any]) -> Any:
        return tf.nest.pack_sequence_as(self._structure, flat)

    @property
    def deleter(self) -> Any:
        """Drop what was not dequeued; an operation without effect in a session."""
        if not tf.executing_eagerly():
            return tf.no_op()
        with self._lock:
            self._elements.clear()
        return None

    def __iter__(self) -> Iterator[Any]:
        if not tf.executing_eagerly() or self._outfeed_mode != IPUOutfeedMode.ALL:
            raise input_error(
                "an IPUOutfeedQueue is iterated over in eager mode, with IPUOutfeedMode.ALL:"
                " call dequeue()"
            )
        while tf.nest.flatten(elements := self.dequeue()):
            count = int(tf.nest.flatten(elements)[0].shape[0])
            if not count:
                return
            for index in range(count):
                yield tf.nest.map_structure(lambda column, at=index: column[at], elements)


class ScopedIPUOutfeedQueue(IPUOutfeedQueue):
    """An outfeed that is freed with its last reference, as all are here."""

    def __init__(
        self, outfeed_mode: IPUOutfeedMode | None = None, device_ordinal: int | None = None
    ) -> None:
        super().__init__(outfeed_mode, device_ordinal)


PROVIDES = {
    "ipu.ipu_infeed_queue": (IPUInfeedQueue,),
    "ipu.ipu_outfeed_queue": (IPUOutfeedMode, IPUOutfeedQueue, ScopedIPUOutfeedQueue),
}
