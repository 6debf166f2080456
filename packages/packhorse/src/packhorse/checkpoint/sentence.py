"""The sentence-transformers layout around a Hugging Face folder: which head makes the vectors.

`modules.json` lists modules that run one after the other; here they are one `Embed` head: a
transformer, its pooling, and any number of dense layers, norms, dropouts and normalisations. A
transformer alone is a cross-encoder. Another module, another order or a setting that would change
the vectors is refused by name, never skipped. No code that a file names is imported: a class of
sentence-transformers or torch stands for itself by its name. Files are written as release 2 wrote
them, which every later release reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from packhorse.checkpoint import files, hf
from packhorse.checkpoint import sentence_layers as layers
from packhorse.checkpoint.sentence_layers import Layer
from packhorse.errors import CheckpointError
from packhorse.model.config import BertConfig
from packhorse.model.heads import Embed
from packhorse.model.pooling import POOLINGS
from packhorse.model.vectors import width_after

MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
# Named after the family, since the first release; only the first is still written.
TRANSFORMER_SETTINGS = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "xlm-roberta")
)
KINDS = ("Transformer", "Pooling", *layers.KINDS)
ORDER = re.compile(rf"Transformer( Pooling( ({'|'.join(layers.KINDS)}))*)?")

# Several poolings stand side by side in this order, unless `pooling_mode` lists them in another.
POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Settings that would change the vectors, with the one value (or none) under which they do not.
TRANSFORMER_DEFAULTS = {
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    "query_length": None,
    "document_length": None,
    "query_expansion": None,
}


@dataclass(frozen=True, slots=True)
class Layout:
    """What the files around the transformer say."""

    root: Path
    transformer: Path
    pooling: tuple[str, ...] = ()  # none: a cross-encoder
    include_prompt: bool = True
    layers: tuple[Layer, ...] = ()
    normalise: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    transformer_settings: dict[str, Any] = field(default_factory=dict)

    @property
    def max_length(self) -> Any:
        """The longest sequence the model was trained for, if it says so."""
        return self.transformer_settings.get("max_seq_length")

    @property
    def table(self) -> dict[str, str]:
        """The templates of the layers' weights, to go with those of the family."""
        return {
            f"heads.embed.stages.{number}.{ours}": f"{layer.folder}/{theirs}"
            for number, layer in enumerate(self.layers)
            for ours, theirs in layers.WEIGHTS.items()
        }


def read(folder: Path) -> Layout | None:
    """The layout of a folder that has one."""
    if not files.exists(folder, MODULES):
        return None
    modules = _read_modules(folder)
    kinds = [kind for kind, _ in modules]
    if not ORDER.fullmatch(" ".join(kinds)):
        raise CheckpointError(f"{folder / MODULES}: {', '.join(kinds)} do not run in this order")
    path = modules[0][1]
    transformer = files.inside(folder, path) if path else folder
    settings = next((n for n in TRANSFORMER_SETTINGS if files.exists(transformer, n)), None)
    pooling, include_prompt = ((), True)
    if len(modules) > 1:
        pooling, include_prompt = _read_pooling(folder, modules[1][1])
    normalise = kinds[-1] == "Normalize"
    between = modules[2:-1] if normalise else modules[2:]
    if normalise:
        layers.read(folder, *modules[-1])  # its settings may be such that do not run
    layout = Layout(
        root=folder,
        transformer=transformer,
        pooling=pooling,
        include_prompt=include_prompt,
        layers=tuple(layers.read(folder, kind, path) for kind, path in between),
        normalise=normalise,
        settings=files.read_object(folder, SETTINGS, optional=True),
        transformer_settings=files.read_object(transformer, settings) if settings else {},
    )
    if pooling:
        layers.insist(transformer, layout.transformer_settings, TRANSFORMER_DEFAULTS)
    _refuse_lowercasing(layout)
    return layout


def _read_modules(folder: Path) -> list[tuple[str, str]]:
    """Kind and folder of each module."""
    found = files.read_json(folder, MODULES)
    modules = []
    for module in found if isinstance(found, list) else [found]:
        kind, path = (
            (module.get("type"), module.get("path")) if isinstance(module, dict) else ("", "")
        )
        package, _, name = str(kind).rpartition(".")
        if package.split(".")[0] != "sentence_transformers" or name not in KINDS:
            raise CheckpointError(
                f"{folder / MODULES}: module {kind!r} does not run here "
                f"(those that do: {', '.join(KINDS)}); {layers.INSTEAD}"
            )
        modules.append((name, str(path)))
    return modules


def _read_pooling(folder: Path, path: str) -> tuple[tuple[str, ...], bool]:
    """The modes, and whether the tokens of a prompt are pooled."""
    raw = files.read_object(files.inside(folder, path), "config.json")
    modes = raw.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in POOLING_FLAGS.items() if raw.get(flag)] or ["mean"]
    modes = modes if isinstance(modes, list) else [modes]
    for mode in modes:
        if not isinstance(mode, str) or mode not in POOLINGS:
            raise CheckpointError(
                f"{folder / path}: pooling {mode!r} does not run here "
                f"(those that do: {', '.join(POOLINGS)}); {layers.INSTEAD}"
            )
    if not modes:
        raise CheckpointError(f"{folder / path}: pooling_mode is empty; name at least one")
    return tuple(modes), raw.get("include_prompt", True) is not False


def _refuse_lowercasing(layout: Layout) -> None:
    """The layout may lowercase for a tokenizer that does not; here the tokenizer alone decides."""
    tokenizer = files.read_object(layout.transformer, "tokenizer_config.json", optional=True)
    if layout.transformer_settings.get("do_lower_case") and tokenizer.get("do_lower_case") is False:
        raise CheckpointError(
            f"{layout.transformer}: the layout asks for lower case, its tokenizer for both; "
            f"set do_lower_case in tokenizer_config.json and in tokenizer.json"
        )


def prompts(settings: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    """What to put before a text, by name, and the name to use when none is asked for."""
    found, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    mapping = isinstance(found, dict)
    if not mapping or not all(isinstance(text, str | None) for text in found.values()):
        raise CheckpointError(f"{SETTINGS}: prompts do not map names to texts")
    found = {name: text or "" for name, text in found.items()}
    if default is not None and default not in list(found):
        raise CheckpointError(f"{SETTINGS}: there is no default prompt {default!r}")
    return found, default


def comparing(layout: Layout | None) -> dict[str, Any]:
    """How vectors are meant to be compared, as far as the folder says: an `Encoder`'s fields."""
    settings = layout.settings if layout else {}
    likeness, kept = settings.get("similarity_fn_name"), settings.get("truncate_dim")
    if likeness is not None and not isinstance(likeness, str):
        raise CheckpointError(f"{SETTINGS}: similarity_fn_name is {likeness!r}, not a name")
    if kept is not None and (type(kept) is not int or kept < 1):
        raise CheckpointError(f"{SETTINGS}: truncate_dim is {kept!r}, not a count from 1")
    said = {"similarity_fn_name": likeness, "truncate_dim": kept}
    return {name: value for name, value in said.items() if value is not None}


def embed(layout: Layout, config: BertConfig) -> Embed:
    """The head, without its weights."""
    width = config.hidden_size * len(layout.pooling)
    for layer in layout.layers:
        if layer.inputs not in (0, width):
            raise CheckpointError(f"{layer.folder} takes {layer.inputs} features and gets {width}")
        width = width_after(layer.activation, layer.outputs) or width
    made = [layer.make() for layer in layout.layers]
    return Embed(layout.pooling, made, layout.normalise, layout.include_prompt)


def read_tensors(layout: Layout) -> dict[str, Tensor]:
    """The weights of the layers that have any, named by folder and tensor."""
    return {
        f"{layer.folder}/{name}": tensor
        for layer in layout.layers
        if layer.kind in layers.WEIGHTED
        for name, tensor in hf.read_weights(files.inside(layout.root, layer.folder)).items()
    }


def write(folder: Path, layout: Layout, head: Embed | None, width: int, max_length: int) -> None:
    """The files of the layout, around what `hf.write` has written; `width` is the encoder's."""
    kinds = ["Transformer"]
    if head is not None:
        kinds += ["Pooling", *(layers.kind_of(layer) for layer in head.stages)]
        kinds += ["Normalize"] * head.normalise
    paths = [f"{n}_{kind}" if n else "" for n, kind in enumerate(kinds)]
    for path in filter(None, paths):
        (folder / path).mkdir()
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    files.write_json(folder, MODULES, modules)
    files.write_json(folder, SETTINGS, layout.settings)
    said = {**layout.transformer_settings, "max_seq_length": max_length}
    files.write_json(folder, TRANSFORMER_SETTINGS[0], said)
    if head is not None:
        files.write_json(folder / paths[1], "config.json", _pooling_settings(head, width))
        for layer, path in zip(head.stages, paths[2:], strict=False):
            layers.write(folder / path, layer)


def _pooling_settings(head: Embed, width: int) -> dict[str, Any]:
    modes = list(head.pooling)
    flags = {flag: mode in modes for flag, mode in POOLING_FLAGS.items()}
    settings: dict[str, Any] = {"word_embedding_dimension": width, **flags}
    if not head.include_prompt:
        settings["include_prompt"] = False
    if [mode for mode in POOLING_FLAGS.values() if mode in modes] != modes:
        settings["pooling_mode"] = modes
    return settings
