"""Public names of rooms: imported on first use, and names of earlier versions that still work.

A room's `__init__.py` holds nothing but its exports:

    if TYPE_CHECKING:
        from packhorse.packing.batch import Packed
    else:
        __getattr__, __dir__ = lazy_exports(__name__, {"packhorse.packing.batch": ["Packed"]})

    __all__ = ["Packed"]

Type checkers and the documentation read the imports and `__all__`; at run time importing a room
loads nothing, so that commands which do not need torch do not load it. checks/test_api.py keeps the
three lists equal.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

# Old names of 0.1, by module. They warn since 0.2 and go with 0.3, as does `renamed_attribute`.
RENAMED: dict[str, dict[str, str]] = {
    "packhorse.checkpoint": {"Report": "LoadReport"},
    "packhorse.data.packed.shards": {"open": "open_dataset"},
    "packhorse.optim": {"Scaled": "ScaledHyperparameters"},
    "packhorse.packing": {"Plan": "PackingPlan"},
    "packhorse.packing.histogram": {"Plan": "PackingPlan"},
}


def lazy_exports(
    room: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a room.

    homes: the public names, by the module that defines them.
    """
    module_of = {name: module for module, names in homes.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name in RENAMED.get(room, {}):
            return renamed(room, name)
        if name not in module_of:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        # torch reads `PACKHORSE_CPU` when it first computes; most names here import it.
        import_module("packhorse.processor").limit()
        return getattr(import_module(module_of[name]), name)

    def __dir__() -> list[str]:
        return list(import_module(room).__all__)

    return __getattr__, __dir__


def renamed(module: str, name: str) -> Any:
    """Return what an old name stands for, with a warning; for a module's `__getattr__`."""
    if name not in RENAMED[module]:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    new_name = RENAMED[module][name]
    warnings.warn(
        f"{module}.{name} is now called {new_name}; the old name goes with 0.3",
        DeprecationWarning,
        stacklevel=3,
    )
    return getattr(import_module(module), new_name)


def renamed_attribute(name: str, new_name: str) -> property:
    """Return a property under an attribute's or method's old name, which warns."""

    def read(instance: object) -> Any:
        """Old name of another attribute."""
        warnings.warn(
            f"{type(instance).__name__}.{name} is now called {new_name}; "
            "the old name goes with 0.3",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(instance, new_name)

    return property(read)
