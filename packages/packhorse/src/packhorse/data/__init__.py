"""Data that goes in and comes out: tables of texts, corpora, task files, files of results.

Public are the packed rows that `packhorse data build` writes. Each package or module is for one
kind of data. Imports between them point down only, and names on one level do not import each other
(tests/data/test_rooms.py):

`corpus | tasks > records > packed | sources | columns > tables > delimited | output | order`

`order` is what both loaders share, that of packed rows and that of tasks: which rows come when, and
on which rank.
"""

from typing import TYPE_CHECKING

from packhorse.exports import lazy_exports

if TYPE_CHECKING:
    from packhorse.data.packed.loader import Loader, PretrainingBatch
    from packhorse.data.packed.shards import Dataset, open_dataset
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "packhorse.data.packed.loader": ["Loader", "PretrainingBatch"],
            "packhorse.data.packed.shards": ["Dataset", "open_dataset"],
        },
    )

__all__ = ["Dataset", "Loader", "PretrainingBatch", "open_dataset"]
