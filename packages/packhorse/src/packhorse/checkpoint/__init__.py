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

from packhorse.checkpoint.building import LoadReport
from packhorse.checkpoint.contents import Contents
from packhorse.checkpoint.loading import Checkpoint, load, read, tokenizer
from packhorse.checkpoint.writing import write
from packhorse.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Contents",
    "LoadReport",
    "load",
    "read",
    "tokenizer",
    "write",
]
