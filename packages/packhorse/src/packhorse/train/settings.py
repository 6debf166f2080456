"""The settings of a training run: one flat, frozen dataclass, checked on construction.

    resolve(Path("sst2"), os.environ, {"seed": 7}).settings

A setting has the same name everywhere: `learning_rate` in TOML, `PACKHORSE_TRAIN_LEARNING_RATE` in
the environment, `--learning-rate` on the command line; flags override the environment, which
overrides the file (`packhorse.settings`). The file is one of `recipes` by name, or a path; one that
ends in .json is a preset of Graphcore's MLPerf BERT (`presets`).

This module imports no torch: `packhorse train --print-config` answers at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packhorse import settings
from packhorse.errors import InputError
from packhorse.settings import Resolved, setting
from packhorse.train import presets, recipes

PREFIX = "PACKHORSE_TRAIN_"

# Groups of settings, as help and printed TOML show them.
MODEL = "Model"
TASK = "Task and data"
STEPS = "Steps and batches"
OPTIMIZER = "Optimizer"
RUN = "Run"
SUBMISSION = "Submission"

# Losses by task; the first is that of "auto".
LOSSES = {
    "similarity": ("cosine", "cosent", "angle"),
    "contrastive": ("ranking", "symmetric", "triplet"),
    "distill": ("margin", "kl", "vectors"),
}
SMALLEST = 1e-30  # for numbers that must be above 0


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Everything that decides a run. 0, "" and None mean "not set"."""

    model: str = setting(
        "",
        MODEL,
        "Model to start from: folder, file, TensorFlow prefix, hub id, or minilm.",
    )
    tokenizer: str = setting(
        "", MODEL, "vocab.txt, tokenizer.json or a folder; default the model's."
    )
    gelu: Literal["erf", "tanh"] | None = setting(
        None, MODEL, "Form of GELU of a TensorFlow model whose files do not show it."
    )
    ignore: tuple[str, ...] = setting(
        (), MODEL, "Ignore tensors of the file that match this pattern; may be repeated."
    )
    averages: bool = setting(
        False, MODEL, "Load LAMB's averages from the TensorFlow checkpoint as well."
    )
    layers: int = setting(0, MODEL, "Layers; with --model, the number it must have.")
    hidden_size: int = setting(0, MODEL, "Width of hidden states.")
    heads: int = setting(0, MODEL, "Attention heads.")
    intermediate_size: int = setting(
        0, MODEL, "Width of the feed-forward layer; default 4 times hidden_size."
    )
    vocab_size: int = setting(0, MODEL, "Vocabulary size; default that of the data or model.")
    max_positions: int = setting(0, MODEL, "Position embeddings; default the longest sequence.")
    norm_eps: float = setting(
        1e-12, MODEL, "Epsilon of LayerNorm, for a model without weights.", minimum=SMALLEST
    )
    dropout: float = setting(0.1, MODEL, "Dropout of hidden states.", below=1)
    attention_dropout: float = setting(
        0.0, MODEL, "Dropout of attention probabilities; not every kernel supports it.", below=1
    )

    lora_rank: int = setting(
        0, MODEL, "Train a LoRA adapter of this rank in place of the weights; for embeddings."
    )
    lora_alpha: float = setting(
        0.0, MODEL, "Scale of the adapter times its rank; default twice the rank."
    )
    lora_modules: tuple[str, ...] = setting(
        (), MODEL, "Ends of the names of adapted layers (query, value …); default all linear ones."
    )

    task: Literal[
        "pretrain", "classify", "tag", "choose", "similarity", "contrastive", "distill", "answer"
    ] = setting("pretrain", TASK, "What to learn.")
    train: str = setting(
        "",
        TASK,
        "Training data: a folder of `packhorse data`; for tasks a table, a saved Dataset or "
        "SQuAD's JSON.",
    )
    texts: tuple[str, ...] = setting(
        (),
        TASK,
        "Texts to pretrain on, in place of train: files, folders or hf://org/name; OUT/corpus is "
        "built of them.",
    )
    eval_fraction: float = setting(
        0.05, TASK, "With texts: share of the documents to hold out for evaluation.", below=1
    )
    eval: str = setting(
        "", TASK, "Evaluation data, in the same form; default the eval folder beside train."
    )
    text: tuple[str, ...] = setting(
        (), TASK, "Column of the text; two for a pair; anchor, positive and negatives of a group."
    )
    label: tuple[str, ...] = setting(
        (), TASK, "Column of the label; several columns hold 0 or 1 per label."
    )
    separator: str = setting("", TASK, "Separator of labels, if one cell holds several.")
    scale: tuple[float, ...] = setting(
        (), TASK, "Minimum and maximum score, which are mapped to 0 and 1."
    )
    problem: Literal["auto", "single_label", "multi_label", "regression"] = setting(
        "auto", TASK, "Kind of classification; auto: inferred from the labels."
    )
    max_length: int = setting(
        0, TASK, "Maximum tokens per sequence, for tasks and texts; default the model's, or 512."
    )
    layout: Literal["packed", "padded"] = setting(
        "packed", TASK, "padded: pad each sequence to max_length, to compare with; for tasks."
    )
    stride: int = setting(
        0, TASK, "Tokens that adjacent windows of a context share; default a quarter."
    )
    average: Literal["token", "sequence"] = setting(
        "token", TASK, "Masked-word loss: mean over tokens, or first within each sequence."
    )
    next_sentence: bool | None = setting(
        None, TASK, "Train next-sentence prediction; default if the data has it."
    )
    mask_probability: float = setting(
        0.0,
        TASK,
        "Share of tokens to mask, unless masks are stored; default the data's.",
        maximum=1 - 1e-6,
    )
    max_predictions: int = setting(
        0, TASK, "Maximum masked tokens per sequence; default the data's."
    )
    whole_words: bool | None = setting(None, TASK, "Mask whole words; default the data's choice.")
    span_length: float = setting(
        0.0, TASK, "Mask spans of so many words on average (SpanBERT: 3.8), in place of words."
    )
    loss: Literal[
        "auto",
        "ranking",
        "symmetric",
        "triplet",
        "cosine",
        "cosent",
        "angle",
        "margin",
        "kl",
        "vectors",
    ] = setting(
        "auto",
        TASK,
        "Loss of embeddings: ranking, symmetric or triplet (contrastive); cosine, cosent or angle "
        "(similarity); margin, kl or vectors (distill); auto: the first.",
    )
    temperature: float = setting(
        0.05, TASK, "Temperature of ranking, symmetric, cosent, angle and kl.", minimum=SMALLEST
    )
    margin: float = setting(5.0, TASK, "triplet: how much nearer the positive shall be.")
    distance: Literal["euclidean", "cosine"] = setting(
        "euclidean", TASK, "triplet: the distance that is compared."
    )
    negatives: int = setting(
        0, TASK, "Hard negatives of each row to learn from; default as many as every row has."
    )
    widths: tuple[int, ...] = setting(
        (), TASK, "Matryoshka: widths that vectors may be cut to, their own included."
    )
    query_prompt: str = setting(
        "", TASK, "Prompt before anchors, kept with the model; default its own for queries."
    )
    document_prompt: str = setting(
        "", TASK, "Prompt before positives and negatives; default the model's own for documents."
    )
    teacher: str = setting(
        "", TASK, "distill: a model that scores pairs or makes vectors; default scores in the data."
    )
    agreement: float = setting(
        0.0,
        TASK,
        "R-Drop, for classify: weight of the difference between two passes per step.",
    )

    batch: int = setting(32, STEPS, "Sequences (or pairs) per step, over all devices.", minimum=1)
    packing_keeps: Literal["betas", "batch"] = setting(
        "betas",
        STEPS,
        "batch: it counts rows, and betas are raised to the power of sequences per row.",
    )
    micro_tokens: int = setting(
        0, STEPS, "Tokens per device and pass; default as its memory allows."
    )
    steps: int = setting(0, STEPS, "Stop after this many steps.")
    epochs: float = setting(0.0, STEPS, "Stop after this many passes over the data.")
    max_sequences: int = setting(0, STEPS, "Stop after this many sequences.")

    optimizer: Literal["lamb", "adamw"] = setting("adamw", OPTIMIZER, "LAMB or AdamW.")
    learning_rate: float = setting(1e-4, OPTIMIZER, "Peak learning rate.")
    beta1: float = setting(0.9, OPTIMIZER, "Decay of the average of gradients.", below=1)
    beta1_end: float = setting(
        0.0, OPTIMIZER, "Value that beta1 moves to over beta1_steps.", below=1
    )
    beta1_steps: int = setting(0, OPTIMIZER, "Steps over which beta1 moves; 0: beta1 is constant.")
    beta2: float = setting(0.999, OPTIMIZER, "Decay of the average of squared gradients.", below=1)
    epsilon: float = setting(
        1e-6, OPTIMIZER, "Added to the root of that average.", minimum=SMALLEST
    )
    bias_correction: bool = setting(True, OPTIMIZER, "Correct averages for their start at zero.")
    weight_decay: float = setting(0.01, OPTIMIZER, "Weight decay, except of biases and norms.")
    clip: float = setting(1.0, OPTIMIZER, "Maximum norm of the gradient; 0: no clipping.")
    max_weight_norm: float = setting(
        0.0, OPTIMIZER, "LAMB: maximum norm of a weight in the trust ratio; 0: none."
    )
    clamp: tuple[float, ...] = setting((), OPTIMIZER, "LAMB: minimum and maximum trust ratio.")
    split_qkv: bool = setting(
        True, OPTIMIZER, "LAMB: separate trust ratios for query, key and value; false: one."
    )
    schedule: Literal["constant", "linear", "polynomial", "cosine", "wsd"] = setting(
        "linear", OPTIMIZER, "Schedule of the learning rate after warm-up."
    )
    decay: float = setting(
        0.1, OPTIMIZER, "wsd: steps of decay at the end; below 1, that share of all steps."
    )
    warmup: float = setting(0.0, OPTIMIZER, "Steps of warm-up; below 1, that share of all steps.")
    decay_steps: int = setting(0, OPTIMIZER, "Steps until the end of the decay; default all.")
    power: float = setting(1.0, OPTIMIZER, "Power of the polynomial.", minimum=SMALLEST)
    end: float = setting(
        0.0, OPTIMIZER, "Learning rate after the decay, as a share of the peak.", maximum=1
    )
    decay_from_zero: bool = setting(
        False, OPTIMIZER, "Polynomial: count the decay from step 0, not from the end of warm-up."
    )

    out: str = setting("", RUN, "Folder of the run: checkpoints, logs, model.")
    push: str = setting(
        "", RUN, "Push the resulting model to this repository of the hub, org/name (HF_TOKEN)."
    )
    seed: int = setting(
        42, RUN, "Seed of new weights, order, masks and dropout.", maximum=2**63 - 1
    )
    device: str = setting("auto", RUN, "cpu, cuda, cuda:1; auto: the accelerator.")
    precision: Literal["auto", "fp32", "bf16", "float8"] = setting(
        "auto",
        RUN,
        "bf16 and float8 (Hopper) keep fp32 master weights; auto: bf16 on CUDA.",
    )
    kernel: str = setting("auto", RUN, "Attention kernel.")
    compile: Literal["auto", "on", "off"] = setting(
        "auto", RUN, "Compile the layers; auto: on CUDA."
    )
    recompute: bool = setting(
        False,
        RUN,
        "Gradient checkpointing: keep only the layers' inputs, and run layers again in the "
        "backward pass; less memory, a third more time.",
    )
    log_every: int = setting(10, RUN, "Steps between reads of the device's figures.", minimum=1)
    save_every: int = setting(500, RUN, "Steps between checkpoints; 0: only at the end.")
    keep: int = setting(2, RUN, "Checkpoints to keep, beside the best.", minimum=1)
    tensorboard: bool = setting(False, RUN, "Write figures for TensorBoard as well.")
    wandb: str = setting("", RUN, "Send figures to this project of Weights & Biases.")
    eval_every: int = setting(0, RUN, "Steps between evaluations; 0: only at the end.")
    eval_every_sequences: int = setting(0, RUN, "Sequences between evaluations.")
    eval_first: bool = setting(False, RUN, "Evaluate before the first step as well.")
    patience: int = setting(
        0, RUN, "Stop after this many evaluations without a better measure; 0: never."
    )
    measure: str = setting("", RUN, "Measure that defines the best; default by task.")
    target: float = setting(
        0.0, RUN, "Stop when the measure reaches it; 0: no target.", minimum=-math.inf
    )
    write: Literal["last", "best"] = setting("last", RUN, "Weights of the resulting model.")

    division: str = setting("closed", SUBMISSION, "MLPerf division: closed or open.")
    platform: str = setting("", SUBMISSION, "Name of the system in MLPerf's log.")

    def __post_init__(self) -> None:
        settings.check_bounds(self)
        for name in ("scale", "clamp"):
            pair = getattr(self, name)
            if pair and not (len(pair) == 2 and pair[0] < pair[1]):
                raise InputError(
                    f"{name} is {pair!r}; give two numbers, the minimum and the larger maximum"
                )
        if self.agreement and self.task != "classify":
            raise InputError(
                f"agreement is {self.agreement}; it is for the task classify, not {self.task}"
            )
        if self.agreement and not (self.dropout or self.attention_dropout):
            raise InputError(
                f"agreement is {self.agreement}, but two passes without dropout are the same; "
                "set dropout"
            )
        is_grouped = self.task in ("contrastive", "distill", "choose")
        if len(self.text) > 2 and not is_grouped:
            raise InputError(f"text is {self.text!r}; name one column, or two for a pair")
        losses = LOSSES.get(self.task, ())
        if self.loss != "auto" and self.loss not in losses:
            known = f"has {', '.join(losses)}" if losses else "has none to choose"
            raise InputError(f"loss is {self.loss!r}; the task {self.task} {known}")
        if self.teacher and self.task != "distill":
            raise InputError(f"teacher is {self.teacher!r}; it is for the task distill")
        if self.lora_rank and not losses:
            raise InputError(
                f"lora_rank is {self.lora_rank}; adapters are for embeddings, not {self.task}"
            )
        if self.lora_rank and self.precision == "float8":
            raise InputError(
                f"lora_rank is {self.lora_rank} and precision 'float8', which would train layers "
                "without their adapters; choose bf16"
            )
        if self.widths and not losses:
            raise InputError(f"widths are {self.widths}; they are for embeddings, not {self.task}")
        if any(width < 1 for width in self.widths):
            raise InputError(f"widths are {self.widths}; they are counts from 1")

    @property
    def is_embedding(self) -> bool:
        """Is it vectors of texts that are learned?"""
        return self.task in LOSSES

    @property
    def passes(self) -> int:
        """How often a step runs each sequence."""
        return 2 if self.agreement else 1

    def toml(self) -> str:
        """All settings as a file that `resolve` reads."""
        return settings.to_toml(self)


def resolve(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Resolved[TrainSettings]:
    """The settings of a run; flags override the environment, which overrides the file.

    file: a recipe's name, or the path of a TOML file or of a JSON preset.
    """
    if file is not None:
        file = recipes.find(file)
    values: list[settings.SettingValue] = []
    notes: tuple[str, ...] = ()
    if file is not None and file.suffix == ".json":
        preset, notes = presets.read(file)
        values += settings.from_mapping(preset, str(file))
    elif file is not None:
        values += settings.from_toml(file)
    values += settings.from_environment(environment or {}, PREFIX)
    values += settings.from_flags(flags or {})
    return settings.resolve(TrainSettings, values, notes)
