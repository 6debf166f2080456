"""Tensors that a user says are no part of the model (`--ignore PATTERN`).

They are taken out before the others get their names, because a second encoder under another scope
would make those ambiguous. A pattern must not reach what the model is made of: that is an error, as
a layer left out would change every result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import Tensor

from packhorse.checkpoint import names
from packhorse.checkpoint.names.families import parts
from packhorse.errors import InputError

Ignored = dict[str, str]  # name in the file → the pattern that matched it
SHOWN = 8
WORDS = re.compile(r"(.*[/.])?(word|tok)_embeddings(\.weight)?")
ANY_LAYER = "987654321"  # stands for the number of a layer while its name is spelled


def take_out(tensors: dict[str, Tensor], patterns: Sequence[str]) -> Ignored:
    """Drop what matches one of the patterns."""
    ignored: Ignored = {}
    for pattern in patterns:
        for name in [name for name in tensors if fnmatchcase(name, pattern)]:
            del tensors[name]
            ignored[name] = pattern
        if not tensors:
            raise InputError(f"--ignore {pattern} (ignore=) leaves no tensor of the model")
    # Without any table of words there is nothing to tell an encoder's other weights by.
    if not any(map(WORDS.fullmatch, tensors)):
        check_needed(ignored, filter(WORDS.fullmatch, ignored))
    return ignored


def check(ignored: Ignored, found: names.Found) -> None:
    """Refuse to ignore a weight of the encoder."""
    weights = []
    for entry in found.family.tensors.values():
        for module in parts(entry):
            for kind in ("weight", "bias"):
                spelled = found.spell(f"{module}.{kind}".format(ANY_LAYER))
                weights.append(re.escape(spelled).replace(ANY_LAYER, r"\d+"))
    encoder = re.compile("|".join(weights))
    check_needed(ignored, [name for name in ignored if encoder.fullmatch(name)])


def check_needed(ignored: Ignored, needed: Iterable[str]) -> None:
    """Refuse to ignore any of these."""
    for name in needed:
        if name in ignored:
            raise InputError(
                f"--ignore {ignored[name]} (ignore=) matches {name}, which the model needs; "
                f"write the pattern more narrowly"
            )


def notes(ignored: Ignored) -> tuple[str, ...]:
    """A note of what was ignored."""
    listed = ", ".join(list(ignored)[:SHOWN]) + (", …" if len(ignored) > SHOWN else "")
    return (f"ignored: {len(ignored)} tensors ({listed})",) if ignored else ()
