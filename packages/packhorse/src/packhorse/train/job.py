"""From settings to everything that a run needs: data, model, objective, optimizer, schedule.

    job = assemble(resolve(Path("sst2")).settings)
    outcome = train(job, Path("runs/sst2"))                # `loop`

A recipe sets the sequences per step. How many rows that is follows from the data, and how many run
at once, in how many parts, from the devices and their memory. So the same recipe runs anywhere and
learns the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from packhorse import attention, executable
from packhorse import device as devices
from packhorse.checkpoint import Checkpoint, adapters
from packhorse.checkpoint.names.families import family_of
from packhorse.errors import InputError, KernelError
from packhorse.model import float8, fused_layer
from packhorse.model.bert import Bert
from packhorse.model.config import BertConfig
from packhorse.model.model import Model
from packhorse.optim import SCHEDULES, load_slots, packing_rule
from packhorse.train import cost, feed, lora
from packhorse.train.checkpoints import BestMetric
from packhorse.train.feed import TrainingFeed
from packhorse.train.objectives import Embedding, Objective, Pretrain
from packhorse.train.preparing import (
    ALIASES,
    LabelSet,
    StartingModel,
    find_model,
    load_model,
    new_config,
    optimizer_for,
    prepare,
)
from packhorse.train.recording import StepRecorder
from packhorse.train.settings import TrainSettings

UNDIVIDED_TOKENS = 1 << 15  # of texts that are compared, in one part on a CPU, unless set
RETRIEVAL = ("ndcg@10", "mrr@10", "recall@1", "recall@10", "accuracy", "loss")
# The measures of an evaluation per problem; the first decides which model is best.
MEASURES = {
    "pretrain": (
        "mlm_accuracy",
        "mlm_sequence_accuracy",
        "nsp_accuracy",
        "loss",
        "mlm_loss",
        "nsp_loss",
    ),
    "single_label": ("accuracy", "f1", "matthews", "loss"),
    "multi_label": ("f1", "accuracy", "loss"),
    "regression": ("pearson", "spearman", "loss"),
    "similarity": ("spearman", "pearson", "loss"),
    "contrastive": RETRIEVAL,
    "distill": RETRIEVAL,
    "tokens": ("f1", "accuracy", "precision", "recall", "loss"),
    "choice": ("accuracy", "loss"),
    "span": ("f1", "exact_match"),
}


@dataclass(frozen=True, slots=True)
class Placement:
    """The device and precision of a process, and its rank among the processes of the run."""

    device: torch.device
    half: bool  # computes in bf16
    rank: int = 0
    world: int = 1
    float8: bool = False  # matrix products in float8; everything else is bf16 then

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return torch.bfloat16 if self.half else torch.float32


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """Length of a run, and learning rate and betas as functions of the step; the first is 0."""

    settings: TrainSettings
    batch: float  # sequences per step
    epoch: float  # steps per pass over the data
    power: float = 1.0  # of the betas, by the packing rule

    @property
    def limit(self) -> int:
        """The number of steps that ends the run; 0 if only a number of sequences does."""
        ends = [self.settings.steps, math.ceil(self.settings.epochs * self.epoch)]
        return min((end for end in ends if end), default=0)

    @property
    def steps(self) -> int:
        """The expected number of steps."""
        by_sequences = math.ceil(self.settings.max_sequences / self.batch)
        return min(end for end in (self.limit, by_sequences) if end)

    @property
    def total(self) -> int:
        """Steps until the learning rate has decayed."""
        return self.settings.decay_steps or self.steps

    @property
    def warmup(self) -> int:
        """Steps during which the learning rate rises."""
        warmup = self.settings.warmup
        return round(warmup if warmup >= 1 else warmup * self.total)

    def rate(self, step: int) -> float:
        """The learning rate at a step."""
        settings = self.settings
        options: dict[str, Any] = {"warmup": self.warmup}
        if settings.schedule != "constant":
            options["total"] = self.total
            options["end"] = settings.end
        if settings.schedule == "polynomial":
            options["power"] = settings.power
            options["decay_from_zero"] = settings.decay_from_zero
        if settings.schedule == "wsd":
            decay = settings.decay
            options["decay"] = round(decay if decay >= 1 else decay * self.total)
        return settings.learning_rate * SCHEDULES[settings.schedule](step, **options)

    def betas(self, step: int) -> tuple[float, float]:
        """The betas of LAMB or Adam at a step; the first may move over beta1_steps."""
        settings = self.settings
        beta1 = settings.beta1
        if settings.beta1_steps:
            progress = min(1.0, step / settings.beta1_steps)
            beta1 += (settings.beta1_end - beta1) * progress
        return beta1**self.power, settings.beta2**self.power


@dataclass(frozen=True, eq=False)
class RunInputs:
    """What a run starts from; there is no optimizer yet, and possibly no weights."""

    settings: TrainSettings
    place: Placement
    source: Checkpoint | BertConfig
    objective: Objective
    problem: str  # a key of MEASURES
    feed: TrainingFeed
    schedule: StepSchedule
    micro_tokens: int
    start: StartingModel | None = None
    labels: LabelSet | None = None
    vocabulary: Path | None = None
    prompts: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()

    @property
    def config(self) -> BertConfig:
        """The model's sizes."""
        return self.source.config if isinstance(self.source, Checkpoint) else self.source

    def attention(self) -> attention.KernelChoice:
        """The attention kernel that is set, or the fastest."""
        return attention.pick(
            self.place.device,
            self.place.dtype,
            name=self.settings.kernel,
            backward=True,
            dropout=self.settings.attention_dropout > 0,
            **self.config.needs,
        )


@dataclass(frozen=True, eq=False)
class TrainingJob:
    """Everything a run consists of, ready to start at step 0."""

    settings: TrainSettings
    place: Placement
    checkpoint: Checkpoint  # holds the model that is trained
    objective: Objective
    feed: TrainingFeed
    schedule: StepSchedule
    optimizer: Optimizer  # LAMB; with several ranks, sharded
    compiled: bool
    measure: str
    notes: tuple[str, ...] = ()
    recorder: StepRecorder | None = None  # records steps as CUDA graphs

    @property
    def model(self) -> Model:
        """The model that is trained."""
        return self.checkpoint.model

    @property
    def best(self) -> BestMetric:
        """What makes a checkpoint the best."""
        return BestMetric(self.measure, larger="loss" not in self.measure)

    def prefers(self, value: float, than: float | None) -> bool:
        """Is it a better value of the measure? NaN is worse than any number."""
        if than is None or math.isnan(than):
            return not math.isnan(value)
        return value > than if self.best.larger else value < than


def assemble(settings: TrainSettings, rank: int = 0, world: int = 1) -> TrainingJob:
    """Open everything that the settings name, as rank `rank` of `world` processes."""
    inputs = open_inputs(settings, rank, world)
    place = inputs.place
    choice = inputs.attention()
    compiled = _is_compiled(settings, choice, place.device)
    checkpoint, new_parameters = prepare(
        settings,
        inputs.source,
        inputs.objective.heads,
        choice.kernel,
        inputs.labels,
        inputs.vocabulary,
    )
    if inputs.prompts is not None:
        checkpoint = replace(checkpoint, prompts=dict(inputs.prompts))
    model = checkpoint.model
    if settings.lora_rank:
        adapted = lora.adapt(
            model, family_of(checkpoint.raw), lora_options(settings), settings.seed
        )
        inputs = replace(inputs, notes=(*inputs.notes, f"{adapted} layers have a LoRA adapter"))
    model.train().to(place.device)
    optimizer = optimizer_for(settings, model, place.half)
    start = inputs.start
    if start and start.slots:
        load_slots(optimizer, model.named_parameters(), start.slots, start.step or 0)
    model.bert.recompute = settings.recompute
    not_float8 = use_fast_layers(model.bert, place)
    if compiled:
        executable.allow_every_bucket()
        executable.compile(model.bert.layers)
    notes = [*inputs.notes, *checkpoint.notes]
    if start:
        notes += _new_parameter_notes(new_parameters)
    return TrainingJob(
        settings=settings,
        place=place,
        checkpoint=checkpoint,
        objective=inputs.objective,
        feed=inputs.feed,
        schedule=inputs.schedule,
        optimizer=optimizer,
        compiled=compiled,
        measure=settings.measure or MEASURES[inputs.problem][0],
        notes=(*notes, *_float8_notes(not_float8)),
        recorder=recorder_for(settings, place, compiled),
    )


def lora_options(settings: TrainSettings) -> lora.LoraOptions:
    """The adapter that is set; its base is named so that it is found from any folder."""
    path = Path(settings.model).expanduser()
    if (path / adapters.CONFIG).is_file():
        raise InputError(f"{path} is an adapter; start a new one from its base model")
    return lora.LoraOptions(
        settings.lora_rank,
        settings.lora_alpha or 2 * settings.lora_rank,
        settings.lora_modules,
        str(path.resolve()) if path.exists() else _model_name(settings),
    )


def use_fast_layers(bert: Bert, place: Placement) -> list[str]:
    """Train in float8 if asked for, and by fused kernels where they serve.

    Returns the names of products that cannot be float8.
    """
    not_float8 = float8.use(bert) if place.float8 else []
    if fused_layer.serves(place.device, place.dtype):
        fused_layer.use(bert)
    return not_float8


def recorder_for(settings: TrainSettings, place: Placement, compiled: bool) -> StepRecorder | None:
    """A recorder for fine-tuning, if it is compiled, on one GPU."""
    is_alone = place.device.type == "cuda" and place.world == 1
    is_recorded = is_alone and compiled and settings.task != "pretrain" and not settings.recompute
    return StepRecorder(place.device) if is_recorded else None


def open_inputs(
    settings: TrainSettings, rank: int = 0, world: int = 1, *, weights: bool = True
) -> RunInputs:
    """Open the data and the model; without `weights`, the model's sizes suffice if they are set."""
    _check(settings)
    device = devices.choose_device(settings.device)
    place = choose_placement(settings.precision, device, rank, world)
    if settings.task == "pretrain":
        inputs = _pretraining(settings, place, weights or not settings.layers)
    else:
        inputs = _fine_tuning(settings, place)
    if settings.target and inputs.feed.evaluate_on is None:
        raise InputError(_missing_evaluation(settings, inputs.feed))
    measures = MEASURES[inputs.problem]
    if settings.measure and settings.measure not in measures:
        raise InputError(f"measure is {settings.measure!r}; this task has {', '.join(measures)}")
    return inputs


def _missing_evaluation(settings: TrainSettings, training_feed: TrainingFeed) -> str:
    """A message that there is no evaluation data for the target, and the command that makes it."""
    missing = f"target is {settings.target:g}, but there is no evaluation data to measure it on"
    if settings.task != "pretrain":
        return f"{missing}: set eval to a file like train"
    corpus = Path(settings.train)
    folder = corpus.parent if corpus.name == "train" else corpus
    words = ["packhorse data build HELD_OUT_TEXTS", f"{folder}-eval"]
    words += ["--tokenizer", str(_vocabulary(settings) or "VOCAB")]
    words += ["--max-length", str(training_feed.shape.longest)]
    if not feed.next_sentence(settings):
        words.append("--single")
    return f"{missing}: `{' '.join(words)}` makes it; then set eval to {folder}-eval/train"


def _check(settings: TrainSettings) -> None:
    if not (settings.steps or settings.epochs or settings.max_sequences):
        raise InputError("nothing ends this run: set steps, epochs or max_sequences")
    if settings.averages and (settings.optimizer != "lamb" or not settings.model):
        raise InputError(
            "averages are loaded from a model, for lamb; set model and optimizer, or leave it out"
        )
    if settings.texts:
        raise InputError("texts are built into a corpus by `packhorse train` alone: set train here")
    if not settings.train:
        raise InputError("train names no data to learn from")
    if settings.patience and not (settings.eval_every or settings.eval_every_sequences):
        raise InputError("patience counts evaluations: set eval_every or eval_every_sequences")
    if settings.task == "pretrain" and settings.layout == "padded":
        raise InputError(
            "rows were packed when the data was built: leave layout out, or build it with "
            "--max-per-pack 1"
        )


def choose_placement(
    precision: str, device: torch.device, rank: int = 0, world: int = 1
) -> Placement:
    """The placement of a rank in the precision that is set, or in the device's default."""
    if precision == "auto":
        precision = devices.dtype_name(devices.default_dtype(device))
    if precision == "float8" and not devices.fast_float8(device):
        alternative = "bf16" if devices.fast_bf16(device) else "fp32"
        raise InputError(
            f"precision is 'float8', which {devices.describe(device)} has no hardware for; H100, "
            f"H200 and later NVIDIA GPUs have: choose {alternative} here"
        )
    is_half = precision in ("bf16", "float8")
    return Placement(device, is_half, rank, world, precision == "float8")


def _starting_model(settings: TrainSettings) -> StartingModel:
    sizes = {"vocab_size": settings.vocab_size, "max_positions": settings.max_positions}
    options: dict[str, Any] = {name: size for name, size in sizes.items() if size}
    if settings.tokenizer:
        options["vocab"] = settings.tokenizer
    if settings.gelu:
        options["gelu"] = settings.gelu
    if settings.ignore:
        options["ignore"] = settings.ignore
    return load_model(_model_name(settings), slots=settings.averages, **options)


def _model_name(settings: TrainSettings) -> str:
    return ALIASES.get(settings.model, settings.model)


def _pretraining(settings: TrainSettings, place: Placement, weights: bool) -> RunInputs:
    manifest = feed.open_dataset(settings.train, "train").manifest
    vocab_size = manifest.layout.vocab_size
    capacity = manifest.layout.capacity
    start = _starting_model(settings) if settings.model and weights else None
    if settings.model and start is None:
        find_model(_model_name(settings))  # raises if it does not exist
    if start:
        source = _check_capacity(start.checkpoint, vocab_size, capacity)
        config = source.config
    else:
        source = config = new_config(settings, vocab_size, capacity)
    factor = manifest.sequences / manifest.rows
    scaled = packing_rule(
        (settings.beta1, settings.beta2),
        settings.learning_rate,
        settings.batch,
        factor,
        settings.packing_keeps,
    )
    micro_tokens = settings.micro_tokens or cost.micro_tokens(config, place.device, place.half)
    training_feed = feed.pretraining(settings, scaled.rows, micro_tokens, place.rank, place.world)
    power = factor if settings.packing_keeps == "batch" else 1.0
    has_vocabulary = start is not None and start.checkpoint.vocabulary is not None
    return RunInputs(
        settings=settings,
        place=place,
        source=source,
        objective=Pretrain(settings.average, feed.next_sentence(settings)),
        problem="pretrain",
        feed=training_feed,
        schedule=StepSchedule(settings, training_feed.batch, training_feed.epoch, power),
        micro_tokens=micro_tokens,
        start=start,
        vocabulary=None if has_vocabulary else _vocabulary(settings),
    )


def _check_capacity(checkpoint: Checkpoint, vocab_size: int, capacity: int) -> Checkpoint:
    """Refuse data with token ids or positions that the model does not have."""
    config = checkpoint.config
    if config.vocab_size < vocab_size or config.max_positions < capacity:
        raise InputError(
            f"the data has a vocabulary of {vocab_size} and rows of {capacity}; {checkpoint.name} "
            f"has room for {config.vocab_size} and {config.max_positions}: set vocab_size and "
            "max_positions, or use data made for this model"
        )
    return checkpoint


def _vocabulary(settings: TrainSettings) -> Path | None:
    """The tokenizer of a new model: as named, or the one beside the rows of `data build`."""
    if settings.tokenizer:
        return Path(settings.tokenizer)
    path = Path(settings.train)
    candidates = (path / "tokenizer", path.parent / "tokenizer")
    return next((folder for folder in candidates if folder.is_dir()), None)


def _fine_tuning(settings: TrainSettings, place: Placement) -> RunInputs:
    if not settings.model:
        raise InputError(f"the task {settings.task} needs a model to start from: set model")
    start = _starting_model(settings)
    checkpoint = start.checkpoint
    data = feed.read_task(settings, checkpoint)
    fitting = cost.micro_tokens(checkpoint.config, place.device, place.half) // settings.passes
    if place.device.type == "cpu" and isinstance(data.objective, Embedding):
        # Parts of what is compared run twice (`step`), which costs more than a cache gains.
        fitting = max(fitting, UNDIVIDED_TOKENS) if data.objective.across else fitting
    micro_tokens = settings.micro_tokens or fitting
    training_feed = feed.examples(
        data.train, data.eval, settings, micro_tokens, place.rank, place.world
    )
    return RunInputs(
        settings=settings,
        place=place,
        source=checkpoint,
        objective=data.objective,
        problem=(data.eval or data.train).problem,
        feed=training_feed,
        schedule=StepSchedule(settings, training_feed.batch, training_feed.epoch),
        micro_tokens=micro_tokens,
        start=start,
        labels=data.labels,
        prompts=data.prompts,
        notes=data.notes,
    )


def _is_compiled(
    settings: TrainSettings, choice: attention.KernelChoice, device: torch.device
) -> bool:
    is_supported = choice.kernel.serves.compiles_backward
    if settings.compile == "on" and not is_supported:
        raise KernelError(f"kernel {choice.name!r} cannot be compiled to train; leave compile off")
    is_enabled = settings.compile == "on" or (settings.compile == "auto" and device.type == "cuda")
    return is_supported and is_enabled


def _new_parameter_notes(names: Sequence[str]) -> tuple[str, ...]:
    shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
    return (f"new weights, drawn from the seed: {shown}",) if names else ()


def _float8_notes(names: Sequence[str]) -> tuple[str, ...]:
    """A note about matrix products that cannot be float8."""
    if not names:
        return ()
    reason = f"both sizes of a weight must be multiples of {float8.MULTIPLE}"
    return (f"{len(names)} products ({names[0]}, …) are bf16, not float8: {reason}",)
