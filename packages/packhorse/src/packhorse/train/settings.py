"""What to train, on what and how: one flat, frozen value, from a file, the environment and flags.

    resolve(Path("configs/sst2.toml"), os.environ, {"seed": 7}).settings

A key has the same name everywhere: `learning_rate` in TOML, `PACKHORSE_TRAIN_LEARNING_RATE` in the
environment, `--learning-rate` on the command line; the later goes before the earlier. There are no
sections to remember and none to merge: the price is one list of some sixty keys. A key that does
not exist is refused with the nearest that does, a value of another kind with the place it stands
in. A file that ends in .json is a preset of Graphcore's MLPerf BERT (`presets`).

This module imports no torch: `packhorse train --print-config` answers at once.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from packhorse import toml
from packhorse.errors import InputError
from packhorse.train import presets

PREFIX = "PACKHORSE_TRAIN_"
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

MODEL, TASK, STEPS = "Model", "Task and data", "Steps and batches"
OPTIMIZER, RUN, SUBMISSION = "Optimizer", "Run", "Submission"


def _key(default: Any, group: str, help: str) -> Any:
    return field(default=default, metadata={"group": group, "help": help})


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides a run; checked on construction. 0, "" and None: not given."""

    model: str = _key("", MODEL, "Start from it: folder, file, TensorFlow prefix, hub id, minilm.")
    tokenizer: str = _key("", MODEL, "vocab.txt, tokenizer.json or a folder; default the model's.")
    averages: bool = _key(False, MODEL, "Take over LAMB's averages from a TensorFlow checkpoint.")
    layers: int = _key(0, MODEL, "Layers; where a model is given, what it must have.")
    hidden_size: int = _key(0, MODEL, "Width of hidden states.")
    heads: int = _key(0, MODEL, "Attention heads.")
    intermediate_size: int = _key(0, MODEL, "Width of the feed-forward; default 4 times hidden.")
    vocab_size: int = _key(0, MODEL, "Words of the table; default those of the data or model.")
    max_positions: int = _key(0, MODEL, "Positions of the table; default the longest sequence.")
    norm_eps: float = _key(1e-12, MODEL, "Epsilon of LayerNorm, of a model without weights.")
    dropout: float = _key(0.1, MODEL, "Of hidden states.")
    attention_dropout: float = _key(0.0, MODEL, "Of attention probabilities; not every kernel can.")

    task: Literal["pretrain", "classify", "similarity", "contrastive", "answer"] = _key(
        "pretrain", TASK, "What is learned."
    )
    train: str = _key(
        "", TASK, "A folder of `packhorse data`; for tasks a table, a saved Dataset, SQuAD's JSON."
    )
    eval: str = _key("", TASK, "The same, to evaluate on; default the eval beside train.")
    text: tuple[str, ...] = _key((), TASK, "The column of the text; two: of a pair.")
    label: tuple[str, ...] = _key((), TASK, "The column of the label; several: of 0 and 1.")
    separator: str = _key("", TASK, "Between the labels in one cell, where there are several.")
    scale: tuple[float, ...] = _key((), TASK, "Least and most score, which become 0 and 1.")
    problem: Literal["auto", "single_label", "multi_label", "regression"] = _key(
        "auto", TASK, "What labels are; told by the data."
    )
    max_length: int = _key(0, TASK, "Tokens a sequence at most, of tasks; default the model's.")
    layout: Literal["packed", "padded"] = _key(
        "packed", TASK, "padded: each sequence fills max_length, to compare with; of tasks."
    )
    stride: int = _key(0, TASK, "Tokens that windows of a context share; default a quarter.")
    average: Literal["token", "sequence"] = _key(
        "token", TASK, "Masked words: over tokens, or within each sequence first."
    )
    next_sentence: bool | None = _key(
        None, TASK, "Learn whether the second segment follows; default if the data has it."
    )
    mask_probability: float = _key(0.0, TASK, "Of tokens, unless stored; default the data's.")
    max_predictions: int = _key(0, TASK, "Masks a sequence at most; default the data's.")
    whole_words: bool | None = _key(None, TASK, "Mask whole words; default as the data says.")
    temperature: float = _key(0.05, TASK, "Of contrastive learning.")
    agreement: float = _key(
        0.0, TASK, "R-Drop, of classify: two passes a step, and what their difference weighs."
    )

    batch: int = _key(32, STEPS, "Sequences a step, on all devices; of pairs, pairs.")
    packing_keeps: Literal["betas", "batch"] = _key(
        "betas", STEPS, "batch: it counts rows, and betas get the power of sequences a row."
    )
    micro_tokens: int = _key(0, STEPS, "Tokens a device takes at once; default by its memory.")
    steps: int = _key(0, STEPS, "Stop after so many steps.")
    epochs: float = _key(0.0, STEPS, "Stop after so many passes over the data.")
    max_sequences: int = _key(0, STEPS, "Stop after so many sequences.")

    optimizer: Literal["lamb", "adamw"] = _key("adamw", OPTIMIZER, "LAMB or AdamW.")
    learning_rate: float = _key(1e-4, OPTIMIZER, "At its peak.")
    beta1: float = _key(0.9, OPTIMIZER, "Of the average of gradients.")
    beta1_end: float = _key(0.0, OPTIMIZER, "What beta1 becomes over beta1_steps.")
    beta1_steps: int = _key(0, OPTIMIZER, "Steps that takes; 0: beta1 stays.")
    beta2: float = _key(0.999, OPTIMIZER, "Of the average of their squares.")
    epsilon: float = _key(1e-6, OPTIMIZER, "Added to the root of that.")
    bias_correction: bool = _key(True, OPTIMIZER, "Make up for averages that begin at zero.")
    weight_decay: float = _key(0.01, OPTIMIZER, "But for biases and norms.")
    clip: float = _key(1.0, OPTIMIZER, "Most norm of the gradient; 0: any.")
    max_weight_norm: float = _key(0.0, OPTIMIZER, "LAMB: a weight's norm counts as no more.")
    clamp: tuple[float, ...] = _key((), OPTIMIZER, "LAMB: least and most trust ratio.")
    split_qkv: bool = _key(
        True, OPTIMIZER, "LAMB: trust ratios of query, key and value; false: one of the three."
    )
    schedule: Literal["constant", "linear", "polynomial"] = _key(
        "linear", OPTIMIZER, "Of the learning rate, after the warm-up."
    )
    warmup: float = _key(0.0, OPTIMIZER, "Steps it rises; below 1, that share of all steps.")
    decay_steps: int = _key(0, OPTIMIZER, "Steps until it has fallen; default all.")
    power: float = _key(1.0, OPTIMIZER, "Of the polynomial.")
    end: float = _key(0.0, OPTIMIZER, "What is left of it then, as a share.")
    decay_from_zero: bool = _key(False, OPTIMIZER, "Polynomial: it falls from step 0 on.")

    out: str = _key("", RUN, "Folder of the run: checkpoints, logs, model.")
    seed: int = _key(42, RUN, "Of new weights, order, masks and dropout.")
    device: str = _key("auto", RUN, "cpu, cuda, cuda:1; auto: the accelerator.")
    precision: Literal["auto", "fp32", "bf16", "float8"] = _key(
        "auto", RUN, "bf16 and float8 (Hopper) keep weights in fp32 beside; auto: bf16 on CUDA."
    )
    kernel: str = _key("auto", RUN, "Attention kernel.")
    compile: Literal["auto", "on", "off"] = _key("auto", RUN, "Layers; auto: on CUDA.")
    log_every: int = _key(10, RUN, "Steps between two looks at the device's figures.")
    save_every: int = _key(500, RUN, "Steps between checkpoints; 0: at the end alone.")
    keep: int = _key(2, RUN, "Checkpoints kept, beside the best.")
    tensorboard: bool = _key(False, RUN, "Write figures for TensorBoard as well.")
    eval_every: int = _key(0, RUN, "Steps between evaluations; 0: at the end alone.")
    eval_every_sequences: int = _key(0, RUN, "The same, in sequences.")
    measure: str = _key("", RUN, "Of an evaluation, what is best; default by the task.")
    target: float = _key(0.0, RUN, "Stop when the measure has reached it; 0: none.")
    write: Literal["last", "best"] = _key("last", RUN, "Which weights the result has.")

    division: str = _key("closed", SUBMISSION, "MLPerf's: closed or open.")
    platform: str = _key("", SUBMISSION, "The system's name in its log.")

    def __post_init__(self) -> None:
        for name, problem in _problems(self):
            value = getattr(self, name)
            raise InputError(f"{name} is {value!r}: {problem}")

    @property
    def passes(self) -> int:
        """How often a step runs each sequence."""
        return 2 if self.agreement else 1

    def toml(self) -> str:
        """All of it, in the form of a file; comments say what a key is for."""
        return toml.to_toml(self, KINDS)


# What must hold of a number: from the first to the second, both included.
ANY, SHARE, BELOW_1 = (0, math.inf), (0.0, 1.0), (0.0, 1 - 1e-12)
BOUNDS: dict[str, tuple[float, float]] = {
    **{each.name: ANY for each in fields(Settings) if each.type in ("int", "float")},
    **dict.fromkeys(("dropout", "attention_dropout", "beta1", "beta1_end", "beta2"), BELOW_1),
    **dict.fromkeys(("batch", "log_every", "keep"), (1, math.inf)),
    **dict.fromkeys(("norm_eps", "epsilon", "temperature", "power"), (1e-30, math.inf)),
    "mask_probability": (0.0, 1 - 1e-6),
    "end": SHARE,
    "seed": (0, 2**63 - 1),
    "target": (-math.inf, math.inf),
}


def _problems(settings: Settings) -> Iterator[tuple[str, str]]:
    for name, (least, most) in BOUNDS.items():
        if not least <= getattr(settings, name) <= most:
            bounds = f"from {least:g}" + (f" to {most:g}" if most < math.inf else " up")
            yield name, f"it must be {bounds}"
    for name in ("scale", "clamp"):
        pair = getattr(settings, name)
        if pair and not (len(pair) == 2 and pair[0] < pair[1]):
            yield name, "give the least and the most, two numbers that rise"
    if settings.agreement and settings.task != "classify":
        yield "agreement", f"it is for the task classify, not {settings.task}"
    if settings.agreement and not (settings.dropout or settings.attention_dropout):
        yield "agreement", "two passes without dropout are the same; set dropout"
    if len(settings.text) > 2:
        yield "text", "a text is one column, or two for a pair"


class Resolved(NamedTuple):
    """The settings, and what a user should know of how they came about."""

    settings: Settings
    notes: tuple[str, ...] = ()


def resolve(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Resolved:
    """Defaults, what the file says over them, over that the environment, over that the flags."""
    said, notes = _read(file) if file else ({}, ())
    values = {name: _value(name, value, str(file)) for name, value in said.items()}
    for variable, text in (environment or {}).items():
        if variable.startswith(PREFIX):
            name = _known(variable.removeprefix(PREFIX).lower(), f"the environment's {variable}")
            values[name] = _parsed(name, text, variable)
    for name, value in (flags or {}).items():
        flag = f"--{name.replace('_', '-')}"
        values[name] = _value(_known(name, flag), value, flag)
    return Resolved(Settings(**values), notes)


def _read(file: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    try:
        text = file.read_text("utf-8")
        said = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        kind = "JSON" if file.suffix == ".json" else "TOML"
        raise InputError(f"{file} is not {kind}: {error}") from error
    if file.suffix == ".json":
        return presets.translate(said, str(file))
    for name, value in said.items():
        if isinstance(value, dict):
            raise InputError(f"{file} has a section [{name}]; settings stand without sections")
        _known(name, str(file))
    return said, ()


def _known(name: str, where: str) -> str:
    if name not in KINDS:
        raise InputError(f"{where}: there is no setting {name!r}{presets.nearest(name, KINDS)}")
    return name


def _value(name: str, value: Any, where: str) -> Any:
    """A value of TOML or of a flag, as the setting's kind."""
    kind = KINDS[name]
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        items = value if isinstance(value, list | tuple) else [value]
        if all(_is(item, inner) for item in items):
            return tuple(map(inner, items))
    elif get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        known = ", ".join(map(repr, get_args(kind)))
        raise InputError(f"{where}: {name} is {value!r:.80}; it can be {known}")
    elif _is(value, kind):
        return kind(value)
    raise InputError(f"{where}: {name} is {value!r:.80}; it must be {_named(kind)}")


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is kind


def _named(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a list of {'numbers' if get_args(kind)[0] is float else 'texts'}"
    names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
    return names[kind]


def _parsed(name: str, text: str, where: str) -> Any:
    """A value of the environment, where all is text; several are divided by commas."""
    kind = KINDS[name]
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        items = [item.strip() for item in text.split(",") if item.strip()]
        return _value(name, [_scalar(item, inner) for item in items], where)
    return _value(name, _scalar(text, kind), where)


def _scalar(text: str, kind: Any) -> Any:
    """What the text says in this kind; itself where it says nothing, to be refused."""
    if kind is bool:
        word = text.strip().lower()
        return word in TRUE if word in (*TRUE, *FALSE) else text
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return text
    return text


# TOML has no word for what is not given: None is never said, so it is no part of a kind.
KINDS: dict[str, Any] = {
    name: bool if kind == bool | None else kind for name, kind in get_type_hints(Settings).items()
}
