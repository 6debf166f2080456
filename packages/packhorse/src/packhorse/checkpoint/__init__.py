"""Checkpoints: read a model's files in any format, build the model, and write it back.

`sources` finds the files and recognizes their format; the format's reader returns the tensors under
their foreign names (`Contents`); only `names` knows what those mean; `building` then builds the
model without weights, on the `meta` device, and checks, casts and places every tensor one by one,
so that nothing is initialized at random and little is ever held twice. Strict throughout: a tensor
that is missing, has another shape, is unknown or is not finite is an error that names it.

A checkpoint has the heads whose weights it holds. Vectors need no weights: the layout of
sentence-transformers says how they are computed; without one, an encoder that was not fine-tuned
for another task gets the mean of its hidden states, not normalized, as in sentence-transformers.
"""

from typing import TYPE_CHECKING

from packhorse.exports import lazy_exports

if TYPE_CHECKING:
    from packhorse.checkpoint.building import LoadReport
    from packhorse.checkpoint.contents import Contents
    from packhorse.checkpoint.hub import resolve
    from packhorse.checkpoint.loading import Checkpoint, load, read, tokenizer
    from packhorse.checkpoint.writing import write
    from packhorse.errors import CheckpointError
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "packhorse.checkpoint.building": ["LoadReport"],
            "packhorse.checkpoint.contents": ["Contents"],
            "packhorse.checkpoint.hub": ["resolve"],
            "packhorse.checkpoint.loading": ["Checkpoint", "load", "read", "tokenizer"],
            "packhorse.checkpoint.writing": ["write"],
            "packhorse.errors": ["CheckpointError"],
        },
    )

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Contents",
    "LoadReport",
    "load",
    "read",
    "resolve",
    "tokenizer",
    "write",
]
