"""Translate the names of other libraries: configuration keys, tensors, heads and architectures.

No other package knows these names. A reader returns a checkpoint's tensors under the names in its
files. `canonical` renames them to those that transformers writes today for the class with heads,
the *canonical names*. That evens out what differs from file to file: a prefix that is missing or
another one, `gamma` and `beta`, the two names of the bias of the word scores. The tables of
`families` map our names to canonical ones; `exporting` writes files from the same tables.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from packhorse.checkpoint.names.configs import architectures
from packhorse.checkpoint.names.configs import named_labels as named_labels
from packhorse.checkpoint.names.configs import problem as problem
from packhorse.checkpoint.names.configs import understand as understand
from packhorse.checkpoint.names.exporting import export as export
from packhorse.checkpoint.names.exporting import export_labels as export_labels
from packhorse.checkpoint.names.exporting import prefixed as prefixed
from packhorse.checkpoint.names.families import BERT as BERT
from packhorse.checkpoint.names.families import (
    PREFIXES,
    Family,
    decoder_source,
    encoder_modules,
    family_of,
    modules_of,
)
from packhorse.checkpoint.names.families import Table as Table
from packhorse.checkpoint.names.families import siblings as siblings
from packhorse.checkpoint.names.families import source as source
from packhorse.checkpoint.names.families import sources as sources
from packhorse.checkpoint.names.families import table as table
from packhorse.errors import CheckpointError, InputError
from packhorse.model.config import BertConfig

OLD_KINDS = {"gamma": "weight", "beta": "bias"}
# Heads that models of sentence-transformers dropped while their `architectures` still names them.
PRETRAINING_HEADS = ("mlm", "nsp", "replaced")
LABEL_LIMIT = 1_000_000  # num_labels comes from a file, and a head of that width would be allocated


class ResizeWarning(UserWarning):
    """The table of words or of positions was padded or cropped on loading."""


@dataclass(frozen=True)
class CanonicalCheckpoint:
    """A checkpoint's configuration and its tensors under canonical names."""

    raw: dict[str, Any]  # the configuration, under the family's keys
    family: Family
    tensors: dict[str, Tensor]
    in_file: dict[str, str]  # canonical name → name in the file
    root: str  # what precedes the encoder's tensors in the file
    foreign: Callable[[str], str] = str  # a name in transformers → the name in the file's format

    def name_in_file(self, name: str) -> str:
        """The name of a tensor in the file, or the name it would have there."""
        if name in self.in_file:
            return self.in_file[name]
        if name == decoder_source("bias", self.family):
            name = self.family.second_bias or name  # files with tied scores write this one
        if name.startswith(self.family.prefix):
            return self.foreign(self.root + name.removeprefix(self.family.prefix))
        return self.foreign(_head_root(self.root, self.family) + name)


def canonical(
    raw: dict[str, Any],
    tensors: dict[str, Tensor],
    names_in_file: Mapping[str, str] | None = None,
    foreign: Callable[[str], str] = str,
) -> CanonicalCheckpoint:
    """Give the tensors their canonical names; `tensors` is emptied, so that none is held twice.

    names_in_file: key in `tensors` → name in the file, where the two differ. foreign: translates
    the name of a tensor that is absent into the file's format, for messages.
    """
    family = family_of(raw)
    root = _root(tensors, family)
    keys = _canonical_names(tensors, family, root)
    renamed = {name: tensors.pop(key) for name, key in keys.items()}
    in_file = {name: (names_in_file or {}).get(key, key) for name, key in keys.items()}
    old = tuple(family.renamed)
    if old and any(
        key.removeprefix(_head_root(root, family)).startswith(old) for key in keys.values()
    ):
        raw = {**raw, **family.if_renamed}
    return CanonicalCheckpoint(raw, family, renamed, in_file, root, foreign)


def canonical_names(raw: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Canonical name → name, of some tensors of a model; `names` need not be all."""
    family = family_of(raw)
    return _canonical_names(names, family, _root(names, family))


def _root(names: Collection[str], family: Family) -> str:
    """What precedes the names of the encoder's tensors, recognized by its table of words."""
    ending = source("bert.embed.words.weight", family).removeprefix(family.prefix)
    roots = {name.removesuffix(ending) for name in names if f".{name}".endswith(f".{ending}")}
    if not roots:
        return family.prefix if any(name.startswith(family.prefix) for name in names) else ""
    # The encoder's usual prefix is preferred to no prefix, and both to any other.
    likely = roots & {family.prefix, ""} or roots & set(family.other_prefixes) or roots
    if len(likely) > 1 and family.prefix not in likely:
        raise CheckpointError(f"there are several encoders, under {', '.join(sorted(roots))}")
    root = family.prefix if family.prefix in likely else next(iter(likely))
    attribute = f"{root.rstrip('.').rpartition('.')[2]}."
    if attribute not in (family.prefix, *family.other_prefixes) and attribute in PREFIXES:
        raise CheckpointError(
            f"the tensors are named {root}…, but those of the configuration's model_type "
            f"{family.prefix}…; one of the two is not this model's"
        )
    return root


def _head_root(root: str, family: Family) -> str:
    """What precedes the names of the heads: the root without the encoder's own attribute."""
    if f".{root}".endswith(f".{family.prefix}"):
        return root.removesuffix(family.prefix)
    before, dot, _ = root.rstrip(".").rpartition(".")
    return before + dot


def _canonical_names(names: Collection[str], family: Family, root: str) -> dict[str, str]:
    """Canonical name → name as it is."""
    encoder = encoder_modules(family)
    head_root = _head_root(root, family)
    encoder_only = root == head_root + family.prefix  # everything below the root is the encoder's
    result: dict[str, str] = {}
    for name in names:
        module, dot, kind = name.rpartition(".")
        new = module + dot + OLD_KINDS.get(kind, kind)
        rest = new.removeprefix(root)
        if not new.startswith(root):
            new = new.removeprefix(head_root)
        else:
            new = family.prefix + rest if encoder_only or rest.split(".")[0] in encoder else rest
        new = _todays_name(new, family)
        if new in result:
            raise CheckpointError(f"{name} and {result[new]} are two names of one tensor")
        result[new] = name
    bias = decoder_source("bias", family)
    if bias is not None and family.second_bias in result and bias not in result:
        result[bias] = result.pop(family.second_bias)
    return result


def _todays_name(name: str, family: Family) -> str:
    for old, new in family.renamed.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def config(checkpoint: CanonicalCheckpoint) -> BertConfig:
    """Our configuration; unknown keys of the foreign one are ignored."""
    result = understand(checkpoint.raw)
    # Checked here, before the model is built: num_hidden_layers may be any number.
    if result.stored_layers > len(checkpoint.tensors):
        raise CheckpointError(
            f"config: {result.stored_layers} layers in a file of {len(checkpoint.tensors)} tensors"
        )
    return result


def heads(checkpoint: CanonicalCheckpoint) -> tuple[str, ...]:
    """The heads to build: those that the architecture requires, and those with tensors present.

    A head of which only some tensors are present is built too, so that placing the tensors reports
    the others as missing. The exception are pretraining heads that the architecture does not
    require: files often keep a part of them. `classifier` with a pooler classifies sequences,
    otherwise tokens, unless the architecture says which: old token classifiers keep a pooler that
    they do not use. Call this after `resolve_tied_words`, which drops the copy of the embeddings
    that would count as a tensor of the MLM head.
    """
    family = checkpoint.family
    classes = architectures(checkpoint.raw, family)
    required = _required_heads(checkpoint, classes)
    if family.heads_by_class:
        return _heads_by_class(checkpoint, classes, required)
    present = {head for head in family.heads if _is_present(checkpoint, head)}
    if classes:
        present -= {head for head in PRETRAINING_HEADS if not _is_complete(checkpoint, head)}
    if "replaced" in present and not _is_complete(checkpoint, "mlm"):
        present.discard("mlm")  # the generator's, which is another model
    pooler = _tensors_of(family.heads["classify"]) - _tensors_of(family.heads["tokens"])
    on_sequences = "classify" in required or (
        "tokens" not in required and not pooler.isdisjoint(checkpoint.tensors)
    )
    present.discard("tokens" if on_sequences else "classify")
    return tuple(head for head in family.heads if head in required | present)


def _heads_by_class(
    checkpoint: CanonicalCheckpoint, classes: list[str], required: set[str]
) -> tuple[str, ...]:
    """The heads of a family whose heads share names; without a class only MLM is recognized."""
    if classes:
        return tuple(head for head in checkpoint.family.heads if head in required)
    if source("heads.classify.dense.weight", checkpoint.family) in checkpoint.tensors:
        raise CheckpointError(
            "config: architectures is missing, so the classifier's task is unknown"
        )
    scores = checkpoint.family.heads.get("mlm", {})
    first = "heads.mlm.dense" if "heads.mlm.dense" in scores else "heads.mlm.decoder"
    found = scores and source(f"{first}.weight", checkpoint.family) in checkpoint.tensors
    return ("mlm",) if found else ()


def _required_heads(checkpoint: CanonicalCheckpoint, classes: Collection[str]) -> set[str]:
    """The heads of the classes, without pretraining heads of which no tensor is present."""
    required = {head for name in classes for head in checkpoint.family.architectures[name]}
    absent = {
        head
        for head in required
        if head in PRETRAINING_HEADS
        and _unshared_tensors(checkpoint, head).isdisjoint(checkpoint.tensors)
        and not (head == "mlm" and _needs_only_embeddings(checkpoint))
    }
    return required - absent


def _needs_only_embeddings(checkpoint: CanonicalCheckpoint) -> bool:
    """Are the scores of words their embeddings and nothing else, so that no file stores them?"""
    family = checkpoint.family
    tied = checkpoint.raw.get("tie_word_embeddings", family.tied)
    return bool(tied) and list(family.heads["mlm"]) == ["heads.mlm.decoder"]


def _is_present(checkpoint: CanonicalCheckpoint, head: str) -> bool:
    """Is a tensor present that only this head has?

    No if all of them are, but nothing of the pooler that the head needs: then a library has removed
    the head and left these tensors in the file.
    """
    needed = _tensors_of(checkpoint.family.heads[head])
    unshared = _unshared_tensors(checkpoint, head)
    present = needed & checkpoint.tensors.keys()
    return not unshared.isdisjoint(present) and (present != unshared or unshared == needed)


def _is_complete(checkpoint: CanonicalCheckpoint, head: str) -> bool:
    needed = _tensors_of(checkpoint.family.heads.get(head, {}))
    tied = {decoder_source("weight", checkpoint.family)}  # stored as the embeddings
    return needed - tied <= checkpoint.tensors.keys()


def _unshared_tensors(checkpoint: CanonicalCheckpoint, head: str) -> set[str]:
    """The head's tensors outside the encoder; for the head that is only a pooler, the pooler."""
    needed = _tensors_of(checkpoint.family.heads[head])
    return {name for name in needed if not name.startswith(checkpoint.family.prefix)} or needed


def _tensors_of(entries: Table) -> set[str]:
    modules = [module for entry in entries.values() for module in modules_of(entry)]
    return {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}


def labels(checkpoint: CanonicalCheckpoint, heads: Collection[str]) -> tuple[str, ...]:
    """The classifier's labels in order; if they have no names, transformers' LABEL_0, LABEL_1 …"""
    head = next((head for head in ("classify", "tokens") if head in heads), None)
    if head is None:
        return ()
    if named := named_labels(checkpoint.raw):
        return named
    count = checkpoint.raw.get("num_labels", 2)
    classifier = f"{checkpoint.family.heads[head][f'heads.{head}.dense']}.weight"
    if "num_labels" not in checkpoint.raw and classifier in checkpoint.tensors:
        count = len(checkpoint.tensors[classifier])
    if type(count) is not int or not 1 <= count <= LABEL_LIMIT:
        raise CheckpointError(f"config: num_labels {count!r} is not a count of labels")
    return tuple(f"LABEL_{number}" for number in range(count))


def resolve_tied_words(checkpoint: CanonicalCheckpoint) -> bool:
    """Decide whether words are scored by their own embeddings; if so, drop the copy in the file.

    Score weights that differ from the embeddings are used as they are, whatever the configuration
    says.
    """
    decoder = decoder_source("weight", checkpoint.family)
    tied = checkpoint.raw.get("tie_word_embeddings", checkpoint.family.tied)
    if tied is False or decoder is None:
        return False
    words = checkpoint.tensors.get(source("bert.embed.words.weight", checkpoint.family))
    scores = checkpoint.tensors.get(decoder)
    if scores is not None:
        if words is None or words.dtype != scores.dtype or not torch.equal(words, scores):
            return False
        del checkpoint.tensors[decoder]
    _check_bias(checkpoint)
    return True


def _check_bias(checkpoint: CanonicalCheckpoint) -> None:
    """Raise if tied scores have two biases; of untied ones transformers adds the decoder's only."""
    name = decoder_source("bias", checkpoint.family)
    second_name = checkpoint.family.second_bias
    if name is None or second_name is None or not {name, second_name} <= checkpoint.tensors.keys():
        return
    bias = checkpoint.tensors[name]
    second = checkpoint.tensors[second_name]
    if bias.shape != second.shape or ((bias != second) & ~(bias.isnan() & second.isnan())).any():
        raise CheckpointError(
            f"{checkpoint.name_in_file(name)} and {checkpoint.name_in_file(second_name)} are two "
            f"names of one tensor, and they differ"
        )


def resize(
    checkpoint: CanonicalCheckpoint,
    *,
    vocab_size: int | None = None,
    max_positions: int | None = None,
    repeat_positions: bool = False,
) -> CanonicalCheckpoint:
    """Pad or crop the tables of words and positions at their end; warn of every change.

    A new word gets zeros and scores zero. A new position would mean nothing to the model, so it is
    refused unless `repeat_positions`, which starts the table over, as Longformer's was initialized.
    """
    for name, size in {"vocab_size": vocab_size, "max_positions": max_positions}.items():
        if size is not None and size < 1:
            raise InputError(f"{name} is {size}; it must be at least 1")
    keys = checkpoint.family.config
    before = config(checkpoint)
    raw = dict(checkpoint.raw)
    if vocab_size is not None:
        raw[keys["vocab_size"]] = vocab_size
    if max_positions is not None:
        raw[keys["max_positions"]] = max_positions + before.position_offset
        if before.disentangled:  # otherwise the ranges of distances would follow this number
            raw["max_relative_positions"] = before.distance_reach or before.distance_span
    result = replace(checkpoint, raw=raw)
    config(result)  # refuses sizes beyond BertConfig's bounds before anything is allocated
    changes: list[str] = []
    if max_positions is not None and not before.position_rows:
        _check_rotary(before.max_positions, max_positions)
    elif max_positions is not None:  # before the words, which are never refused
        changes += _resize_positions(
            result, max_positions, before.position_offset, repeat_positions
        )
    if vocab_size is not None:
        changes += _resize_words(result, vocab_size)
    if changes:
        warnings.warn("; ".join(changes), ResizeWarning, stacklevel=3)
    return result


def _check_rotary(trained: int, size: int) -> None:
    """Rotary positions and distances have no table that could be cropped or repeated."""
    if size > trained:
        raise InputError(
            f"the model was made for {trained} positions, not {size}: the model was not "
            f"trained on those beyond"
        )


def _resize_words(checkpoint: CanonicalCheckpoint, size: int) -> list[str]:
    changes: list[str] = []
    family = checkpoint.family
    scores = [decoder_source(kind, family) for kind in ("weight", "bias")]
    for name in filter(None, (source("bert.embed.words.weight", family), *scores)):
        tensor = checkpoint.tensors.get(name)
        if tensor is None or not tensor.ndim or len(tensor) == size:
            continue
        missing = max(0, size - len(tensor))
        zeros = tensor.new_zeros(missing, *tensor.shape[1:])
        resized = torch.cat([tensor, zeros]) if missing else tensor[:size].clone()
        checkpoint.tensors[name] = resized
        change = "padded with zeros" if missing else "cropped"
        changes.append(
            f"{checkpoint.name_in_file(name)}: {change} from {len(tensor)} rows to {size}"
        )
    return changes


def _resize_positions(
    checkpoint: CanonicalCheckpoint, size: int, offset: int, repeat: bool
) -> list[str]:
    name = source("bert.embed.positions.weight", checkpoint.family)
    tensor = checkpoint.tensors.get(name)
    if tensor is None or not tensor.ndim or not 0 < len(tensor) - offset != size:
        return []
    stored = len(tensor) - offset
    if stored < size and not repeat:
        raise InputError(
            f"{checkpoint.name_in_file(name)} holds {stored} positions, not {size}: those beyond "
            f"were never learnt; --repeat-positions (repeat_positions=True) starts the table over"
        )
    rows = torch.arange(size, device=tensor.device) % stored
    checkpoint.tensors[name] = torch.cat([tensor[:offset], tensor[offset:][rows]])
    change = "repeated" if stored < size else "cropped"
    return [f"{checkpoint.name_in_file(name)}: {change} from {len(tensor)} rows to {size + offset}"]
