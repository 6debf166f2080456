"""The only place where foreign names live: configuration keys, tensors, heads and architectures.

A reader returns a checkpoint as it found it; here it gets our names, and `exporting` gives foreign
ones back from the same tables, those of `families`.

Canonical foreign names are those of the class with heads, as transformers writes them today; what
differs from file to file (a prefix left off or another one, `gamma` and `beta`, the bias of the
word scores under two names) is evened out by `canonical`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from packhorse.checkpoint.names.exporting import export as export
from packhorse.checkpoint.names.exporting import export_labels as export_labels
from packhorse.checkpoint.names.exporting import prefixed as prefixed
from packhorse.checkpoint.names.families import BERT as BERT
from packhorse.checkpoint.names.families import (
    PREFIXES,
    PROBLEMS,
    Family,
    encoder_modules,
    family_of,
    parts,
    source,
)
from packhorse.checkpoint.names.families import Table as Table
from packhorse.checkpoint.names.families import sources as sources
from packhorse.checkpoint.names.families import table as table
from packhorse.checkpoint.names.understanding import architectures
from packhorse.checkpoint.names.understanding import understand as understand
from packhorse.errors import CheckpointError, InputError
from packhorse.model.config import BertConfig

OLD_KINDS = {"gamma": "weight", "beta": "bias"}
# Encoders of sentence-transformers left these behind and kept the architecture they came from.
PRETRAINING_HEADS = ("mlm", "nsp", "replaced")


class ResizeWarning(UserWarning):
    """Tables of words or positions are not as they were in the file."""


@dataclass(frozen=True)
class Found:
    """A checkpoint as it was read, its tensors under canonical names."""

    raw: dict[str, Any]
    family: Family
    tensors: dict[str, Tensor]
    spelling: dict[str, str]  # canonical name → the name in the file
    root: str  # what the file writes before the encoder's tensors
    foreign: Callable[[str], str] = str  # of a name here, what the file's format would make of it

    def spell(self, name: str) -> str:
        """The name in the file, or what it would be."""
        if name in self.spelling:
            return self.spelling[name]
        if name == source("heads.mlm.decoder.bias", self.family):
            name = self.family.second_bias or name  # as it is written where the scores are tied
        if name.startswith(self.family.prefix):
            return self.foreign(self.root + name.removeprefix(self.family.prefix))
        return self.foreign(_around(self.root, self.family) + name)


def canonical(
    raw: dict[str, Any],
    tensors: dict[str, Tensor],
    called: Mapping[str, str] | None = None,
    foreign: Callable[[str], str] = str,
) -> Found:
    """Give the tensors their canonical names; `tensors` is emptied, so that none is held twice.

    `called` says what a tensor is called in the file, where it is not its key here, and `foreign`
    what one that is not there would be called.
    """
    family = family_of(raw)
    root = _root(tensors, family)
    spelling = _spelling(tensors, family, root)
    renamed = {name: tensors.pop(theirs) for name, theirs in spelling.items()}
    in_file = {name: (called or {}).get(theirs, theirs) for name, theirs in spelling.items()}
    return Found(raw, family, renamed, in_file, root, foreign)


def _root(names: Collection[str], family: Family) -> str:
    """What stands before the encoder's tensors: told by its table of words."""
    ending = source("bert.embed.words.weight", family).removeprefix(family.prefix)
    roots = {name.removesuffix(ending) for name in names if f".{name}".endswith(f".{ending}")}
    if not roots:
        return family.prefix if any(name.startswith(family.prefix) for name in names) else ""
    likely = roots & {family.prefix, ""} or roots
    root = max(likely)
    if len(likely) > 1 and family.prefix not in likely:
        raise CheckpointError(f"there are several encoders, under {', '.join(sorted(roots))}")
    attribute = f"{root.rstrip('.').rpartition('.')[2]}."
    if attribute != family.prefix and attribute in PREFIXES:
        raise CheckpointError(
            f"the tensors are named {root}…, but those of the configuration's model_type "
            f"{family.prefix}…; one of the two is not this model's"
        )
    return root


def _around(root: str, family: Family) -> str:
    """What stands before the heads: all of the root but the name of the encoder itself."""
    if f".{root}".endswith(f".{family.prefix}"):
        return root.removesuffix(family.prefix)
    before, dot, _ = root.rstrip(".").rpartition(".")
    return before + dot


def _spelling(names: Collection[str], family: Family, root: str) -> dict[str, str]:
    """Canonical name → name as it is."""
    encoder, around = encoder_modules(family), _around(root, family)
    whole = root == around + family.prefix  # all below the root is the encoder's
    result: dict[str, str] = {}
    for name in names:
        module, dot, kind = name.rpartition(".")
        new = module + dot + OLD_KINDS.get(kind, kind)
        rest = new.removeprefix(root)
        if not new.startswith(root):
            new = new.removeprefix(around)
        else:
            new = family.prefix + rest if whole or rest.split(".")[0] in encoder else rest
        if new in result:
            raise CheckpointError(f"{name} and {result[new]} are two names of one tensor")
        result[new] = name
    bias = source("heads.mlm.decoder.bias", family)
    if family.second_bias in result and bias not in result:
        result[bias] = result.pop(family.second_bias)
    return result


def config(found: Found) -> BertConfig:
    """Our configuration; keys we do not know are ignored."""
    result = understand(found.raw)
    if result.layers > len(found.tensors):  # before a thousand layers are built to find out
        raise CheckpointError(
            f"config: {result.layers} layers in a file of {len(found.tensors)} tensors"
        )
    return result


def heads(found: Found) -> tuple[str, ...]:
    """The heads to build: those the architecture promises and those that the tensors begin.

    What a begun head lacks is then missed when the tensors are placed. Of a pretraining head an
    architecture that does not promise it may leave a part behind. `classifier` on a pooler is a
    head on sequences, otherwise on tokens, unless the architecture says which: old token
    classifiers keep a pooler that they do not use. To be called after `tied`, which drops a copy
    of the embeddings that would begin a head.
    """
    family, classes = found.family, architectures(found.raw, found.family)
    promised = _promised(found, classes)
    if family.heads_by_class:
        return _by_class(found, classes, promised)
    begun = {head for head in family.heads if _begun(found, head)}
    if classes:
        begun -= {head for head in PRETRAINING_HEADS if not _whole(found, head)}
    if "replaced" in begun and not _whole(found, "mlm"):
        begun.discard("mlm")  # of the generator, which is a model of its own
    apart = _needed(family.heads["classify"]) - _needed(family.heads["tokens"])
    on_sequences = "classify" in promised or (
        "tokens" not in promised and not apart.isdisjoint(found.tensors)
    )
    begun.discard("tokens" if on_sequences else "classify")
    return tuple(head for head in family.heads if head in promised | begun)


def _by_class(found: Found, classes: list[str], promised: set[str]) -> tuple[str, ...]:
    """Without a class, words can be scored; what else a classifier is for, no one can tell."""
    if classes:
        return tuple(head for head in found.family.heads if head in promised)
    if source("heads.classify.dense.weight", found.family) in found.tensors:
        raise CheckpointError("config: architectures is missing; it says what the classifier tells")
    begun = source("heads.mlm.dense.weight", found.family) in found.tensors
    return ("mlm",) if begun else ()


def _promised(found: Found, classes: Collection[str]) -> set[str]:
    every = {head for name in classes for head in found.family.architectures[name]}
    return {
        head
        for head in every
        if head not in PRETRAINING_HEADS or not _own(found, head).isdisjoint(found.tensors)
    }


def _begun(found: Found, head: str) -> bool:
    """Is a tensor there that is the head's own?

    All of its own without any of the pooler that it stands on is what a head left behind.
    """
    needed, own = _needed(found.family.heads[head]), _own(found, head)
    there = needed & found.tensors.keys()
    return not own.isdisjoint(there) and (there != own or own == needed)


def _whole(found: Found, head: str) -> bool:
    needed = _needed(found.family.heads.get(head, {}))
    return needed - {source("heads.mlm.decoder.weight", found.family)} <= found.tensors.keys()


def _own(found: Found, head: str) -> set[str]:
    """What no other head shares; the pooler is that of the head that is nothing else."""
    needed = _needed(found.family.heads[head])
    return {name for name in needed if not name.startswith(found.family.prefix)} or needed


def _needed(entries: Table) -> set[str]:
    modules = [module for entry in entries.values() for module in parts(entry)]
    return {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}


def labels(found: Found, heads: Collection[str]) -> tuple[str, ...]:
    """The classifier's labels by number; where they have no names, those transformers gives."""
    head = next((head for head in ("classify", "tokens") if head in heads), None)
    if head is None:
        return ()
    if named := named_labels(found.raw):
        return named
    count = found.raw.get("num_labels", 2)
    classifier = f"{found.family.heads[head][f'heads.{head}.dense']}.weight"
    if "num_labels" not in found.raw and classifier in found.tensors:
        count = len(found.tensors[classifier])
    if type(count) is not int or not 1 <= count <= 1_000_000:
        raise CheckpointError(f"config: num_labels {count!r} is not a count of labels")
    return tuple(f"LABEL_{number}" for number in range(count))


def named_labels(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels that a configuration names; none where it does not."""
    named = raw.get("id2label") or {}
    try:
        numbered = sorted((int(number), str(label)) for number, label in named.items())
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError("config: id2label does not map numbers to names") from error
    if [number for number, _ in numbered] != list(range(len(numbered))):
        raise CheckpointError("config: id2label does not number its labels from 0 without a gap")
    return tuple(label for _, label in numbered)


def problem(raw: Mapping[str, Any], labels: Collection[str]) -> str:
    """What a classifier's outputs mean; a single output without a word on it is a regression."""
    said = raw.get("problem_type")
    if said is None:
        return "regression" if len(labels) == 1 else "single_label"
    if not isinstance(said, str) or said not in PROBLEMS:
        raise CheckpointError(
            f"config: problem_type {said!r} is unknown; there are {', '.join(PROBLEMS)}"
        )
    return PROBLEMS[said]


def tied(found: Found) -> bool:
    """Are words scored by their own embeddings? A copy of these in the file is then dropped.

    Scores that differ from the embeddings are used as they are, whatever the configuration says.
    """
    if found.raw.get("tie_word_embeddings", True) is False:
        return False
    decoder = source("heads.mlm.decoder.weight", found.family)
    words = found.tensors.get(source("bert.embed.words.weight", found.family))
    scores = found.tensors.get(decoder)
    if scores is not None:
        if words is None or words.dtype != scores.dtype or not torch.equal(words, scores):
            return False
        del found.tensors[decoder]
    _check_bias(found)
    return True


def _check_bias(found: Found) -> None:
    """Of tied scores both biases are one; of others transformers adds the decoder's alone."""
    name, second = source("heads.mlm.decoder.bias", found.family), found.family.second_bias
    if second is None or name not in found.tensors or second not in found.tensors:
        return
    one, other = found.tensors[name], found.tensors[second]
    unlike = one.shape != other.shape or ((one != other) & ~(one.isnan() & other.isnan())).any()
    if unlike:
        raise CheckpointError(
            f"{found.spell(name)} and {found.spell(second)} are two names of one tensor, "
            f"and they differ"
        )


def resize(
    found: Found,
    *,
    vocab_size: int | None = None,
    max_positions: int | None = None,
    repeat_positions: bool = False,
) -> Found:
    """Pad or crop the tables of words and positions, at their end; warns of all that changed.

    A new word is zeros and scores zero. A new position would mean nothing to the model, so it is
    refused, unless `repeat_positions`: then the table starts over, as Longformer's was made.
    """
    for what, size in {"vocab_size": vocab_size, "max_positions": max_positions}.items():
        if size is not None and size < 1:
            raise InputError(f"{what} is {size}; it must be at least 1")
    keys, offset, raw = found.family.config, config(found).position_offset, dict(found.raw)
    if vocab_size is not None:
        raw[keys["vocab_size"]] = vocab_size
    if max_positions is not None:
        raw[keys["max_positions"]] = max_positions + offset
    result = replace(found, raw=raw)
    config(result)  # refuses what is beyond all bounds before it is made
    changes = []
    stored = "bert.embed.positions" in found.family.tensors
    if max_positions is not None and not stored:
        _check_rotary(config(found).max_positions, max_positions)
    elif max_positions is not None:  # first: words are never refused
        changes += _resize_positions(result, max_positions, offset, repeat_positions)
    if vocab_size is not None:
        changes += _resize_words(result, vocab_size)
    if changes:
        warnings.warn("; ".join(changes), ResizeWarning, stacklevel=3)
    return result


def _check_rotary(stored: int, size: int) -> None:
    """Positions that are computed have no table to crop or to repeat."""
    if size > stored:
        raise InputError(
            f"the model was made for {stored} positions, not {size}: those beyond are computed, "
            f"but were never learnt from"
        )


def _resize_words(found: Found, size: int) -> list[str]:
    changes = []
    for ours in ("bert.embed.words.weight", "heads.mlm.decoder.weight", "heads.mlm.decoder.bias"):
        name = source(ours, found.family)
        tensor = found.tensors.get(name)
        if tensor is None or not tensor.ndim or len(tensor) == size:
            continue
        missing = max(0, size - len(tensor))
        zeros = tensor.new_zeros(missing, *tensor.shape[1:])
        found.tensors[name] = torch.cat([tensor, zeros]) if missing else tensor[:size].clone()
        how = "padded with zeros" if missing else "cropped"
        changes.append(f"{found.spell(name)}: {how} from {len(tensor)} rows to {size}")
    return changes


def _resize_positions(found: Found, size: int, offset: int, repeat: bool) -> list[str]:
    name = source("bert.embed.positions.weight", found.family)
    tensor = found.tensors.get(name)
    if tensor is None or not tensor.ndim or not 0 < len(tensor) - offset != size:
        return []
    stored = len(tensor) - offset
    if stored < size and not repeat:
        raise InputError(
            f"{found.spell(name)} holds {stored} positions, not {size}: those beyond were never "
            f"learnt; --repeat-positions (repeat_positions=True) starts the table over"
        )
    again = torch.arange(size, device=tensor.device) % stored
    found.tensors[name] = torch.cat([tensor[:offset], tensor[offset:][again]])
    how = "repeated" if stored < size else "cropped"
    return [f"{found.spell(name)}: {how} from {len(tensor)} rows to {size + offset}"]
