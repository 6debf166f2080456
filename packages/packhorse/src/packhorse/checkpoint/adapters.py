"""LoRA adapters (Hu et al. 2021) in PEFT's layout, merged into the weights of their base model.

A folder has adapter_config.json and adapter_model.safetensors: two narrow matrices for each weight
that was adapted, whose product is added to it, and whole tensors for what was trained beside them
(`modules_to_save`: the head of a classifier; biases). Merging costs nothing when the model runs,
and the result is an ordinary model: any kernel, head, format or device. The price is a copy of the
weights for each adapter that is open.

Rank-stabilized scaling (`use_rslora`), patterns of ranks and alphas, and magnitudes (DoRA, Liu et
al. 2024) are honored; what else would change a result is refused by name. Which modules were
adapted is read off the tensors and not from `target_modules`, which is a pattern.
"""

# torch leaves some of its functions untyped (norm, unsqueeze …).
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packhorse.checkpoint import files, names, torchbin
from packhorse.checkpoint.names import CanonicalCheckpoint
from packhorse.checkpoint.safetensors import read_tensors
from packhorse.errors import CheckpointError
from packhorse.json_types import is_object

CONFIG = "adapter_config.json"
WEIGHTS: dict[str, Callable[[Path, str], Mapping[str, Tensor]]] = {
    "adapter_model.safetensors": read_tensors,
    "adapter_model.bin": lambda folder, name: torchbin.read(folder, name)[0],
}
PREFIX = "base_model.model."  # of all names in PEFT's files
PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector)(\.weight)?"
)
PATTERNS = ("rank_pattern", "alpha_pattern")
REPETITION = re.compile(r"[*+{]|(?<!\()\?")  # the ? of (?: repeats nothing
REPEATED_GROUP = re.compile(r"\)[*+?{]")
LONGEST_PATTERN = 500  # characters
MOST_STEPS = 5e8  # some ten seconds
SAVED = re.compile(r"\.(modules_to_save(\.default)?|base_layer)(?=\.)")  # wrappers, in older files
# Settings that would change results: refused unless null, false or empty.
UNSUPPORTED = (
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "velora_config",
    "monteclora_config",
    "kasa_config",
    "arrow_config",
)
# Initializations that change the base's weights too: the adapter fits only the changed weights.
CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
TASKS = {  # PEFT's name of a task → the end of the class of transformers
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
    "FEATURE_EXTRACTION": None,  # whatever class the base has
}


@dataclass(frozen=True, eq=False)
class LowRankChange:
    """What is added to one weight: the product of two narrow matrices."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    scale: float
    magnitude: Tensor | None = None  # [out] the length that each row gets (DoRA)
    transposed: bool = False  # a table of embeddings, [in, out]

    def apply(self, weight: Tensor) -> Tensor:
        """The merged weight, in fp32 or wider."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        added = (self.b.to(wide) @ self.a.to(wide)) * self.scale
        merged = weight.to(wide) + (added.t() if self.transposed else added)
        if self.magnitude is not None:
            merged = merged * (self.magnitude.to(wide) / merged.norm(dim=1)).unsqueeze(1)
        return merged

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight that it changes."""
        rows, columns = len(self.b), self.a.shape[1]
        return (columns, rows) if self.transposed else (rows, columns)


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter as read from its folder, under the names of its file."""

    folder: Path
    raw: Mapping[str, Any]
    changes: dict[str, LowRankChange] = field(repr=False)  # by module
    saved: dict[str, Tensor] = field(repr=False)  # whole tensors, by name


def is_adapter(folder: Path) -> bool:
    """Is this the folder of an adapter?"""
    return files.exists(folder, CONFIG)


def base(folder: Path) -> str:
    """The path or hub id of the model that an adapter was trained on."""
    base_name = files.read_object(folder, CONFIG).get("base_model_name_or_path")
    if not isinstance(base_name, str) or not base_name:
        raise CheckpointError(
            f"{folder / CONFIG} names no base model (base_model_name_or_path); load the base and "
            f"pass --adapter {folder} (adapter=)"
        )
    return base_name


def read(folder: Path) -> Adapter:
    """Read an adapter; raises for any setting that is not understood."""
    raw = files.read_object(folder, CONFIG)
    try:
        _check(raw)
        tensors = _read_tensors(folder)
        parts: dict[str, dict[str, Tensor]] = {}
        saved: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            short = name.removeprefix(PREFIX)
            if match := PART.fullmatch(short):
                parts.setdefault(SAVED.sub("", match["module"]), {})[match["part"]] = tensor
            elif "lora_" in short:
                raise CheckpointError(f"the tensor {name} is no part of LoRA that is known here")
            else:
                saved[SAVED.sub("", short)] = tensor
        _check_patterns(raw, parts)
        changes = {module: _change(module, found, raw) for module, found in parts.items()}
    except CheckpointError as error:
        raise CheckpointError(f"the adapter {folder}: {error}") from error.__cause__
    return Adapter(folder, raw, changes, saved)


def _check(raw: Mapping[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise CheckpointError(f"peft_type {raw.get('peft_type')!r} is not supported, only 'LORA'")
    for key in UNSUPPORTED:
        if raw.get(key):
            raise CheckpointError(f"{key} {raw[key]!r} is not supported")
    initialization = raw.get("init_lora_weights", True)
    if isinstance(initialization, str) and initialization.lower().startswith(CHANGES_BASE):
        raise CheckpointError(
            f"init_lora_weights {initialization!r} changes the weights of the base; convert it to "
            f"plain LoRA with PEFT: save_pretrained(…, path_initial_model_for_weight_conversion=…)"
        )
    task = raw.get("task_type")
    if task is not None and task not in TASKS:
        raise CheckpointError(f"task_type {task!r} is not supported; there are {', '.join(TASKS)}")


def _read_tensors(folder: Path) -> Mapping[str, Tensor]:
    for name, reader in WEIGHTS.items():
        if files.exists(folder, name):
            return reader(folder, name)
    raise CheckpointError(f"there are no weights; looked for: {', '.join(WEIGHTS)}")


def _change(module: str, parts: Mapping[str, Tensor], raw: Mapping[str, Any]) -> LowRankChange:
    """The change of one module, with its scale."""
    transposed = "lora_embedding_A" in parts
    kind = "lora_embedding" if transposed else "lora"
    a, b = parts.get(f"{kind}_A"), parts.get(f"{kind}_B")
    if a is None or b is None:
        raise CheckpointError(f"{module} has only one of the two matrices {kind}_A and {kind}_B")
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
        raise CheckpointError(
            f"{module} has matrices {list(a.shape)} and {list(b.shape)}, which have no product"
        )
    magnitude = parts.get("lora_magnitude_vector")
    if magnitude is not None and (transposed or magnitude.numel() != len(b)):
        raise CheckpointError(f"{module} has magnitudes {list(magnitude.shape)} that do not fit it")
    if bool(raw.get("use_dora")) != (magnitude is not None):
        raise CheckpointError(f"{module}: use_dora and the magnitudes in the file do not agree")
    rank = _by_pattern(raw, "rank_pattern", module, raw.get("r", 8))
    alpha = _by_pattern(raw, "alpha_pattern", module, raw.get("lora_alpha", 8))
    if rank != len(a):
        raise CheckpointError(f"{module} has rank {len(a)}, and {CONFIG} says {rank!r}")
    scale = alpha / (math.sqrt(len(a)) if raw.get("use_rslora") else len(a))
    flat = None if magnitude is None else magnitude.flatten()
    return LowRankChange(a, b, scale, flat, transposed)


def _by_pattern(raw: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    """The number of the first pattern that the end of the module's name matches, as in PEFT."""
    value = default
    patterns: dict[str, Any] = raw.get(key) or {}  # an object: `_check_patterns` has looked
    for pattern, number in patterns.items():
        try:
            matched = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise CheckpointError(f"{key} has {pattern!r}, which is no pattern: {error}") from error
        if matched:
            value = number
            break
    if type(value) not in (int, float) or not 0 < value < 1e6:
        raise CheckpointError(f"{key} gives {module} {value!r}, which is not a positive number")
    return value


def _check_patterns(raw: Mapping[str, Any], modules: Iterable[str]) -> None:
    """Raise for patterns that could take minutes to match: `re` tries every way that there is.

    With one group, and that not repeated, the ways are at most the length of the name, once for
    what comes before the pattern and once for each repetition in it.
    """
    lengths = [len(module) for module in modules]
    steps = 0.0
    for key in PATTERNS:
        patterns: Any = raw.get(key) or {}
        if not is_object(patterns):
            raise CheckpointError(f"{key} {patterns!r} does not map names to numbers")
        for pattern in patterns:
            repetitions = len(REPETITION.findall(pattern))
            steps += sum(float(length) ** min(1 + repetitions, 9) for length in lengths)
            groups = pattern.count("(") > 1 or REPEATED_GROUP.search(pattern)
            if groups or len(pattern) > LONGEST_PATTERN or steps > MOST_STEPS:
                raise CheckpointError(
                    f"{key} has {pattern[:80]!r}, which can take very long to match; write the "
                    f"names of modules there, or patterns with one group and few of * + ? {{"
                )


def merge(
    checkpoint: CanonicalCheckpoint, adapter: Adapter, tied: bool
) -> tuple[CanonicalCheckpoint, str]:
    """The base with the adapter in its weights, and a note about it; tensors are replaced in place.

    tied: the MLM head scores words by the word embeddings, which then cannot change alone.
    """
    try:
        return _merged(checkpoint, adapter, tied)
    except CheckpointError as error:
        raise CheckpointError(f"the adapter {adapter.folder}: {error}") from error.__cause__


def _merged(
    checkpoint: CanonicalCheckpoint, adapter: Adapter, tied: bool
) -> tuple[CanonicalCheckpoint, str]:
    checkpoint = replace(checkpoint, raw=_configured(checkpoint, adapter))
    tensors = checkpoint.tensors
    in_file = checkpoint.in_file
    weights = {f"{module}.weight": change for module, change in adapter.changes.items()}
    canonical = names.canonical_names(checkpoint.raw, [*adapter.saved, *weights])
    words = names.source("bert.embed.words.weight", checkpoint.family)
    for name, key in canonical.items():
        if name == words and tied and "mlm" in names.heads(checkpoint):
            raise CheckpointError(
                f"it changes {key}, by which this model also scores words; merge it with PEFT, "
                "merge_and_unload(), and load the result"
            )
        if key in adapter.saved:
            before = tensors.get(name)
            in_encoder = name.startswith(checkpoint.family.prefix)
            if in_encoder and (before is None or before.shape != adapter.saved[key].shape):
                raise CheckpointError(f"it holds {key}, which does not fit this model")
            tensors[name] = adapter.saved[key]
            in_file.setdefault(name, key)
    for name, key in canonical.items():
        if key not in weights:
            continue
        change = weights[key]
        weight = tensors.get(name)
        if weight is None:
            raise CheckpointError(
                f"it changes {key}, which this model does not have; was it trained on another base?"
            )
        if tuple(weight.shape) != change.shape:
            raise CheckpointError(
                f"it changes {key} [{', '.join(map(str, change.shape))}], which here is "
                f"{list(weight.shape)}; was it trained on another base?"
            )
        tensors[name] = change.apply(weight)
    note = f"merged: the adapter {adapter.folder.name}, which changes {len(weights)} weights"
    return checkpoint, note + (f" and holds {len(adapter.saved)}" if adapter.saved else "")


def _configured(checkpoint: CanonicalCheckpoint, adapter: Adapter) -> dict[str, Any]:
    """The base's configuration, with the class and the labels that the adapter was trained for."""
    raw = dict(checkpoint.raw)
    ending = TASKS.get(adapter.raw.get("task_type") or "FEATURE_EXTRACTION")
    if ending is None:
        return raw
    classes = (name for name in checkpoint.family.architectures if name.endswith(ending))
    raw["architectures"] = [next(classes)]
    classifier = adapter.saved.get(
        "classifier.weight", adapter.saved.get("classifier.out_proj.weight")
    )
    labels: Any = raw.get("id2label")
    label_count = len(labels) if labels else raw.get("num_labels")
    if classifier is not None and len(classifier) != label_count:
        # The base's labels are those of another task; PEFT's files do not name the adapter's.
        for key in ("id2label", "label2id", "num_labels"):
            raw.pop(key, None)
    return raw
