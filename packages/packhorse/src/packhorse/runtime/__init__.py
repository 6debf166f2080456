"""From texts to results: models that are loaded and run, all at once or as requests arrive.

`load` opens a model as an `Encoder`, which runs all its inputs at once; a `PackRunner` packs
requests that arrive one by one. `calibrate` and `quantize` store vectors in fewer bytes, `maxsim`
compares those of tokens. The other names are what these return.
"""

from typing import TYPE_CHECKING

from packhorse.exports import lazy_exports

if TYPE_CHECKING:
    from packhorse.results import (
        Answer,
        Classified,
        Entity,
        Filled,
        Hidden,
        Ranked,
        SparseVector,
        maxsim,
    )
    from packhorse.runtime.encoder import Encoder
    from packhorse.runtime.loading import load
    from packhorse.runtime.precision import CalibrationWarning, calibrate, quantize
    from packhorse.runtime.runner import PackRunner
    from packhorse.runtime.statistics import RunnerStats
    from packhorse.runtime.tasks import TruncationWarning
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "packhorse.results": [
                "Answer",
                "Classified",
                "Entity",
                "Filled",
                "Hidden",
                "Ranked",
                "SparseVector",
                "maxsim",
            ],
            "packhorse.runtime.encoder": ["Encoder"],
            "packhorse.runtime.loading": ["load"],
            "packhorse.runtime.precision": ["CalibrationWarning", "calibrate", "quantize"],
            "packhorse.runtime.runner": ["PackRunner"],
            "packhorse.runtime.statistics": ["RunnerStats"],
            "packhorse.runtime.tasks": ["TruncationWarning"],
        },
    )

__all__ = [
    "Answer",
    "CalibrationWarning",
    "Classified",
    "Encoder",
    "Entity",
    "Filled",
    "Hidden",
    "PackRunner",
    "Ranked",
    "RunnerStats",
    "SparseVector",
    "TruncationWarning",
    "calibrate",
    "load",
    "maxsim",
    "quantize",
]
