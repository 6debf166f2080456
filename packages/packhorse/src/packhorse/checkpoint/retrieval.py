"""The files that make a model a sparse or a multi-vector one, as their libraries write them.

*Sparse*: sentence-transformers' modules (`SpladePooling` after a transformer that scores words, and
for queries without a model `SparseStaticEmbedding` behind a `Router`). *Multi-vector*: its modules
(`Dense`, `MultiVectorMask`, `Normalize` on tokens), the same as PyLate writes them, with the
settings in config_sentence_transformers.json, and the original ColBERT's folders (class
`HF_ColBERT`, `linear.weight`, `artifact.metadata`). *Both*: bge-m3's `sparse_linear.pt` and
`colbert_linear.pt` beside a layout for dense vectors.

`sentence` reads which modules a model has. This module reads and checks the settings of those for
retrieval, and finds the tokens of the words in them. A setting that a file leaves out has the
default of the library that wrote the file.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from packhorse.checkpoint import files, hf
from packhorse.errors import CheckpointError, InputError
from packhorse.json_types import is_list, is_object
from packhorse.model.retrieval import (
    SPLADE_ACTIVATIONS,
    SPLADE_POOLINGS,
    MultiSettings,
    SparseSettings,
    TokenSide,
)
from packhorse.tokens import Tokenizer

ROUTERS = ("Router", "Asym")
ROUTES = "router_config.json"
COLBERT = "HF_ColBERT"  # the class in the configuration of original ColBERT checkpoints
ARTIFACT = "artifact.metadata"
IDF = "idf.json"  # weights of words in queries, by word
# bge-m3's files → our modules.
LEXICAL = "sparse_linear.pt"
VECTORS = "colbert_linear.pt"
M3_FILES = {LEXICAL: "heads.lexical.linear", VECTORS: "heads.multi.stages.0.linear"}
LENGTH_LIMIT = 1 << 20  # tokens; lengths come from a file
PYLATE_LENGTHS = {"query_length": 32, "document_length": 180}  # its defaults
EXPANSION_KEYS = {"strategy", "attend", "length", "token"}


@dataclass(frozen=True, slots=True)
class SpladeLayout:
    """The settings of a sparse model's files."""

    pooling: str
    activation: str
    query: Path | None = None  # the folder of the weights of words in queries


@dataclass(frozen=True, slots=True)
class MultiLayout:
    """The settings of a multi-vector model's files, with tokens by their text."""

    normalize: bool = True
    query_length: int = 0
    document_length: int = 0
    query_marker: str | None = None
    document_marker: str | None = None
    expands: bool = False
    attends: bool = False
    filler: str | None = None  # None: the tokenizer's [MASK]
    skipped: tuple[str, ...] = ()
    skips_in: tuple[str, ...] = ("document",)
    drops_first: bool = False


def read_splade(home: Path, query: Path | None = None) -> SpladeLayout:
    """The settings of a folder of `SpladePooling`."""
    raw = files.read_object(home, "config.json")
    pooling = raw.get("pooling_strategy", "max")
    activation = raw.get("activation_function", "relu")
    for key, value, known in (
        ("pooling_strategy", pooling, SPLADE_POOLINGS),
        ("activation_function", activation, SPLADE_ACTIVATIONS),
    ):
        if value not in known:
            raise CheckpointError(
                f"{home}: {key} {value!r} does not run here; there are {', '.join(known)}"
            )
    return SpladeLayout(str(pooling), str(activation), query)


def read_routes(folder: Path, path: str) -> dict[str, list[tuple[str, str]]]:
    """The modules of each route of a `Router`: kind (a dotted name) and folder."""
    home = files.inside(folder, path) if path else folder
    raw = files.read_object(home, ROUTES if files.exists(home, ROUTES) else "config.json")
    types: Any = raw.get("types")
    structure: Any = raw.get("structure")
    if not is_object(types) or not is_object(structure):
        raise CheckpointError(f"{home / ROUTES}: types and structure do not name the modules")
    routes: dict[str, list[tuple[str, str]]] = {}
    for route, names in structure.items():
        if not is_list(names) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{home / ROUTES}: the route {route!r} is no list of modules")
        within = f"{path}/" if path else ""
        routes[route] = [(str(types.get(name)), f"{within}{name}") for name in names]
    return routes


def query_weights(folder: Path, tokenizer: Tokenizer, width: int) -> np.ndarray:
    """[V] the weights of words in queries, of a folder of `SparseStaticEmbedding`."""
    weights = np.zeros(width, np.float32)
    raw = files.read_object(folder, "config.json", optional=True)
    by_word = next((home for home in (folder, folder.parent) if files.exists(home, IDF)), None)
    if hf.format_of(folder) is None and (raw.get("path") or by_word):
        if by_word is None:
            raise CheckpointError(f"{folder}: there is no {IDF} with the weights of words")
        for word, weight in files.read_object(by_word, IDF).items():
            if type(weight) not in (int, float) or not np.isfinite(weight):
                raise CheckpointError(f"{by_word / IDF}: the weight of {word!r} is {weight!r}")
            weights[tokenizer.id(word)] = weight
        return weights
    tensor: Tensor | None = hf.read_weights(folder).get("weight")
    if tensor is None or tensor.ndim != 1 or len(tensor) > width:
        raise CheckpointError(f"{folder}: there is no tensor 'weight' of up to {width} numbers")
    weights[: len(tensor)] = tensor.float().numpy()
    if not np.isfinite(weights).all():
        raise CheckpointError(f"{folder}: the weights of words are not all finite")
    return weights


def query_files(folder: Path) -> list[Path]:
    """The files that `query_weights` may read."""
    beside = folder.parent / IDF
    inside = sorted(path for path in folder.rglob("*") if path.is_file())
    return [*inside, *([beside] if beside.is_file() else [])]


def sparse_settings(
    splade: SpladeLayout | None, heads: Sequence[str], tokenizer: Tokenizer, width: int
) -> SparseSettings | None:
    """How a model with these heads makes sparse vectors; None if it makes none."""
    if "lexical" in heads:
        return SparseSettings(tokenizer.vocab_size, "lexical", _without_meaning(tokenizer))
    if splade is None or "sparse" not in heads:
        return None
    weights = None if splade.query is None else query_weights(splade.query, tokenizer, width)
    return SparseSettings(width, "sparse", (), weights)


def _without_meaning(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special tokens to which bge-m3 gives no weight."""
    known = {tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id}
    for word in ("<unk>", "[UNK]"):
        known |= _ids(tokenizer, (word,))
    return tuple(sorted(id for id in known if id is not None))


def _ids(tokenizer: Tokenizer, words: Sequence[str]) -> set[int]:
    """The tokens that are spelled so, of those that the vocabulary has."""
    ids: set[int] = set()
    for word in words:
        try:
            ids.add(tokenizer.id(word))
        except InputError:  # other libraries leave such words out too
            continue
    return ids


def read_multi(
    transformer: Mapping[str, Any],
    settings: Mapping[str, Any],
    mask: Mapping[str, Any] | None,
    normalizes: bool,
) -> MultiLayout:
    """The settings of a multi-vector model of sentence-transformers or PyLate.

    transformer: the settings of its first module; settings: those of the model; mask: those of its
    `MultiVectorMask`, which PyLate's models lack.
    """
    if mask is None:
        return _read_pylate(settings)
    expansion: Any = transformer.get("query_expansion")
    if expansion is not None and (
        not is_object(expansion)
        or expansion.get("strategy") != "fixed"
        or set(expansion) - EXPANSION_KEYS
    ):
        raise CheckpointError(f"query_expansion {expansion!r} does not run here, only 'fixed'")
    if mask.get("keep_only_token_ids"):
        raise CheckpointError("keep_only_token_ids of MultiVectorMask does not run here")
    expansion = expansion or {}
    tasks = mask.get("skiplist_tasks") or ["document"]
    return MultiLayout(
        normalize=normalizes,
        query_length=_length("length", expansion.get("length", transformer.get("query_length"))),
        document_length=_length("document_length", transformer.get("document_length")),
        expands=bool(expansion),
        attends=expansion.get("attend") is True,
        filler=_text("token", expansion.get("token")),
        skipped=_words(mask.get("skiplist_words"), []),
        skips_in=_words([tasks] if isinstance(tasks, str) else tasks, []),
    )


def _read_pylate(settings: Mapping[str, Any]) -> MultiLayout:
    lengths = {
        key: _length(key, settings.get(key)) or default for key, default in PYLATE_LENGTHS.items()
    }
    query = settings.get("query_prefix")
    document = settings.get("document_prefix")
    return MultiLayout(
        query_length=lengths["query_length"],
        document_length=lengths["document_length"],
        query_marker=_text("query_prefix", "[Q] " if query is None else query),
        document_marker=_text("document_prefix", "[D] " if document is None else document),
        expands=settings.get("do_query_expansion") is not False,
        attends=settings.get("attend_to_expansion_tokens") is True,
        skipped=_words(settings.get("skiplist_words"), list(string.punctuation)),
    )


def read_colbert(folder: Path) -> MultiLayout | None:
    """The settings of an original ColBERT checkpoint; None if the folder is none."""
    try:
        config = files.read_object(folder, "config.json", optional=True)
    except CheckpointError:
        return None  # `configuration` says what is wrong with it, unless another one is passed
    named: Any = config.get("architectures")
    if not is_list(named) or COLBERT not in named:
        return None
    raw: dict[str, Any] = {}
    if files.exists(folder, ARTIFACT):
        raw = files.read_object(folder, ARTIFACT)
    if raw.get("similarity", "cosine") != "cosine":
        raise CheckpointError(f"{folder / ARTIFACT}: similarity {raw['similarity']!r} is unknown")
    punctuation = string.punctuation if raw.get("mask_punctuation", True) is not False else ""
    return MultiLayout(
        query_length=_length("query_maxlen", raw.get("query_maxlen")) or 32,
        document_length=_length("doc_maxlen", raw.get("doc_maxlen")),
        query_marker=_text("query_token_id", raw.get("query_token_id") or "[unused0]"),
        document_marker=_text("doc_token_id", raw.get("doc_token_id") or "[unused1]"),
        expands=True,
        attends=raw.get("attend_to_mask_tokens") is True,
        skipped=tuple(punctuation),
    )


def multi_settings(
    layout: MultiLayout | None, heads: Sequence[str], tokenizer: Tokenizer, width: int
) -> MultiSettings | None:
    """How a model with these heads makes vectors of tokens; None if it makes none."""
    if layout is None or "multi" not in heads:
        return None
    skipped = tuple(sorted(_ids(tokenizer, layout.skipped)))
    filler = None
    if layout.expands:
        filler = tokenizer.mask_id if layout.filler is None else tokenizer.id(layout.filler)
        if filler is None:
            raise CheckpointError("queries are filled up, and the tokenizer has no mask token")
    return MultiSettings(
        width=width,
        query=TokenSide(
            layout.query_length,
            _marker(tokenizer, layout.query_marker),
            filler,
            skipped if "query" in layout.skips_in else (),
        ),
        document=TokenSide(
            layout.document_length,
            _marker(tokenizer, layout.document_marker),
            None,
            skipped if "document" in layout.skips_in else (),
        ),
        attends_to_filler=layout.attends,
        drops_first=layout.drops_first,
    )


def _marker(tokenizer: Tokenizer, text: str | None) -> int | None:
    """The token of a marker; PyLate adds markers to vocabularies with a blank after them."""
    if not text:
        return None
    ids = _ids(tokenizer, (text,)) or _ids(tokenizer, (text.strip(),))
    if not ids:
        raise CheckpointError(f"the marker {text!r} is not a token of the vocabulary")
    return ids.pop()


def m3_files(folder: Path) -> tuple[str, ...]:
    """Which of bge-m3's files for sparse and multi-vector outputs are in a folder."""
    return tuple(name for name in M3_FILES if files.exists(folder, name))


def _length(key: str, value: Any) -> int:
    if value is None:
        return 0
    if type(value) is not int or not 0 < value <= LENGTH_LIMIT:
        raise CheckpointError(f"{key} is {value!r}, not a count from 1 to {LENGTH_LIMIT}")
    return value


def _text(key: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{key} is {value!r}, not a text")
    return value


def _words(value: Any, default: list[str]) -> tuple[str, ...]:
    words = default if value is None else value
    if not is_list(words) or not all(isinstance(word, str) for word in words):
        raise CheckpointError(f"{words!r:.80} is not a list of words")
    return tuple(map(str, words))
