"""The sentence-transformers layout around a Hugging Face folder: which head computes the vectors.

`modules.json` lists modules that run one after the other; here they become one `Embed` head: a
transformer, its pooling, and any number of dense layers, norms, dropouts and normalizations, each
in a folder with a `config.json` and, for dense layers and norms, a file of weights. A transformer
alone is a cross-encoder; with modules for retrieval (`retrieval`) it makes sparse vectors or one
vector per token. Another module, another order or a setting that would change the vectors
is refused by name, never skipped. No code that a file names is imported: the classes of
sentence-transformers and torch are recognized by their dotted names. Files are written as release 2
wrote them, which every later release reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from packhorse.checkpoint import files, hf, judging, retrieval
from packhorse.errors import CheckpointError
from packhorse.json_types import is_list, is_object
from packhorse.model.config import BertConfig
from packhorse.model.heads import Embed, Mlm
from packhorse.model.pooling import POOLINGS
from packhorse.model.retrieval import MultiVector, Splade, TokenWeights
from packhorse.model.vectors import ACTIVATIONS, Dense, UnitLength, VectorNorm, width_after

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
# Named after the family since the first release; only the first name is still written.
TRANSFORMER_SETTINGS = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "xlm-roberta")
)
LAYER_KINDS = ("Dense", "LayerNorm", "Dropout", "Normalize")
SPARSE_KINDS = ("SpladePooling", "SparseStaticEmbedding")
KINDS = ("Transformer", "Pooling", *LAYER_KINDS, *SPARSE_KINDS, "MultiVectorMask", "LogitScore")
OLD_KINDS = {"MLMTransformer": "Transformer"}
PACKAGES = ("sentence_transformers", "pylate")
# Modules of a repository's own code that do what Transformer does, and choose an adapter besides.
OWN_TRANSFORMERS = ("custom_st.Transformer",)
WEIGHTED = ("Dense", "LayerNorm")  # kinds of layers that have a file of weights
ORDER = re.compile(
    rf"Transformer( SpladePooling| LogitScore| Pooling( ({'|'.join(LAYER_KINDS)}))*)?"
)
MULTI_ORDER = re.compile(r"Transformer(?=.)( (Dense|LayerNorm))*( MultiVectorMask)?( Normalize)?")
WIDTH_LIMIT = 65_536  # numbers in a vector: in_features, out_features and dimension are a file's
INSTEAD = "encode with sentence-transformers itself, or load a model without it"

# Flags of sentence-transformers for its poolings; one without a flag is named in `pooling_mode`.
# Several are concatenated in this order, unless `pooling_mode` lists them in another.
POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Settings that would change the vectors, and the one value (besides none) that runs here.
TRANSFORMER_DEFAULTS = {
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    "query_length": None,
    "document_length": None,
    "query_expansion": None,
}
# A module of sentence-transformers may read and write other features; here there is only one.
FEATURE_DEFAULTS = {
    "module_input_name": "sentence_embedding",
    "module_output_name": "sentence_embedding",
}
SPARSE_DEFAULTS = {**TRANSFORMER_DEFAULTS, "transformer_task": "fill-mask"}
MULTI_DEFAULTS = {
    key: TRANSFORMER_DEFAULTS[key] for key in ("transformer_task", "module_output_name")
}
TOKEN_FEATURES = dict.fromkeys(FEATURE_DEFAULTS, "token_embeddings")
# The modules in which torch defines its activations, and the one that re-exports them.
TORCH = ("torch.nn.modules.activation", "torch.nn.modules.linear", "torch.nn")
# Our submodules with weights → those of sentence-transformers.
WEIGHTS = {
    "linear": "linear",
    "residual": "residual",
    "activation": "activation_function",
    "norm": "norm",
}


@dataclass(frozen=True, slots=True)
class SentenceLayer:
    """A module after the pooling: its kind, its folder and the settings of its config.json."""

    kind: str  # one of LAYER_KINDS
    folder: str
    inputs: int = 0  # width; 0: any
    outputs: int = 0
    bias: bool = True
    activation: str = "Identity"
    residual: bool = False
    dropout: float = 0.0

    def build(self) -> nn.Module:
        """The layer, without its weights."""
        if self.kind == "Dense":
            return Dense(self.inputs, self.outputs, self.bias, self.activation, self.residual)
        if self.kind == "LayerNorm":
            return VectorNorm(self.inputs)
        return nn.Dropout(self.dropout) if self.kind == "Dropout" else UnitLength()


@dataclass(frozen=True, slots=True)
class SentenceLayout:
    """The settings in the files around the transformer."""

    root: Path
    transformer: Path  # folder of the transformer
    pooling: tuple[str, ...] = ()  # empty: a cross-encoder
    include_prompt: bool = True
    layers: tuple[SentenceLayer, ...] = ()
    normalize: bool = False
    splade: retrieval.SpladeLayout | None = None
    multi: retrieval.MultiLayout | None = None  # then `layers` are those of tokens
    m3: tuple[str, ...] = ()  # bge-m3's files for further heads
    judged: judging.JudgedWords | None = None  # then the transformer is a language model
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    transformer_settings: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def max_length(self) -> Any:
        """The longest sequence the model was trained for, as the file has it; None if absent."""
        return self.transformer_settings.get("max_seq_length")

    @property
    def table(self) -> dict[str, str]:
        """The templates of the layers' weights, to be used with those of the family."""
        head = "multi" if self.multi and not self.m3 else "embed"
        layers = {
            f"heads.{head}.stages.{number}.{name}": "/".join(filter(None, (layer.folder, foreign)))
            for number, layer in enumerate(self.layers)
            for name, foreign in WEIGHTS.items()
        }
        return layers | {retrieval.M3_FILES[name]: name for name in self.m3}


def read(folder: Path) -> SentenceLayout | None:
    """The layout of a folder; None if it has none."""
    if not files.exists(folder, MODULES):
        return _read_colbert(folder)
    modules, query = _read_routes(folder)
    kinds = [kind for kind, _ in modules]
    if MULTI_ORDER.fullmatch(" ".join(kinds)):
        return _read_multi(folder, modules)
    if not ORDER.fullmatch(" ".join(kinds)):
        raise CheckpointError(f"{folder / MODULES}: {', '.join(kinds)} do not run in this order")
    path = modules[0][1]
    transformer = files.inside(folder, path) if path else folder
    pooling: tuple[str, ...] = ()
    include_prompt = True
    splade = None
    judged = None
    if kinds[-1] == "SpladePooling":
        splade = retrieval.read_splade(files.inside(folder, modules[1][1]), query)
    elif kinds[-1] == "LogitScore":
        judged = judging.read_words(files.inside(folder, modules[1][1]))
    elif len(modules) > 1:
        pooling, include_prompt = _read_pooling(folder, modules[1][1])
    normalize = kinds[-1] == "Normalize"
    between = modules[2:-1] if normalize else modules[2:]
    if normalize:
        _read_layer(folder, *modules[-1])  # only to check its settings
    layout = SentenceLayout(
        root=folder,
        transformer=transformer,
        pooling=pooling,
        include_prompt=include_prompt,
        layers=tuple(_read_layer(folder, kind, path) for kind, path in between),
        normalize=normalize,
        splade=splade,
        judged=judged,
        settings=files.read_object(folder, SETTINGS, optional=True),
        transformer_settings=_transformer_settings(transformer),
    )
    if pooling and (m3 := retrieval.m3_files(folder)):
        multi = retrieval.MultiLayout(drops_first=True) if retrieval.VECTORS in m3 else None
        layout = replace(layout, m3=m3, multi=multi)
    if pooling or splade:
        supported = SPARSE_DEFAULTS if splade else TRANSFORMER_DEFAULTS
        _check_settings(transformer, layout.transformer_settings, supported)
    _check_lowercasing(layout)
    return layout


def _transformer_settings(transformer: Path) -> dict[str, Any]:
    present = (name for name in TRANSFORMER_SETTINGS if files.exists(transformer, name))
    settings = next(present, None)
    return files.read_object(transformer, settings) if settings else {}


def _read_routes(folder: Path) -> tuple[list[tuple[str, str]], Path | None]:
    """The modules for documents, and the folder of the weights of words in queries, if any."""
    modules = _read_modules(folder)
    kind, path = modules[0]
    if kind not in retrieval.ROUTERS:
        return modules, None
    routes = {
        route: [(_kind(folder, kind), path) for kind, path in parts]
        for route, parts in retrieval.read_routes(folder, path).items()
    }
    kinds = {route: [kind for kind, _ in parts] for route, parts in routes.items()}
    sparse = {"query": ["SparseStaticEmbedding"], "document": ["Transformer", "SpladePooling"]}
    if kinds != sparse or len(modules) > 1:
        raise CheckpointError(
            f"{folder / MODULES}: routes run here for sparse models only, of queries as "
            f"SparseStaticEmbedding and of documents as Transformer, SpladePooling; {INSTEAD}"
        )
    return routes["document"], files.inside(folder, routes["query"][0][1])


def _read_multi(folder: Path, modules: list[tuple[str, str]]) -> SentenceLayout:
    """The layout of a model that makes a vector per token."""
    paths = dict(modules)  # of the kinds that are there once
    transformer = files.inside(folder, modules[0][1]) if modules[0][1] else folder
    transformer_settings = _transformer_settings(transformer)
    settings = files.read_object(folder, SETTINGS, optional=True)
    mask = None
    if "MultiVectorMask" in paths:
        mask = files.read_object(files.inside(folder, paths["MultiVectorMask"]), "config.json")
    layout = SentenceLayout(
        root=folder,
        transformer=transformer,
        layers=tuple(
            _read_layer(folder, kind, path, TOKEN_FEATURES)
            for kind, path in modules[1:]
            if kind in WEIGHTED
        ),
        multi=retrieval.read_multi(transformer_settings, settings, mask, "Normalize" in paths),
        settings=settings,
        transformer_settings=transformer_settings,
    )
    _check_settings(transformer, transformer_settings, MULTI_DEFAULTS)
    _check_lowercasing(layout)
    return layout


def _read_colbert(folder: Path) -> SentenceLayout | None:
    """The layout of an original ColBERT checkpoint, whose projection is among its tensors."""
    multi = retrieval.read_colbert(folder)
    if multi is None:
        return None
    linear = SentenceLayer("Dense", "", bias=False)  # its widths are those of the tensor
    return SentenceLayout(folder, folder, layers=(linear,), multi=multi)


def _read_modules(folder: Path) -> list[tuple[str, str]]:
    """Kind and folder of each module."""
    document = files.read_json(folder, MODULES)
    modules: list[tuple[str, str]] = []
    for module in document if is_list(document) else [document]:
        fields = module if is_object(module) else {"type": "", "path": ""}
        kind = fields.get("type")
        modules.append((_kind(folder, kind), str(fields.get("path"))))
    return modules


def _kind(folder: Path, module: Any) -> str:
    """The kind of a module, from the dotted name of its class."""
    if module in OWN_TRANSFORMERS:
        return "Transformer"
    package, _, name = str(module).rpartition(".")
    name = OLD_KINDS.get(name, name)
    if package.split(".")[0] not in PACKAGES or name not in (*KINDS, *retrieval.ROUTERS):
        raise CheckpointError(
            f"{folder / MODULES}: module {module!r} does not run here "
            f"(those that do: {', '.join(KINDS)}); {INSTEAD}"
        )
    return name


def _read_pooling(folder: Path, path: str) -> tuple[tuple[str, ...], bool]:
    """The modes, and whether the tokens of a prompt are pooled."""
    raw = files.read_object(files.inside(folder, path), "config.json")
    named: Any = raw.get("pooling_mode")
    modes: list[Any] = named if is_list(named) else [named]
    if named is None:
        modes = [mode for flag, mode in POOLING_FLAGS.items() if raw.get(flag)] or ["mean"]
    for mode in modes:
        if not isinstance(mode, str) or mode not in POOLINGS:
            raise CheckpointError(
                f"{folder / path}: pooling {mode!r} does not run here "
                f"(those that do: {', '.join(POOLINGS)}); {INSTEAD}"
            )
    if not modes:
        raise CheckpointError(f"{folder / path}: pooling_mode is empty; name at least one")
    return tuple(modes), raw.get("include_prompt", True) is not False


def _read_layer(
    folder: Path, kind: str, path: str, features: Mapping[str, Any] = FEATURE_DEFAULTS
) -> SentenceLayer:
    """The layer that the config.json of a module after the pooling describes."""
    home = files.inside(folder, path)
    raw = files.read_object(home, "config.json", optional=kind == "Normalize")
    if kind == "Dense":
        return _read_dense(home, path, raw, features)
    if kind == "Dropout":
        rate = raw.get("dropout", 0.2)
        if type(rate) not in (int, float) or not 0 <= rate <= 1:
            raise CheckpointError(f"{home}: dropout {rate!r} is no rate from 0 to 1")
        return SentenceLayer(kind, path, dropout=float(rate))
    if kind == "LayerNorm":
        width = _width(home, "dimension", raw.get("dimension"))
        return SentenceLayer(kind, path, inputs=width, outputs=width)
    _check_settings(home, raw, features)
    return SentenceLayer(kind, path)


def _read_dense(
    home: Path, path: str, raw: Mapping[str, Any], features: Mapping[str, Any]
) -> SentenceLayer:
    _check_settings(home, raw, features)
    outputs = _width(home, "out_features", raw.get("out_features"))
    activation = _activation(home, raw.get("activation_function", f"{TORCH[0]}.Tanh"))
    residual = raw.get("use_residual", False) is True
    if activation == "GLU" and (residual or outputs % 2):
        raise CheckpointError(
            f"{home}: GLU halves its {outputs} numbers, which does not go with use_residual or an "
            "odd out_features"
        )
    return SentenceLayer(
        "Dense",
        path,
        inputs=_width(home, "in_features", raw.get("in_features")),
        outputs=outputs,
        bias=raw.get("bias", True) is not False,
        activation=activation,
        residual=residual,
    )


def _activation(home: Path, name: Any) -> str:
    """The class name of a torch activation, from its dotted name; nothing is imported."""
    package, _, kind = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    if package not in TORCH or kind not in ACTIVATIONS:
        raise CheckpointError(
            f"{home}: activation {name!r} does not run here; of torch's own there are "
            f"{', '.join(ACTIVATIONS)} (as {TORCH[0]}.Tanh)"
        )
    return kind


def _width(home: Path, key: str, value: Any) -> int:
    if type(value) is not int or not 0 < value <= WIDTH_LIMIT:
        raise CheckpointError(f"{home}: {key} is {value!r}, not a count from 1 to {WIDTH_LIMIT}")
    return value


def _check_settings(home: Path, raw: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    """Raise if a setting has a value other than the only one that runs here."""
    for key, value in supported.items():
        if raw.get(key) not in (None, value):
            raise CheckpointError(f"{home}: {key} {raw[key]!r} does not run here; {INSTEAD}")


def _check_lowercasing(layout: SentenceLayout) -> None:
    """Raise if the layout lowercases and its tokenizer does not: here only the tokenizer can."""
    tokenizer = files.read_object(layout.transformer, "tokenizer_config.json", optional=True)
    if layout.transformer_settings.get("do_lower_case") and tokenizer.get("do_lower_case") is False:
        raise CheckpointError(
            f"{layout.transformer}: the layout lowercases texts, its tokenizer does not; "
            f"set do_lower_case in tokenizer_config.json and in tokenizer.json"
        )


def prompts(settings: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    """The prompts to put before a text by name, and the name of the default one."""
    texts: Any = settings.get("prompts") or dict[str, str]()
    default = settings.get("default_prompt_name")
    if not is_object(texts) or not all(isinstance(text, str | None) for text in texts.values()):
        raise CheckpointError(f"{SETTINGS}: prompts do not map names to texts")
    texts = {name: text or "" for name, text in texts.items()}
    if default is not None and default not in list(texts):
        raise CheckpointError(f"{SETTINGS}: there is no default prompt {default!r}")
    return texts, default


def comparing(layout: SentenceLayout | None) -> dict[str, Any]:
    """The settings for comparing vectors that the folder has, as keyword arguments of `Encoder`."""
    settings = layout.settings if layout else {}
    similarity = settings.get("similarity_fn_name")
    width = settings.get("truncate_dim")
    if similarity is not None and not isinstance(similarity, str):
        raise CheckpointError(f"{SETTINGS}: similarity_fn_name is {similarity!r}, not a name")
    if width is not None and (type(width) is not int or width < 1):
        raise CheckpointError(f"{SETTINGS}: truncate_dim is {width!r}, not a count from 1")
    options = {"similarity_fn_name": similarity, "truncate_dim": width}
    return {name: value for name, value in options.items() if value is not None}


def score_activation(
    raw: Mapping[str, Any], layout: SentenceLayout | None, labels: Sequence[str]
) -> str:
    """The class name of the activation that the model's own CrossEncoder puts after its logits.

    The layout's file is asked first, then the configuration under its key of today, then under that
    of releases before 4. As there, a class that is not torch's own is not imported: the default
    takes its place, a sigmoid for a single score, and logits for several.
    """
    settings: Any = raw.get("sentence_transformers")
    places: list[tuple[Mapping[str, Any], str]] = [
        (layout.settings if layout else {}, "activation_fn"),
        (settings if is_object(settings) else {}, "activation_fn"),
        (raw, "sbert_ce_default_activation_function"),
    ]
    for place, key in places:
        package, _, kind = str(place.get(key) or "").rpartition(".")
        if package in TORCH:
            return kind
    return "Sigmoid" if len(labels) == 1 else "Identity"


def embed(layout: SentenceLayout, config: BertConfig) -> Embed:
    """The head that computes the vectors, without its weights."""
    width = config.hidden_size * len(layout.pooling)
    for layer in layout.layers:
        if layer.inputs not in (0, width):
            raise CheckpointError(f"{layer.folder} takes {layer.inputs} features and gets {width}")
        width = width_after(layer.activation, layer.outputs) or width
    stages = [layer.build() for layer in layout.layers]
    return Embed(layout.pooling, stages, layout.normalize, layout.include_prompt)


def heads(
    layout: SentenceLayout, config: BertConfig, others: Mapping[str, nn.Module], vectors: int
) -> dict[str, nn.Module]:
    """The heads that the layout describes, without their weights.

    others: those that the weights have; vectors: the width of a token's vector, where only the
    weights say.
    """
    found: dict[str, nn.Module] = {}
    if layout.pooling:
        found["embed"] = embed(layout, config)
    if layout.splade:
        scores = others.get("mlm")
        if not isinstance(scores, Mlm):
            raise CheckpointError("SPLADE needs the scores of words, and there is no MLM head")
        found["sparse"] = Splade(scores, layout.splade.pooling, layout.splade.activation)
    if retrieval.LEXICAL in layout.m3:
        found["lexical"] = TokenWeights(config.hidden_size)
    if layout.multi:
        width = config.hidden_size
        stages = [layer.build() for layer in layout.layers if layer.outputs]
        unsized = any(not layer.outputs for layer in layout.layers if layer.kind == "Dense")
        if not vectors and (unsized or layout.m3):
            raise CheckpointError("the projection of the vectors of tokens has no weight")
        if vectors:
            stages = [Dense(width, vectors, retrieval.VECTORS in layout.m3, "Identity")]
        found["multi"] = MultiVector(stages, layout.multi.normalize)
    return found


def vectors_width(layout: SentenceLayout | None, tensors: Mapping[str, Tensor]) -> int:
    """The width of a token's vector where only the weights say; else 0."""
    if layout is None or layout.multi is None:
        return 0
    name = f"{retrieval.VECTORS}.weight" if layout.m3 else "linear.weight"
    weight = tensors.get(name)
    return len(weight) if weight is not None and weight.ndim == 2 else 0


def read_tensors(layout: SentenceLayout) -> dict[str, Tensor]:
    """The weights of all layers that have any, named by folder and tensor."""
    further = {
        f"{file}.{name}": tensor
        for file in layout.m3
        for name, tensor in hf.read_file(layout.root / file).tensors.items()
    }
    return further | {
        f"{layer.folder}/{name}": tensor
        for layer in layout.layers
        if layer.kind in WEIGHTED and layer.folder
        for name, tensor in hf.read_weights(files.inside(layout.root, layer.folder)).items()
    }


def write(
    folder: Path, layout: SentenceLayout, head: Embed | None, width: int, max_length: int
) -> None:
    """Write the layout's files around those of `hf.write`; `width` is the encoder's."""
    kinds = ["Transformer"]
    if head is not None:
        kinds += ["Pooling", *(_kind_of(stage) for stage in head.stages)]
        if head.normalize:
            kinds.append("Normalize")
    paths = [f"{number}_{kind}" if number else "" for number, kind in enumerate(kinds)]
    for path in filter(None, paths):
        (folder / path).mkdir()
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    files.write_json(folder, MODULES, modules)
    files.write_json(folder, SETTINGS, layout.settings)
    transformer_settings = {**layout.transformer_settings, "max_seq_length": max_length}
    files.write_json(folder, TRANSFORMER_SETTINGS[0], transformer_settings)
    if head is not None:
        files.write_json(folder / paths[1], "config.json", _pooling_settings(head, width))
        for stage, path in zip(head.stages, paths[2:], strict=False):
            _write_layer(folder / path, stage)


def _kind_of(stage: nn.Module) -> str:
    kinds: dict[type[nn.Module], str] = {
        Dense: "Dense",
        VectorNorm: "LayerNorm",
        nn.Dropout: "Dropout",
    }
    return kinds.get(type(stage), "Normalize")


def _pooling_settings(head: Embed, width: int) -> dict[str, Any]:
    modes = list(head.pooling)
    flags = {flag: mode in modes for flag, mode in POOLING_FLAGS.items()}
    settings: dict[str, Any] = {"word_embedding_dimension": width, **flags}
    if not head.include_prompt:
        settings["include_prompt"] = False
    if [mode for mode in POOLING_FLAGS.values() if mode in modes] != modes:
        settings["pooling_mode"] = modes
    return settings


def _write_layer(folder: Path, stage: nn.Module) -> None:
    settings: dict[str, Any] = {}
    if isinstance(stage, Dense):
        package = TORCH[1] if stage.activation_name == "Identity" else TORCH[0]
        settings = {
            "in_features": stage.inputs,
            "out_features": stage.outputs,
            # torch declares a bias that is always there.
            "bias": stage.linear.bias is not None,  # pyright: ignore[reportUnnecessaryComparison]
            "activation_function": f"{package}.{stage.activation_name}",
        }
        if stage.adds_input:
            settings["use_residual"] = True
    elif isinstance(stage, VectorNorm):
        settings = {"dimension": stage.norm.normalized_shape[0]}
    elif isinstance(stage, nn.Dropout):
        settings = {"dropout": stage.p}
    files.write_json(folder, "config.json", settings)
    state = {_foreign_name(name): tensor for name, tensor in stage.state_dict().items()}
    if state:
        hf.write_tensors(folder / hf.WEIGHTS, state)


def _foreign_name(name: str) -> str:
    module, _, rest = name.partition(".")
    return f"{WEIGHTS[module]}.{rest}"
