"""The model that a run trains, from a checkpoint of any format or from sizes alone.

It has the heads that its objective needs. A head that the checkpoint has keeps its weights; one
that it lacks, or has for other labels, gets random weights: always the same for a seed, and
distributed like BERT's (truncated normal, deviation 0.02; Devlin et al. 2018). So does everything
if there is no checkpoint. Of the checkpoint's other heads only the pooler stays, untrained, when
embeddings are trained, because transformers expects one in a bare encoder.

Weights are read and drawn in fp32. In bf16 the optimizer keeps and updates fp32 master weights, and
the model computes with a rounded copy.

TensorFlow stores LAMB's and Adam's averages beside the weights, each in the shape of its weight.
They take the same way through the name tables: transposed where a weight is, queries, keys and
values joined, the vocabulary padded like the model's. MLPerf's BERT starts so from its own
model.ckpt-28252, and continues from step 28,252 of its averages.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from packhorse import checkpoint
from packhorse.attention import Kernel
from packhorse.checkpoint import Checkpoint, names, sources
from packhorse.checkpoint.building import build
from packhorse.checkpoint.names import tf1
from packhorse.checkpoint.names.families import family_of
from packhorse.checkpoint.sentence import SentenceLayout
from packhorse.errors import CheckpointError, InputError
from packhorse.model.config import BertConfig
from packhorse.model.model import Model
from packhorse.optim import LAMB, parameter_groups
from packhorse.train.optimizer_state import dismantle
from packhorse.train.settings import TrainSettings

ALIASES = {"minilm": "all-MiniLM-L6-v2"}
DEVIATION = 0.02
SIZES = ("layers", "hidden_size", "heads", "intermediate_size", "vocab_size", "max_positions")
LABEL_KEYS = ("id2label", "label2id", "num_labels", "problem_type")  # of config.json
RESIZING_OPTIONS = ("vocab_size", "max_positions", "repeat_positions")
MLPERF_HINT = (
    "MLPerf's own, model.ckpt-28252, is not part of Packhorse: the page of BERT in MLCommons' "
    "training repository (language_model/tensorflow/bert) says where it is; put its .index and "
    ".data files, bert_config.json and vocab.txt in one folder and pass FOLDER/model.ckpt-28252"
)


@dataclass(frozen=True, slots=True)
class LabelSet:
    """The labels of a classifier; empty for other tasks."""

    names: tuple[str, ...] = ()
    problem: str = "single_label"


@dataclass(frozen=True, eq=False)
class StartingModel:
    """A model to train from, and the optimizer's averages from its file."""

    checkpoint: Checkpoint
    # "m" and "v" by parameter name, as `optim.load_slots` takes them; empty if there are none.
    slots: dict[str, dict[str, Tensor]] = field(default_factory=dict, repr=False)
    step: int | None = None


def load_model(path: str | Path, *, slots: bool = True, **options: Any) -> StartingModel:
    """Read a checkpoint to train from; `options` are those of `checkpoint.load`.

    slots: read the optimizer's averages too, two thirds of such a file; not needed to fine-tune.
    """
    source = find_model(path)
    contents = source.read(slots=slots)
    loaded = checkpoint.load(source, contents=contents, **options)
    resizing = {name: options[name] for name in RESIZING_OPTIONS if options.get(name)}
    averages = {
        kind: _averages_by_parameter(tensors, loaded, resizing)
        for kind, tensors in contents.slots.items()
    }
    return StartingModel(loaded, averages, contents.step)


def find_model(path: str | Path) -> sources.ModelSource:
    """The files of a checkpoint; if MLPerf's is missing, the error says where it comes from."""
    try:
        return sources.find(path)
    except CheckpointError as error:
        path = Path(path).expanduser()
        exists = path.exists() or any(path.parent.glob(f"{escape(path.name)}.*"))
        if exists or "ckpt" not in path.name:
            raise
        raise CheckpointError(f"{error}; {MLPERF_HINT}") from error.__cause__


def _averages_by_parameter(
    slots: dict[str, Tensor], model: Checkpoint, resizing: dict[str, Any]
) -> dict[str, Tensor]:
    """One kind of average by parameter name, for parameters whose average is complete."""
    tensors, stored_names = tf1.from_tensorflow(dict(slots), tf1.scope(slots))
    canonical = names.canonical(model.raw, tensors, stored_names)
    if resizing:
        with warnings.catch_warnings():
            # The weights were resized with the same warning already.
            warnings.simplefilter("ignore", names.ResizeWarning)
            canonical = names.resize(canonical, **resizing)
    table = names.table(canonical.family) | (model.layout.table if model.layout else {})
    averages = {}
    for name, _ in model.model.named_parameters():
        parts = [canonical.tensors.get(part) for part in names.sources(name, table)]
        present = [part for part in parts if part is not None]
        if len(present) == len(parts):
            averages[name] = present[0].contiguous() if len(present) == 1 else torch.cat(present)
    return averages


def new_config(settings: TrainSettings, vocab_size: int, longest: int) -> BertConfig:
    """The sizes of a new model; vocabulary and positions follow the data unless set."""
    for name in ("layers", "hidden_size", "heads"):
        if not getattr(settings, name):
            raise InputError(f"{name} is not set; set the sizes of a new model, or name a model")
    if 0 < settings.vocab_size < vocab_size:
        raise InputError(f"vocab_size is {settings.vocab_size}; the data has {vocab_size} words")
    if 0 < settings.max_positions < longest:
        raise InputError(
            f"max_positions is {settings.max_positions}; sequences have up to {longest} tokens"
        )
    return BertConfig(
        vocab_size=settings.vocab_size or vocab_size,
        hidden_size=settings.hidden_size,
        layers=settings.layers,
        heads=settings.heads,
        intermediate_size=settings.intermediate_size or 4 * settings.hidden_size,
        max_positions=settings.max_positions or longest,
        norm_eps=settings.norm_eps,
    )


def prepare(
    settings: TrainSettings,
    source: Checkpoint | BertConfig,
    heads: Iterable[str],
    kernel: Kernel,
    labels: LabelSet | None = None,
    vocabulary: Path | None = None,
) -> tuple[Checkpoint, list[str]]:
    """The checkpoint to train, in fp32 on the CPU, and the names of its new parameters."""
    loaded = source if isinstance(source, Checkpoint) else None
    config = source if isinstance(source, BertConfig) else source.config
    config = replace(config, dropout=settings.dropout, attention_dropout=settings.attention_dropout)
    if loaded is not None:
        _check_sizes(settings, config, loaded.name)
    labels = labels or LabelSet()
    is_embedding = "embed" in heads
    trained_heads = [head for head in heads if head != "embed"]
    raw = dict(loaded.raw) if loaded else {}
    if unknown := [head for head in trained_heads if head not in family_of(raw).heads]:
        raise InputError(f"{raw.get('model_type')} models have no {unknown[0]!r} head to train")
    layout = _sentence_layout(loaded) if loaded and is_embedding else None
    untrained_heads: list[str] = []
    if loaded and is_embedding and "pooled" in loaded.model.heads:
        untrained_heads.append("pooled")
    is_tied = loaded is None or _is_tied(loaded.model)
    model = build(
        config, kernel, [*trained_heads, *untrained_heads], len(labels.names), is_tied, layout
    )
    new_parameters = _fill(model, loaded.model if loaded else None, settings.seed)
    for head in untrained_heads:
        model.heads[head].requires_grad_(False)
    if not labels.names:
        raw = {key: value for key, value in raw.items() if key not in LABEL_KEYS}
    prepared = loaded or Checkpoint(config, model, vocabulary, "new model", config.max_positions)
    prepared = replace(
        prepared,
        config=config,
        model=model,
        vocabulary=vocabulary or prepared.vocabulary,
        labels=labels.names,
        problem=labels.problem,
        raw=raw,
        layout=layout,
        max_length=config.max_positions if layout is None else prepared.max_length,
    )
    return prepared, new_parameters


def _sentence_layout(loaded: Checkpoint) -> SentenceLayout:
    """The layout of an embedding model; one that has none averages its tokens."""
    folder = loaded.vocabulary or Path()
    return loaded.layout or SentenceLayout(folder, folder, pooling=("mean",))


def _check_sizes(settings: TrainSettings, config: BertConfig, name: str) -> None:
    """Sizes that are set beside a model must be the model's."""
    for size in SIZES:
        expected = getattr(settings, size)
        actual = getattr(config, size)
        if expected and expected != actual:
            raise InputError(f"{size} is set to {expected}, but {name} has {actual}; leave it out")


def _is_tied(model: Model) -> bool:
    """Does the MLM head share its decoder with the word embeddings?"""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    decoder = parameters.get("heads.mlm.decoder.weight")
    return decoder is None or decoder is parameters["bert.embed.words.weight"]


def _fill(model: Model, source: Model | None, seed: int) -> list[str]:
    """Give every parameter of an empty model its values; returns the names of new ones.

    Shared parameters stay shared.
    """
    stored = dict(source.named_parameters(remove_duplicate=False)) if source else {}
    gains = _norm_gains(model)
    has_shared_pooler = not model.bert.config.classify_activation
    generator = torch.Generator().manual_seed(seed)
    filled: dict[nn.Parameter, nn.Parameter] = {}
    new_names = []
    state = {}
    for name, empty in model.named_parameters(remove_duplicate=False):
        if empty not in filled:
            values = _stored_values(name, empty.shape, stored, has_shared_pooler)
            if values is None:
                new_names.append(name)
                values = _initial_values(empty.shape, name in gains, generator)
            filled[empty] = nn.Parameter(values)
        state[name] = filled[empty]
    model.load_state_dict(state, assign=True)
    return new_names


def _stored_values(
    name: str, shape: torch.Size, stored: Mapping[str, Tensor], has_shared_pooler: bool
) -> Tensor | None:
    """The checkpoint's tensor of this name; a shared pooler may be stored under any head."""
    candidates = [name]
    if has_shared_pooler and (".pooler.dense." in name or name.startswith("heads.pooled.")):
        kind = name.rpartition(".")[2]
        heads = ("pooled.dense", "nsp.pooler.dense", "classify.pooler.dense")
        candidates += [f"heads.{head}.{kind}" for head in heads]
    for candidate in candidates:
        if candidate in stored and stored[candidate].shape == shape:
            return stored[candidate].detach().float().clone()
    return None


def _initial_values(shape: torch.Size, is_gain: bool, generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape) if is_gain else torch.zeros(shape)
    return truncated_normal(shape, DEVIATION, generator)


def truncated_normal(shape: torch.Size, deviation: float, generator: torch.Generator) -> Tensor:
    """Normal random numbers; those beyond two deviations are drawn again until none is.

    The distribution of `nn.init.trunc_normal_`, which inverts it with erfinv at eight times the
    cost: half a minute for BERT-Large.
    """
    bound = 2 * deviation
    values = torch.empty(shape).normal_(0.0, deviation, generator=generator)
    flat = values.view(-1)
    beyond = (flat.abs() > bound).nonzero().squeeze(1)
    while len(beyond):
        redrawn = torch.empty(len(beyond)).normal_(0.0, deviation, generator=generator)
        flat[beyond] = redrawn
        beyond = beyond[redrawn.abs() > bound]
    return values


def _norm_gains(model: nn.Module) -> set[str]:
    """Names of one-dimensional parameters that start at one; all others are biases."""
    return {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.ndim == 1 and name.endswith(".weight")
    }


def optimizer_for(settings: TrainSettings, model: nn.Module, half: bool) -> LAMB:
    """LAMB, or AdamW, which is LAMB without the trust ratio; with `half`, the model becomes bf16.

    In bf16 the optimizer keeps fp32 master weights, and gradients are accumulated in fp32.
    """
    is_lamb = settings.optimizer == "lamb"
    is_split = is_lamb and settings.split_qkv and not settings.lora_rank
    groups = parameter_groups(model, settings.weight_decay, unstack=is_split)
    for group in groups:
        group["adapt"] = group["adapt"] and is_lamb
    parameters = [parameter for group in groups for parameter in group["params"]]
    masters = [parameter.detach().clone() for parameter in parameters] if half else []
    if half:
        model.to(torch.bfloat16)  # in place: the parameters stay the same objects
    clamp: Any = settings.clamp or None
    optimizer = LAMB(
        groups,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        bias_correction=settings.bias_correction,
        clamp=clamp,
        max_weight_norm=settings.max_weight_norm or None,
        master_weights=half,
    )
    for parameter, master in zip(parameters, masters, strict=False):
        parameter.grad_dtype = torch.float32
        optimizer.state[parameter]["master"] = master
    return optimizer


def in_fp32(checkpoint: Checkpoint, optimizer: Optimizer) -> Checkpoint:
    """The checkpoint in fp32 on the CPU, from the master weights and not their rounded copy."""
    model = checkpoint.model
    state, _ = dismantle(optimizer, model)
    values = {
        parameter: nn.Parameter(state.get(f"{name}.master", parameter).detach().float().cpu())
        for name, parameter in model.named_parameters()
    }
    full = build(
        checkpoint.config,
        model.bert.kernel,
        [head for head in model.heads if head != "embed"],
        len(checkpoint.labels),
        _is_tied(model),
        checkpoint.layout,
    )
    parameters = model.named_parameters(remove_duplicate=False)
    full.load_state_dict({name: values[parameter] for name, parameter in parameters}, assign=True)
    return replace(checkpoint, model=full)
