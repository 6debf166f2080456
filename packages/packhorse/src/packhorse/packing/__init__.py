"""Packing: lengths to groups (offline and online, integers only), groups to one flat batch.

`histogram` plans a whole dataset, `online` packs as sequences arrive, `batch` builds what the model
sees. Each is imported on first use: the first two need no torch, and asking for nothing costs
nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packhorse.packing.batch import Packed as Packed
    from packhorse.packing.histogram import Assignment as Assignment
    from packhorse.packing.histogram import Plan as Plan
    from packhorse.packing.histogram import assign as assign
    from packhorse.packing.histogram import histogram_of as histogram_of
    from packhorse.packing.histogram import plan as plan
    from packhorse.packing.online import OnlinePacker as OnlinePacker

_HOMES = {
    "Assignment": "packhorse.packing.histogram",
    "OnlinePacker": "packhorse.packing.online",
    "Packed": "packhorse.packing.batch",
    "Plan": "packhorse.packing.histogram",
    "assign": "packhorse.packing.histogram",
    "histogram_of": "packhorse.packing.histogram",
    "plan": "packhorse.packing.histogram",
}
__all__ = ["Assignment", "OnlinePacker", "Packed", "Plan", "assign", "histogram_of", "plan"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'packhorse.packing' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
