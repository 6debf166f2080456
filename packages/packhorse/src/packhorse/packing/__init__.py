"""Packing: group sequence lengths into packs, then lay the sequences out as one flat batch.

- `histogram` plans a whole dataset from the histogram of its lengths (offline).
- `online` packs sequences as they arrive.
- `batch` builds `Packed`, the value that every model takes.

Each module is imported on first use; the first two do not need torch.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packhorse.packing.batch import Packed as Packed
    from packhorse.packing.histogram import Assignment as Assignment
    from packhorse.packing.histogram import PackingPlan as PackingPlan
    from packhorse.packing.histogram import assign as assign
    from packhorse.packing.histogram import histogram_of as histogram_of
    from packhorse.packing.histogram import plan as plan
    from packhorse.packing.online import OnlinePacker as OnlinePacker

_HOMES = {
    "Assignment": "packhorse.packing.histogram",
    "OnlinePacker": "packhorse.packing.online",
    "Packed": "packhorse.packing.batch",
    "PackingPlan": "packhorse.packing.histogram",
    "assign": "packhorse.packing.histogram",
    "histogram_of": "packhorse.packing.histogram",
    "plan": "packhorse.packing.histogram",
}
__all__ = [
    "Assignment",
    "OnlinePacker",
    "Packed",
    "PackingPlan",
    "assign",
    "histogram_of",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name == "Plan":
        warnings.warn(
            "packhorse.packing.Plan is now called PackingPlan", DeprecationWarning, stacklevel=2
        )
        name = "PackingPlan"
    if name not in _HOMES:
        raise AttributeError(f"module 'packhorse.packing' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
