"""Data cut and joined as an IPU system takes it: whole batches, one for each replica, whole loops.

An IPU's program has fixed shapes and so many steps, so a batch that is not full, or steps that do
not fill an execution, are errors there and here, with the line to change. With n replicas n batches
that follow one another are one step's: they are joined here, and divided again in `training`.
Batches that do not go round are dropped and said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from packhorse_port.notices import say_once
from packhorse_port.tensorflow.refusal import refuse

BATCH = 32  # Keras's, where none is given


class Feed(NamedTuple):
    """What Keras is to be given: data, its weights, the batch, the steps; and how many they are."""

    x: Any
    y: Any
    sample_weight: Any
    batch_size: int | None
    steps: int | None
    known: int | None  # steps in all, where that can be told


def feed(
    x: Any, y: Any, sample_weight: Any, batch_size: int | None, steps: int | None, replicas: int
) -> Feed:
    """The data joined for so many replicas, and checked."""
    if isinstance(x, tf.data.Dataset):
        return _dataset(x, steps, replicas)
    if not _arrays(x):
        if replicas > 1:
            raise refuse(
                f"a {type(x).__name__} cannot be dealt to {replicas} replicas:"
                " give arrays or a tf.data.Dataset"
            )
        return Feed(x, y, sample_weight, batch_size, steps, steps)
    return _cut(x, y, sample_weight, batch_size or BATCH, steps, replicas)


def _arrays(x: Any) -> bool:
    leaves = keras.tree.flatten(x)
    return bool(leaves) and all(getattr(leaf, "shape", ()) for leaf in leaves)


def length(x: Any) -> int:
    """How many samples there are."""
    return int(keras.tree.flatten(x)[0].shape[0])


def part(x: Any, begin: int, end: int) -> Any:
    """Samples from `begin` to `end` of whatever holds them; nothing of nothing."""
    return keras.tree.map_structure(lambda each: None if each is None else each[begin:end], x)


def _cut(x: Any, y: Any, weight: Any, batch: int, steps: int | None, replicas: int) -> Feed:
    samples = length(x)
    if samples % batch:
        whole = samples - samples % batch
        cut = f"cut them: x = x[:{whole}], y = y[:{whole}]; or take" if whole else "take"
        raise refuse(
            f"{samples} samples are no whole number of batches of {batch}: {cut} another batch_size"
        )
    kept = samples - samples % (batch * replicas)
    if not kept:
        raise refuse(
            f"{samples} samples are less than a batch of {batch} for each of {replicas} replicas:"
            " take a smaller batch_size or a smaller auto_select_ipus"
        )
    if kept < samples:
        _say_dropped((samples - kept) // batch, replicas)
        x, y, weight = (part(each, 0, kept) for each in (x, y, weight))
    own = _shared(steps, replicas)
    return Feed(x, y, weight, batch * replicas, own, own or kept // (batch * replicas))


def _dataset(dataset: Any, steps: int | None, replicas: int) -> Feed:
    for spec in keras.tree.flatten(dataset.element_spec):
        shape = getattr(spec, "shape", None)
        if shape is not None and shape.rank and shape[0] is None:
            raise refuse("the last batch may be short: use .batch(n, drop_remainder=True)")
    number = int(dataset.cardinality())
    if replicas > 1:
        if number > 0 and number % replicas:
            _say_dropped(number % replicas, replicas)
        dataset = dataset.batch(replicas, drop_remainder=True).map(_join)
    own = _shared(steps, replicas)
    return Feed(dataset, None, None, None, own, own or (number // replicas if number > 0 else None))


def _join(*element: Any) -> Any:
    def join(tensor: Any) -> Any:
        return tf.reshape(tensor, [tensor.shape[0] * tensor.shape[1], *tensor.shape[2:]])

    joined = tf.nest.map_structure(join, element)
    return joined if len(joined) > 1 else joined[0]


def _shared(steps: int | None, replicas: int) -> int | None:
    """Steps of one replica, of those that a script counts over all."""
    if steps is None:
        return None
    if steps < replicas:
        raise refuse(f"{steps} steps are less than one for each of {replicas} replicas")
    return steps // replicas


def _say_dropped(batches: int, replicas: int) -> None:
    say_once(
        "replicas.dropped",
        f"{batches} of the batches do not go round {replicas} replicas and are dropped",
    )


def hold_out(given: Mapping[str, Any]) -> dict[str, Any]:
    """`validation_split` as data of its own: the last part, as Keras takes it."""
    x, share = given.get("x"), given.get("validation_split") or 0
    if not share or given.get("validation_data") is not None or not _arrays(x):
        return dict(given)
    at = math.floor(length(x) * (1 - share))
    ends = tuple(part(given.get(name), at, length(x)) for name in ("x", "y", "sample_weight"))
    return {
        **given,
        **{name: part(given.get(name), 0, at) for name in ("x", "y", "sample_weight")},
        "validation_split": 0.0,
        "validation_data": ends if ends[2] is not None else ends[:2],
    }


def check_steps(known: int | None, steps_per_execution: int, accumulation: int, verb: str) -> None:
    """Whether executions fill the steps, and updates of the weights the executions."""
    execution = min(steps_per_execution, known or steps_per_execution)
    if known and known % execution:
        fits = max(n for n in range(1, execution + 1) if known % n == 0 and n % accumulation == 0)
        raise refuse(
            f"{verb} has {known} steps, which steps_per_execution={steps_per_execution} does not"
            f" divide: compile with steps_per_execution={fits or known}, or cut the data"
        )
    if execution % accumulation:
        fits = execution - execution % accumulation or accumulation
        raise refuse(
            f"gradient_accumulation_steps_per_replica={accumulation} does not divide"
            f" steps_per_execution={execution}: compile with steps_per_execution={fits}"
        )
