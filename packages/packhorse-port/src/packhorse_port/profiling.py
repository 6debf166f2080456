"""`poptorch.profiling`: named sections of a script, shown by torch.profiler.

    channel = Channel("training")
    with channel.tracepoint("epoch"):
        ...

PopTorch wrote them for its vision tools; here each is a `torch.profiler.record_function`.
"""

from __future__ import annotations

import functools
from typing import TypeVar

import torch

Instance = TypeVar("Instance")


class Channel:
    """Sections whose names begin with that of the channel."""

    def __init__(self, name: str) -> None:
        self._name = name

    def tracepoint(self, name: str) -> torch.profiler.record_function:
        """A context that is one section."""
        return torch.profiler.record_function(f"{self._name}.{name}")

    def instrument(self, obj: Instance, *methods: str) -> Instance:
        """Make every call of these methods of `obj` a section."""
        for name in methods:
            method = getattr(obj, name)
            setattr(obj, name, self._traced(method, f"{type(obj).__name__}.{name}"))
        return obj

    def _traced(self, method, name: str):
        @functools.wraps(method)
        def traced(*args, **kwargs):
            with self.tracepoint(name):
                return method(*args, **kwargs)

        return traced
