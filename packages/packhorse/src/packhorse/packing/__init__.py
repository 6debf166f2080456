"""Packing for your own training code: plan which sequences go together, lay them end to end.

    packs = plan(lengths=[len(ids) for ids in sequences], capacity=4096)
    packed = Packed.build([sequences[index] for index in packs[0]])

- `plan` and `assign` (module `histogram`) pack a whole dataset by its lengths; `histogram_of`
  counts them.
- `OnlinePacker` (module `online`) packs sequences as they arrive.
- `Packed` (module `batch`) is the batch that every model takes: tokens, positions, boundaries.
- `SequenceCollator` (module `collator`) makes such batches in a torch DataLoader.

`packhorse.attention.attend` is attention over such a batch. The guide "Pack your own model" shows
all of it at work. Each module is imported on first use; the first two do not need torch.
"""

from typing import TYPE_CHECKING

from packhorse.exports import lazy_exports

if TYPE_CHECKING:
    from packhorse.packing.batch import Packed
    from packhorse.packing.collator import SequenceCollator
    from packhorse.packing.histogram import Assignment, PackingPlan, assign, histogram_of, plan
    from packhorse.packing.online import OnlinePacker
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "packhorse.packing.batch": ["Packed"],
            "packhorse.packing.collator": ["SequenceCollator"],
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

__all__ = [
    "Assignment",
    "OnlinePacker",
    "Packed",
    "PackingPlan",
    "SequenceCollator",
    "assign",
    "histogram_of",
    "plan",
]
