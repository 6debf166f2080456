"""Checkpoints: from a model's files to a model that runs, and back.

A reader returns what it found, `(configuration, {foreign name: tensor})`; `names` alone knows what
foreign names mean; here the model is built without weights, on the `meta` device, and every tensor
is checked, cast and put in place one by one, so that nothing is ever random and little is ever held
twice. Strict throughout: a tensor that is missing, has another shape, is unknown or is not finite
is an error that names it.

A checkpoint has the heads whose weights it holds. Vectors need none: the layout of
sentence-transformers says how they are made; without one, an encoder that was not fine-tuned for
another task gets the mean of its hidden states, not normalised, as sentence-transformers itself
would give it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from packhorse import attention
from packhorse.attention import Kernel
from packhorse.checkpoint import files, hf, hub, names, sentence
from packhorse.device import dtype_name
from packhorse.errors import CheckpointError
from packhorse.model.bert import Bert
from packhorse.model.config import BertConfig
from packhorse.model.heads import Embed, Mlm, PooledLabels, Pooler, TokenLabels
from packhorse.model.model import Model
from packhorse.tokens import Tokenizer

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """How the tensors of a file meet those of the model; all by their names in the file."""

    missing: dict[str, Shape] = field(default_factory=dict)
    misshaped: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)  # expected, found
    unknown: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()  # without use and without harm
    nonfinite: dict[str, int] = field(default_factory=dict)  # how many values
    overflowed: dict[str, int] = field(default_factory=dict)  # finite only in the file

    def misfits(self) -> list[str]:
        """What keeps the tensors from being the model's, a line each."""
        wrong = [
            f"{n}: {list(found)} for {list(want)}" for n, (want, found) in self.misshaped.items()
        ]
        return [
            *_listed("missing", [f"{n} {list(shape)}" for n, shape in self.missing.items()]),
            *_listed("of another shape", wrong),
            *_listed("unknown", self.unknown),
        ]

    def blemishes(self, dtype: torch.dtype) -> list[str]:
        """Values no model can work with."""
        bad = [f"{name}: {count} values" for name, count in self.nonfinite.items()]
        over = [f"{name}: {count} values" for name, count in self.overflowed.items()]
        return [
            *_listed("with NaN or infinity", bad),
            *_listed(f"beyond the range of {dtype_name(dtype)}", over),
        ]


def _listed(what: str, items: Iterable[str]) -> list[str]:
    items = list(items)
    shown = ", ".join(items[:8]) + (", …" if len(items) > 8 else "")
    return [f"{len(items)} {what} ({shown})"] if items else []


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model with its weights, and all that its files say about how to use it."""

    config: BertConfig
    model: Model = field(repr=False)
    folder: Path  # where the tokenizer lies
    name: str
    max_length: int
    labels: tuple[str, ...] = ()
    problem: str = "single_label"  # or multi_label, regression
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    report: Report = field(default_factory=Report, repr=False)
    raw: dict[str, Any] = field(default_factory=dict, repr=False)  # the configuration as read
    layout: sentence.Layout | None = field(default=None, repr=False)


def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that lies beside the weights; like theirs, its files are the folder's own."""
    for name in hf.TOKENIZER:
        files.inside(checkpoint.folder, name)
    return Tokenizer.load(
        checkpoint.folder, checkpoint.max_length, vocab_size=checkpoint.config.vocab_size
    )


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors of a checkpoint, under the names they have there."""
    return hf.read(Path(path))


def load(
    model: str | Path,
    *,
    kernel: Kernel | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    allow_nonfinite: bool = False,
) -> Checkpoint:
    """The model in a folder, or of a hub id `org/name[@revision]`, ready to run."""
    folder = hub.resolve(model)
    layout = sentence.read(folder)
    home = layout.transformer if layout else folder
    raw, tensors = read(home)
    if layout:
        tensors |= sentence.read_tensors(folder, layout)
    try:
        found = names.canonical(raw, tensors)
        tied = names.tied(found)
        checkpoint = _assemble(found, tied, layout, home, kernel or attention.kernel("reference"))
        table = names.table(found.family, tied) | (layout.table if layout else {})
        report = _place(checkpoint.model, found, table, torch.device(device), dtype)
        _insist("the weights hold", [] if allow_nonfinite else report.blemishes(dtype))
    except CheckpointError as error:
        raise CheckpointError(f"{home}: {error}") from error.__cause__
    given = folder == Path(model).expanduser()
    name = folder.resolve().name if given else str(model)
    return replace(checkpoint, name=name, report=report)


def _assemble(
    found: names.Found,
    tied: bool,
    layout: sentence.Layout | None,
    folder: Path,
    kernel: Kernel,
) -> Checkpoint:
    """All but the weights: the model is on the `meta` device, where tensors are only shapes."""
    config, heads = names.config(found), names.heads(found)
    labels = names.labels(found, heads)
    prompts, default_prompt = sentence.prompts(layout.settings if layout else {})
    with torch.device("meta"), _NoInitialisation():
        bert = Bert(config, kernel)
        built = _heads(bert, heads, len(labels), tied) | _embed(layout, heads, config)
    return Checkpoint(
        config=config,
        model=Model(bert, built).eval(),
        folder=folder,
        name=folder.name,
        max_length=_max_length(config, layout, folder),
        labels=labels,
        problem=names.problem(found, labels),
        prompts=prompts,
        default_prompt=default_prompt,
        raw=found.raw,
        layout=layout,
    )


class _NoInitialisation(TorchFunctionMode):
    """Random numbers on `meta` are no numbers, yet drawing them imports a compiler: 1.2 s."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Leave out what fills a tensor with random numbers."""
        if func.__name__ in ("normal_", "uniform_", "kaiming_uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _heads(bert: Bert, heads: Iterable[str], labels: int, tied: bool) -> dict[str, nn.Module]:
    """One pooler serves all heads that need it."""
    config, pooler = bert.config, Pooler(bert.config)
    makers = {
        "pooled": lambda: pooler,
        "mlm": lambda: Mlm(config, bert.embed.words, tied),
        "nsp": lambda: PooledLabels(config, pooler, 2),
        "span": lambda: TokenLabels(config, 2),
        "classify": lambda: PooledLabels(config, pooler, labels),
        "tokens": lambda: TokenLabels(config, labels, config.dropout),
    }
    return {head: makers[head]() for head in heads}


def _embed(
    layout: sentence.Layout | None, heads: Iterable[str], config: BertConfig
) -> dict[str, nn.Module]:
    if layout:
        return {"embed": sentence.embed(layout, config)} if layout.pooling else {}
    if {"span", "classify", "tokens"} & set(heads):
        return {}
    return {"embed": Embed(("mean",), normalise=False)}


def _max_length(config: BertConfig, layout: sentence.Layout | None, folder: Path) -> int:
    """The shortest that the layout, the tokenizer and the table of positions allow."""
    tokenizer = files.read_object(folder, "tokenizer_config.json", optional=True)
    said = [layout.max_length if layout else None, tokenizer.get("model_max_length")]
    limits = [limit for limit in said if limit is not None]
    for limit in limits:
        if type(limit) not in (int, float) or not limit >= 1:
            raise CheckpointError(f"the maximal length {limit!r} is not a count of tokens")
    return int(min([config.max_positions, *limits]))


def _place(
    model: Model,
    found: names.Found,
    table: names.Table,
    device: torch.device,
    dtype: torch.dtype,
) -> Report:
    """Empty `found.tensors` into the model, once it is sure that each has its place."""
    state = model.state_dict()
    sources = {ours: names.sources(ours, table) for ours in state}
    report = _compare(state, sources, found)
    _insist("the weights do not fit the configuration", report.misfits())
    # One parameter for each set of sources: what is shared or tied in the file stays so here.
    made: dict[tuple[str, ...], nn.Parameter] = {}
    for parts in sources.values():
        if parts not in made:
            pieces = [_cast(name, found, dtype, report) for name in parts]
            joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            made[parts] = nn.Parameter(joined.to(device))
    model.load_state_dict({ours: made[parts] for ours, parts in sources.items()}, assign=True)
    return report


def _compare(
    state: Mapping[str, Tensor], sources: Mapping[str, tuple[str, ...]], found: names.Found
) -> Report:
    shapes: dict[str, Shape] = {}
    for ours, parts in sources.items():
        rows, *rest = state[ours].shape
        shapes.update(dict.fromkeys(parts, (rows // len(parts), *rest)))
    has = {name: tuple(tensor.shape) for name, tensor in found.tensors.items()}
    spare = [name for name in has if name not in shapes]
    harmless = [name for name in spare if found.family.harmless.fullmatch(name)]
    return Report(
        missing={found.spell(n): shape for n, shape in shapes.items() if n not in has},
        misshaped={
            found.spell(n): (shape, has[n])
            for n, shape in shapes.items()
            if n in has and has[n] != shape
        },
        unknown=tuple(found.spell(name) for name in spare if name not in harmless),
        unexpected=tuple(found.spell(name) for name in harmless),
    )


def _cast(name: str, found: names.Found, dtype: torch.dtype, report: Report) -> Tensor:
    """Take a tensor out of the checkpoint, cast it, and note values that are not finite."""
    tensor = found.tensors.pop(name)
    if not tensor.is_floating_point():
        raise CheckpointError(
            f"{found.spell(name)} holds {tensor.dtype}; quantised weights are not read"
        )
    cast = tensor.to(dtype)
    # One pass over the sum: it is finite unless some value is not (or all are absurdly large).
    if not cast.sum(dtype=torch.promote_types(dtype, torch.float32)).isfinite():
        in_file, here = (int((~t.isfinite()).sum()) for t in (tensor, cast))
        if in_file:
            report.nonfinite[found.spell(name)] = in_file
        elif here:
            report.overflowed[found.spell(name)] = here
    return cast


def _insist(what: str, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(f"{what}: {'; '.join(problems)}")


def write(
    folder: str | Path,
    checkpoint: Checkpoint,
    *,
    overwrite: bool = False,
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Write a folder that transformers and sentence-transformers load; whole, or not at all.

    The tokenizer is copied from the checkpoint's own folder. What its configuration said and is not
    understood here is kept.
    """
    model = checkpoint.model
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("heads.embed.")}
    raw, tensors = names.export(checkpoint.raw, checkpoint.config, state, model.heads.keys())
    if checkpoint.labels:
        raw |= names.export_labels(checkpoint.labels, checkpoint.problem)
    head = dict(model.heads).get("embed")
    embed = head if isinstance(head, Embed) else None
    with files.new_folder(Path(folder), overwrite=overwrite) as draft:
        hf.write(draft, raw, tensors, max_shard_bytes)
        hf.copy_tokenizer(checkpoint.folder, draft)
        if layout := _layout(checkpoint, embed):
            width, length = checkpoint.config.hidden_size, checkpoint.max_length
            sentence.write(draft, layout, embed, width, length)
    return Path(folder)


def _layout(checkpoint: Checkpoint, embed: Embed | None) -> sentence.Layout | None:
    """The layout to write: the one that was read, or a new one if the vectors cannot do without."""
    plain = embed is None or not (embed.dense or embed.normalise or embed.pooling != ("mean",))
    if checkpoint.layout is None and plain:
        return None
    layout = checkpoint.layout or sentence.Layout(checkpoint.folder)
    said = {"prompts": checkpoint.prompts, "default_prompt_name": checkpoint.default_prompt}
    return replace(layout, settings={**layout.settings, **said})
