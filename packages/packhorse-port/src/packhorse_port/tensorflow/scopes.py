"""`ipu.scopes` and `ipu.sharding`: where and how an IPU runs operations, all without effect here.

Each scope can be opened, and decorates a function where the SDK's does. It is logged once that it
has no effect, except for `ipu_scope` itself, which only says that the IPU is to be used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from packhorse_port.notices import log_once


@contextmanager
def ipu_scope(device: str = "/device:IPU:0") -> Iterator[None]:
    """Operations inside it are for the IPU."""
    yield


@contextmanager
def ipu_jit_scope(ipu_scope: Any = 0) -> Iterator[None]:
    """Operations inside it are compiled together."""
    yield


@contextmanager
def ipu_shard(index: Any) -> Iterator[None]:
    """Operations inside it are for one IPU of several."""
    log_once("ipu_shard", "ipu_shard has no effect: there is one device")
    yield


@contextmanager
def outside_compilation_scope(name: str = "outside") -> Iterator[None]:
    """Operations inside it are for the host."""
    yield


@contextmanager
def frontend_attribute(
    attribute_name: str, attribute_value: Any, restore_to: Any = None
) -> Iterator[None]:
    """An attribute for the IPU's compiler."""
    text = f"frontend_attribute({attribute_name!r}) has no effect: it is for the IPU's compiler"
    log_once(f"frontend_attribute.{attribute_name}", text)
    yield


@contextmanager
def stochastic_rounding(override: Any) -> Iterator[None]:
    """Rounding at random."""
    log_once("stochastic_rounding", "stochastic_rounding has no effect: numbers are rounded")
    yield


@contextmanager
def partials_type(override_type: Any) -> Iterator[None]:
    """The type of partial sums."""
    log_once(
        "partials_type", "partials_type has no effect: products are summed as this machine does"
    )
    yield


def get_shard_from_colocation(op: Any) -> None:
    """The IPU of an operation: none."""


def propagate_sharding(g: Any = None) -> None:
    """Assign IPUs to operations: nothing to do."""


PROVIDES = {
    "ipu.scopes": (
        ipu_scope,
        ipu_jit_scope,
        ipu_shard,
        outside_compilation_scope,
        frontend_attribute,
        stochastic_rounding,
        partials_type,
    ),
    "ipu.sharding": (get_shard_from_colocation, propagate_sharding),
}
