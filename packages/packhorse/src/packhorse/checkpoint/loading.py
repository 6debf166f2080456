"""Load a checkpoint of any format as a model that runs, strictly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from packhorse import attention
from packhorse.attention import Kernel
from packhorse.checkpoint import (
    adapters,
    building,
    configuration,
    files,
    gguf,
    hf,
    judging,
    names,
    quantized,
    sentence,
    sources,
    stored_adapters,
)
from packhorse.checkpoint.building import LoadReport
from packhorse.checkpoint.configuration import ConfigInput
from packhorse.checkpoint.contents import Contents
from packhorse.checkpoint.gelu import Gelu
from packhorse.checkpoint.gelu import choose as choose_gelu
from packhorse.checkpoint.names import CanonicalCheckpoint, tf1
from packhorse.checkpoint.names import gguf as gguf_names
from packhorse.checkpoint.sentence import SentenceLayout
from packhorse.checkpoint.sources import ModelSource
from packhorse.errors import CheckpointError
from packhorse.model.config import BertConfig
from packhorse.model.model import Model
from packhorse.tokens import Tokenizer
from packhorse.tokens.pair_template import PairTemplate


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model with its weights, and everything its files say about how to use it."""

    config: BertConfig
    model: Model = field(repr=False)
    vocabulary: Path | None  # the tokenizer's folder or file
    name: str
    max_length: int
    labels: tuple[str, ...] = ()
    problem: str = "single_label"  # or multi_label, regression
    score_activation: str = "Sigmoid"  # of a reranker, as `sentence.score_activation` says
    prompts: dict[str, str] = field(default_factory=dict[str, str])
    default_prompt: str | None = None
    format: str = "safetensors"
    notes: tuple[str, ...] = ()  # what its reader changed or left out
    report: LoadReport = field(default_factory=LoadReport, repr=False)
    gelu: Gelu = field(default_factory=Gelu)
    quantized: torch.dtype | None = None  # int8 or float8, if its file holds that
    kept: tuple[str, ...] = ()  # linear layers below `bert.layers` that are neither
    scales: dict[str, float] = field(default_factory=dict[str, float])  # of inputs of the others
    raw: dict[str, Any] = field(
        default_factory=dict[str, Any], repr=False
    )  # the configuration as read
    layout: SentenceLayout | None = field(default=None, repr=False)


def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Load the model's tokenizer; links that lead out of its folder are refused."""
    path = checkpoint.vocabulary
    if path is None:
        raise CheckpointError(
            f"{checkpoint.name} has no tokenizer.json and no vocab.txt beside its weights; "
            f"copy the model's there, or pass --vocab FILE (vocab=)"
        )
    if path.is_dir():
        for name in hf.TOKENIZER:
            files.inside(path, name)
    return Tokenizer.load(path, checkpoint.max_length, vocab_size=checkpoint.config.vocab_size)


def pair_template(checkpoint: Checkpoint, tokenizer: Tokenizer) -> PairTemplate | None:
    """The words that the model has around a pair; None if it takes pairs as they are."""
    return judging.pair_template(
        checkpoint.raw,
        tokenizer,
        checkpoint.vocabulary,
        checkpoint.prompts,
        checkpoint.default_prompt,
    )


def read(path: str | Path, *, slots: bool = False) -> Contents:
    """All tensors of a checkpoint under the names in its files; `slots`: the optimizer's too."""
    return sources.find(path).read(slots=slots)


def load(
    model: str | Path | ModelSource,
    *,
    contents: Contents | None = None,
    config: ConfigInput = None,
    vocab: str | Path | None = None,
    heads: int | None = None,
    vocab_size: int | None = None,
    max_positions: int | None = None,
    repeat_positions: bool = False,
    gelu: str | None = None,
    ignore: Sequence[str] = (),
    adapter: str | Path | None = None,
    kernel: Kernel | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = torch.float32,
    allow_nonfinite: bool = False,
) -> Checkpoint:
    """Load the model of a path or of a hub id `org/name[@revision]`, ready to run.

    config, vocab: files to use instead of those beside the weights. heads: attention heads, where
    no file says. vocab_size, max_positions: pad or crop these tables, with a warning; positions
    beyond those stored only as repetitions of them (repeat_positions). gelu: "erf" or "tanh", where
    neither a graph nor the configuration says which GELU it is. ignore: patterns (`fnmatch`) of
    tensors that are no part of the model. adapter: a LoRA folder in PEFT's layout, or its hub id,
    which is merged into the weights, and a folder of an adapter alone names its base; or the name
    of an adapter that the model's own file has (Jina's embeddings v3). dtype: None keeps that of
    the file. contents: what was read of it already; its tensors are taken out.
    """
    source = model if isinstance(model, ModelSource) else sources.find(model)
    stored = adapter is not None and stored_adapters.has_any(source.folder)
    if adapter is not None and not stored:
        source = sources.adapted(source, adapter)
    contents = source.read() if contents is None else contents
    try:
        ignored = building.drop_ignored(contents.tensors, ignore)
        task = str(adapter) if stored else None
        canonical, form, chosen, rounded = _canonical(source, contents, config, heads, gelu, task)
        building.check_encoder(ignored, canonical)
        max_positions = max_positions or contents.max_positions
        if vocab_size or max_positions:
            canonical = names.resize(
                canonical,
                vocab_size=vocab_size,
                max_positions=max_positions,
                repeat_positions=repeat_positions,
            )
        tied = names.resolve_tied_words(canonical)
        notes = contents.notes
        if source.adapter is not None:
            canonical, note = adapters.merge(canonical, adapters.read(source.adapter), tied)
            notes = (*notes, note)
        vocabulary = configuration.vocabulary(source.folder, vocab)
        if vocabulary is None and source.format == "gguf" and gguf.has_tokenizer(source.path):
            vocabulary = source.path
        judged = source.layout.judged if source.layout else None
        if source.layout is None:
            judged = judging.find_words(canonical.raw, vocabulary)
        if judged is not None:
            canonical = judging.as_classifier(canonical, judged)
        checkpoint = _without_weights(canonical, tied, source.layout, vocabulary, kernel)
        table = names.table(canonical.family, tied) | (source.layout.table if source.layout else {})
        report = building.place(
            checkpoint.model, canonical, table, torch.device(device), dtype, ignored
        )
        kept: tuple[str, ...] = ()
        scales: dict[str, float] = {}
        if rounded.weights:
            weights = quantized.quantizable(checkpoint.model.state_dict())
            in_file = {
                name: [canonical.name_in_file(part) for part in names.sources(name, table)]
                for name in weights
            }
            kept = quantized.kept_layers(in_file, rounded)
            scales = quantized.input_scales(in_file, rounded)
        bad_values = [] if allow_nonfinite else report.bad_values(dtype)
        building.raise_problems("the weights hold", bad_values)
    except CheckpointError as error:
        config_file = configuration.locate(source.folder, config, _config_names(source))
        message = configuration.explain(error, config, config_file)
        raise CheckpointError(f"{source.path}: {message}") from error.__cause__
    return replace(
        checkpoint,
        name=source.name,
        format=source.format,
        notes=notes + chosen + building.ignored_notes(ignored) + report.unused_notes(),
        report=report,
        gelu=form,
        quantized=rounded.dtype if rounded.weights else None,
        kept=kept,
        scales=scales,
    )


def _config_names(source: ModelSource) -> tuple[str, ...]:
    in_hub_format = source.format in hf.KINDS
    return configuration.HF_CONFIGS if in_hub_format else configuration.CONFIGS


def _canonical(
    source: ModelSource,
    contents: Contents,
    config: ConfigInput,
    heads: int | None,
    gelu: str | None,
    task: str | None,
) -> tuple[CanonicalCheckpoint, Gelu, tuple[str, ...], quantized.RoundedTensors]:
    """The tensors by canonical name, the GELU, notes, and what the file holds in int8 or float8.

    `contents.tensors` is emptied.
    """
    tensors = contents.tensors
    names_in_file: dict[str, str] = {}
    foreign = str
    if contents.format in ("tf1", "frozen"):
        scope = tf1.scope(tensors)
        tensors, names_in_file = tf1.from_tensorflow(tensors, scope)
        foreign = partial(_variable_name, scope)
    if contents.format == "gguf":  # the one file whose own configuration has no other place
        config = config or contents.config
    raw = configuration.find(source.folder, config, heads, tensors, _config_names(source))
    if contents.format == "gguf":
        tensors, names_in_file = gguf_names.from_gguf(tensors, raw)
        foreign = partial(gguf_names.tensor_name, raw)
    raw, form = choose_gelu(raw, contents, gelu)
    rounded = quantized.dequantize(raw, tensors)
    if rounded.weights:
        raw = {key: value for key, value in raw.items() if key != quantized.KEY}
    chosen = stored_adapters.merge(tensors, raw, task)
    if source.layout:
        tensors |= sentence.read_tensors(source.layout)
    return names.canonical(raw, tensors, names_in_file, foreign), form, chosen, rounded


def _variable_name(scope: str, name: str) -> str:
    return scope + tf1.variable_name(name)[0]


def _without_weights(
    canonical: CanonicalCheckpoint,
    tied: bool,
    layout: SentenceLayout | None,
    vocabulary: Path | None,
    kernel: Kernel | None,
) -> Checkpoint:
    """Everything but the weights: the model is on the `meta` device."""
    config = names.config(canonical)
    heads = names.heads(canonical)
    labels = names.labels(canonical, heads)
    prompts, default_prompt = sentence.prompts(layout.settings if layout else {})
    kernel = kernel or attention.kernel("reference")
    return Checkpoint(
        config=config,
        model=building.build(
            config,
            kernel,
            heads,
            len(labels),
            tied,
            layout,
            sentence.vectors_width(layout, canonical.tensors),
        ),
        vocabulary=vocabulary,
        name="",
        max_length=_max_length(config, layout, vocabulary),
        labels=labels,
        problem=names.problem(canonical.raw, labels),
        score_activation=sentence.score_activation(canonical.raw, layout, labels),
        prompts=prompts,
        default_prompt=default_prompt,
        raw=canonical.raw,
        layout=layout,
    )


def _max_length(config: BertConfig, layout: SentenceLayout | None, vocabulary: Path | None) -> int:
    """The smallest of the limits of the layout, the tokenizer and the table of positions."""
    folder = vocabulary if vocabulary is None or vocabulary.is_dir() else vocabulary.parent
    settings: dict[str, Any] = {}
    if folder:
        settings = files.read_object(folder, "tokenizer_config.json", optional=True)
    limits = [layout.max_length if layout else None, settings.get("model_max_length")]
    limits = [limit for limit in limits if limit is not None]
    for limit in limits:
        if type(limit) not in (int, float) or not limit >= 1:
            raise CheckpointError(f"the maximum length {limit!r} is not a number of tokens")
    return int(min([config.max_positions, *limits]))
