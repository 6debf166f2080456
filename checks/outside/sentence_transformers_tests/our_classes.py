"""A plugin of pytest: sentence-transformers' tests with our classes, or its own accelerated.

PACKHORSE_SBERT_CLASSES says which: `ours`, `accelerated`, or `theirs`, to compare with.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import wraps
from typing import Any

import sentence_transformers
from sentence_transformers import cross_encoder, sparse_encoder
from sentence_transformers import sentence_transformer as dense

import packhorse
from packhorse.errors import PackhorseError
from packhorse.sbert import arguments

HOMES = {
    "SentenceTransformer": (dense, dense.model),
    "CrossEncoder": (cross_encoder, cross_encoder.model),
    "SparseEncoder": (sparse_encoder, sparse_encoder.model),
}


def accelerated(kind: type[Any]) -> None:
    """Accelerate each object of a class, if it can be, as soon as it is made."""
    make = kind.__init__

    @wraps(make)
    def make_and_accelerate(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        with suppress(PackhorseError):
            packhorse.accelerate(self)

    kind.__init__ = make_and_accelerate


# Our classes ask for the library's where they are given modules; its names are ours below.
LIBRARY = {name: getattr(sentence_transformers, name) for name in HOMES}
arguments.library_class = LIBRARY.__getitem__

for name, homes in HOMES.items():
    if os.environ["PACKHORSE_SBERT_CLASSES"] == "ours":
        for home in (sentence_transformers, *homes):
            setattr(home, name, getattr(packhorse, name))
    elif os.environ["PACKHORSE_SBERT_CLASSES"] == "accelerated":
        accelerated(getattr(sentence_transformers, name))
