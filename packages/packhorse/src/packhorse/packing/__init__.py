"""Packing: group sequence lengths into packs, then lay the sequences out as one flat batch.

- `histogram` plans a whole dataset from the histogram of its lengths (offline).
- `online` packs sequences as they arrive.
- `batch` builds `Packed`, the value that every model takes.

Each module is imported on first use; the first two do not need torch.
"""

from typing import TYPE_CHECKING

from packhorse.exports import lazy_exports

if TYPE_CHECKING:
    from packhorse.packing.batch import Packed
    from packhorse.packing.histogram import Assignment, PackingPlan, assign, histogram_of, plan
    from packhorse.packing.online import OnlinePacker
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "packhorse.packing.batch": ["Packed"],
            "packhorse.packing.histogram": [
                "Assignment",
                "PackingPlan",
                "assign",
                "histogram_of",
                "plan",
            ],
            "packhorse.packing.online": ["OnlinePacker"],
        },
    )

__all__ = ["Assignment", "OnlinePacker", "Packed", "PackingPlan", "assign", "histogram_of", "plan"]
