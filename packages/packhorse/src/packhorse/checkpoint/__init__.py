"""Checkpoints: from a model's files to a model that runs, and back.

`sources` finds the files and tells their format; the format's reader returns what it found, tensors
under their foreign names (`Contents`); `names` alone knows what those mean; the model is then built
without weights, on the `meta` device, and every tensor is checked, cast and put in place one by one
(`placing`), so that nothing is ever random and little is ever held twice. Strict throughout: a
tensor that is missing, has another shape, is unknown or is not finite is an error that names it.

A checkpoint has the heads whose weights it holds. Vectors need none: the layout of
sentence-transformers says how they are made; without one, an encoder that was not fine-tuned for
another task gets the mean of its hidden states, not normalised, as sentence-transformers itself
would give it.
"""

from packhorse.checkpoint.contents import Contents
from packhorse.checkpoint.loading import Checkpoint, load, read, tokenizer
from packhorse.checkpoint.placing import Report
from packhorse.checkpoint.writing import write
from packhorse.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Contents",
    "Report",
    "load",
    "read",
    "tokenizer",
    "write",
]
