"""From settings to all that a run needs: data, model, objective, optimizer, and how they are cut.

    job = assemble(resolve(Path("configs/sst2.toml")).settings)
    outcome = train(job, Path("runs/sst2"))                # `loop`

A recipe says how many sequences a step has. How many rows that is follows from the data, and how
many run at once, and in how many parts, from the devices and their memory: so the same recipe runs
anywhere, and learns the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from packhorse import attention, executable
from packhorse import device as devices
from packhorse.checkpoint import Checkpoint
from packhorse.errors import InputError, KernelError
from packhorse.model import float8
from packhorse.model.config import BertConfig
from packhorse.model.model import Model
from packhorse.optim import load_slots, packing_rule
from packhorse.train import cost, feed, finetune
from packhorse.train.feed import Feed
from packhorse.train.objectives import Objective, Pretrain
from packhorse.train.pace import Pace
from packhorse.train.preparing import Labels, optimizer_for, prepare, sized
from packhorse.train.recording import Recorder
from packhorse.train.settings import Settings
from packhorse.train.start import Start, find, start
from packhorse.train.state import Best

EMBEDDED = {"minilm": "all-MiniLM-L6-v2"}
# By the problem that is learned: what an evaluation measures, first what tells a good model.
MEASURES = {
    "pretrain": (
        *("mlm_accuracy", "mlm_sequence_accuracy", "nsp_accuracy"),
        *("loss", "mlm_loss", "nsp_loss"),
    ),
    "single_label": ("accuracy", "f1", "matthews", "loss"),
    "multi_label": ("f1", "accuracy", "loss"),
    "regression": ("pearson", "spearman", "loss"),
    "similarity": ("spearman", "pearson", "loss"),
    "contrastive": ("accuracy", "loss"),
    "span": ("f1", "exact_match"),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where, and as which of them, a process trains."""

    device: torch.device
    half: bool  # computes in bf16
    rank: int = 0
    world: int = 1
    float8: bool = False  # multiplies in it; all else is bf16 then

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return torch.bfloat16 if self.half else torch.float32


@dataclass(frozen=True, eq=False)
class Ground:
    """What a run begins with; there is no optimizer yet, and maybe no weights."""

    settings: Settings
    place: Place
    source: Checkpoint | BertConfig
    objective: Objective
    problem: str  # a key of MEASURES
    feed: Feed
    pace: Pace
    micro_tokens: int
    begun: Start | None = None
    labels: Labels | None = None
    vocabulary: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def config(self) -> BertConfig:
        """The model's sizes."""
        return self.source.config if isinstance(self.source, Checkpoint) else self.source

    def attention(self) -> attention.KernelChoice:
        """The kernel that is asked for, or the fastest."""
        return attention.pick(
            self.place.device,
            self.place.dtype,
            name=self.settings.kernel,
            backward=True,
            dropout=self.settings.attention_dropout > 0,
            **self.config.needs,
        )


@dataclass(frozen=True, eq=False)
class Job:
    """Everything a run is made of, ready to begin at step 0."""

    settings: Settings
    place: Place
    checkpoint: Checkpoint  # holds the model that is trained
    objective: Objective
    feed: Feed
    pace: Pace
    optimizer: Optimizer  # LAMB, on several ranks divided among them
    compiled: bool
    measure: str
    notes: tuple[str, ...] = ()
    recorder: Recorder | None = None  # of steps as CUDA graphs

    @property
    def model(self) -> Model:
        """What is trained."""
        return self.checkpoint.model

    @property
    def best(self) -> Best:
        """What makes a checkpoint the best."""
        return Best(self.measure, larger="loss" not in self.measure)

    def prefers(self, value: float, than: float | None) -> bool:
        """Is it a better value of the measure? What is no number is worse than any."""
        if than is None or math.isnan(than):
            return not math.isnan(value)
        return value > than if self.best.larger else value < than


def assemble(settings: Settings, rank: int = 0, world: int = 1) -> Job:
    """Open what the settings name; this process is `rank` of `world`."""
    ground = survey(settings, rank, world)
    place = ground.place
    choice = ground.attention()
    compiled = _compiles(settings, choice, place.device)
    labelled = (ground.labels, ground.vocabulary)
    heads = ground.objective.heads
    made, new = prepare(settings, ground.source, heads, choice.kernel, *labelled)
    made.model.train().to(place.device)
    optimizer = optimizer_for(settings, made.model, place.half)
    if ground.begun and ground.begun.slots:
        found = ground.begun
        load_slots(optimizer, made.model.named_parameters(), found.slots, found.step or 0)
    left = float8.use(made.model.bert) if place.float8 else []
    if compiled:
        executable.allow_every_bucket()
        executable.compile(made.model.bert.layers)
    drawn = _new(new) if ground.begun else ()
    return Job(
        *(settings, place, made, ground.objective, ground.feed, ground.pace, optimizer, compiled),
        measure=settings.measure or MEASURES[ground.problem][0],
        notes=(*ground.notes, *made.notes, *drawn, *_left(left)),
        recorder=recorder_for(settings, place, compiled),
    )


def recorder_for(settings: Settings, place: Place, compiled: bool) -> Recorder | None:
    """Of fine-tuning, where it is compiled, on a GPU that learns alone."""
    alone = place.device.type == "cuda" and place.world == 1
    return Recorder(place.device) if alone and compiled and settings.task != "pretrain" else None


def survey(settings: Settings, rank: int = 0, world: int = 1, *, weights: bool = True) -> Ground:
    """Open the data, and the model it is for; without `weights` its sizes will do, if set."""
    _check(settings)
    device = devices.choose_device(settings.device)
    place = place_for(settings.precision, device, rank, world)
    if settings.task == "pretrain":
        ground = _pretraining(settings, place, weights or not settings.layers)
    else:
        ground = _fine_tuning(settings, place)
    if settings.target and ground.feed.evaluate_on is None:
        raise InputError(_nothing_held_out(settings, ground.feed))
    if settings.measure and settings.measure not in MEASURES[ground.problem]:
        known = ", ".join(MEASURES[ground.problem])
        raise InputError(f"measure is {settings.measure!r}; of this task there are {known}")
    return ground


def _nothing_held_out(settings: Settings, fed: Feed) -> str:
    """What is missing for the target, and the command that makes it."""
    missing = f"target is {settings.target:g}, and there is nothing held out to measure it on"
    if settings.task != "pretrain":
        return f"{missing}: set eval to a file like train"
    corpus = Path(settings.train)
    beside = corpus.parent if corpus.name == "train" else corpus
    words = ["packhorse data build HELD_OUT_TEXTS", f"{beside}-eval"]
    words += ["--tokenizer", str(_vocabulary(settings) or "VOCAB")]
    words += ["--max-length", str(fed.shape.longest)]
    words += ["--single"] * (not feed.next_sentence(settings))
    return f"{missing}: `{' '.join(words)}` makes it; then set eval to {beside}-eval/train"


def _check(settings: Settings) -> None:
    if not (settings.steps or settings.epochs or settings.max_sequences):
        raise InputError("nothing ends this run: set steps, epochs or max_sequences")
    if settings.averages and (settings.optimizer != "lamb" or not settings.model):
        raise InputError("averages are taken over from a model, for lamb; set both or leave it out")
    if not settings.train:
        raise InputError("train names no data to learn from")
    if settings.task == "pretrain" and settings.layout == "padded":
        raise InputError(
            "rows were packed when the data was built: leave layout out, or build it with "
            "--max-per-pack 1"
        )


def place_for(asked: str, device: torch.device, rank: int = 0, world: int = 1) -> Place:
    """Where this rank computes, and in which precision: what is asked for, or the device's."""
    if asked == "auto":
        asked = devices.dtype_name(devices.default_dtype(device))
    if asked == "float8" and not devices.fast_float8(device):
        other = "bf16" if devices.fast_bf16(device) else "fp32"
        raise InputError(
            f"precision is 'float8', which {devices.describe(device)} has no hardware for; H100, "
            f"H200 and later NVIDIA GPUs have: choose {other} here"
        )
    return Place(device, asked in ("bf16", "float8"), rank, world, asked == "float8")


def _begun(settings: Settings) -> Start:
    """The model to begin from."""
    resized = {"vocab_size": settings.vocab_size, "max_positions": settings.max_positions}
    options: dict[str, Any] = {key: size for key, size in resized.items() if size}
    if settings.tokenizer:
        options["vocab"] = settings.tokenizer
    return start(_model(settings), slots=settings.averages, **options)


def _model(settings: Settings) -> str:
    return EMBEDDED.get(settings.model, settings.model)


def _pretraining(settings: Settings, place: Place, weights: bool) -> Ground:
    manifest = feed.open_dataset(settings.train, "train").manifest
    words, longest = manifest.layout.vocab_size, manifest.layout.capacity
    begun = _begun(settings) if settings.model and weights else None
    if settings.model and begun is None:
        find(_model(settings))  # refuses one that does not exist
    source = _roomy(begun.checkpoint, words, longest) if begun else sized(settings, words, longest)
    factor, kept = manifest.sequences / manifest.rows, settings.packing_keeps
    betas = (settings.beta1, settings.beta2)
    scaled = packing_rule(betas, settings.learning_rate, settings.batch, factor, kept)
    config = source.config if isinstance(source, Checkpoint) else source
    micro = settings.micro_tokens or cost.micro_tokens(config, place.device, place.half)
    fed = feed.pretraining(settings, scaled.rows, micro, place.rank, place.world)
    pace = Pace(settings, fed.batch, fed.epoch, factor if kept == "batch" else 1.0)
    objective = Pretrain(settings.average, feed.next_sentence(settings))
    vocabulary = None if begun and begun.checkpoint.vocabulary else _vocabulary(settings)
    parts = (settings, place, source, objective, "pretrain", fed, pace, micro)
    return Ground(*parts, begun=begun, vocabulary=vocabulary)


def _roomy(found: Checkpoint, words: int, longest: int) -> Checkpoint:
    """Refuse data whose tokens or positions the model has not."""
    config = found.config
    if config.vocab_size < words or config.max_positions < longest:
        raise InputError(
            f"the data has {words} words and rows of {longest}; {found.name} has room for "
            f"{config.vocab_size} and {config.max_positions}: set vocab_size, or use its data"
        )
    return found


def _vocabulary(settings: Settings) -> Path | None:
    """The tokenizer of a new model: as named, or what `packhorse data build` left by the rows."""
    if settings.tokenizer:
        return Path(settings.tokenizer)
    path = Path(settings.train)
    beside = (path / "tokenizer", path.parent / "tokenizer")
    return next((folder for folder in beside if folder.is_dir()), None)


def _fine_tuning(settings: Settings, place: Place) -> Ground:
    if not settings.model:
        raise InputError(f"a task ({settings.task}) is learned by a model: set model")
    begun = _begun(settings)
    found = begun.checkpoint
    data = finetune.read(settings, found)
    most = cost.micro_tokens(found.config, place.device, place.half) // settings.passes
    micro = settings.micro_tokens or most
    shared = (settings, micro, place.rank, place.world)
    fed = feed.examples(data.train, data.eval, *shared)
    pace = Pace(settings, fed.batch, fed.epoch)
    parts = (settings, place, found, data.objective, data.train.problem, fed, pace, micro)
    return Ground(*parts, begun=begun, labels=data.labels, notes=data.notes)


def _compiles(settings: Settings, choice: attention.KernelChoice, device: torch.device) -> bool:
    can = choice.kernel.serves.compiles_backward
    if settings.compile == "on" and not can:
        raise KernelError(f"kernel {choice.name!r} cannot be compiled to train; leave compile off")
    asked = settings.compile == "on" or (settings.compile == "auto" and device.type == "cuda")
    return can and asked


def _new(names: Sequence[str]) -> tuple[str, ...]:
    shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
    return (f"new weights, drawn from the seed: {shown}",) if names else ()


def _left(names: Sequence[str]) -> tuple[str, ...]:
    """What of a model cannot be float8."""
    if not names:
        return ()
    some, many = names[0], len(names)
    why = f"both sizes of a weight must be multiples of {float8.MULTIPLE}"
    return (f"{many} products ({some}, …) are bf16, not float8: {why}",)
