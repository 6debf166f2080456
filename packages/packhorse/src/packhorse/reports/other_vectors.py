"""Vectors that somebody already has, from a running server or in a file, beside those of a model.

    server = find_server("http://localhost:8080", key="")
    agreement = compare(encoder.embed(texts), server.embed(texts))

Whoever moves to another server keeps an index, and asks whether new vectors may be mixed with old
ones. A mean cosine near one does not answer that: what counts is whether a search finds the same
texts. So each text is a query among all others, and the ten nearest by both kinds of vectors are
compared. Vectors are compared by direction; whether they have length one is reported apart.

A server is recognized by what it answers: text-embeddings-inference by `/info`, OpenAI's API (vLLM,
Infinity and most others) by its list of models.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np

from packhorse.data.tables import read_rows, read_texts
from packhorse.errors import InputError

NEIGHBORS = 10
MIN_TEXTS = 32  # with fewer, the ten nearest are most of the texts whatever the vectors are
REQUEST_TEXTS = 32  # the most that text-embeddings-inference takes by default
REQUEST_SECONDS = 120.0
UNIT_TOLERANCE = 1e-2  # of the length of a vector; vectors stored as bf16 are off by half of it
VECTOR_COLUMNS = ("vector", "embedding", "embeddings", "values")  # preferred if there are several


# A server ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VectorServer:
    """A server that makes vectors, and how it is asked."""

    kind: str  # for people: whose API it has
    url: str  # where texts are sent
    model: str | None  # as the server calls it; None if it need not be named
    key: str

    def embed(
        self, texts: Sequence[str], progress: Callable[[int, int], None] | None = None
    ) -> np.ndarray:
        """Return one vector per text; raises `InputError` for whatever the server answers else."""
        parts: list[np.ndarray] = []
        for start in range(0, len(texts), REQUEST_TEXTS):
            chosen = list(texts[start : start + REQUEST_TEXTS])
            body: dict[str, Any] = {"input": chosen, "model": self.model}
            if self.model is None:
                body = {"inputs": chosen, "truncate": True}
            answer = request_json(self.url, self.key, body)
            parts.append(_read_vectors(answer, len(chosen), self.url))
            if progress is not None:
                progress(start + len(chosen), len(texts))
        if len({part.shape[1] for part in parts}) != 1:
            raise InputError(f"{self.url} answers with vectors of different dimensions")
        return np.concatenate(parts)


def find_server(url: str, key: str = "") -> VectorServer:
    """Ask a server which API it has; the path of a route may be part of the URL, and decides."""
    base = url.rstrip("/")
    path = urlsplit(base).path
    if path.endswith("/embed"):
        return VectorServer("text-embeddings-inference", base, None, key)
    root = base.removesuffix("/embeddings").removesuffix("/v1")
    if not path.endswith(("/embeddings", "/v1")):
        info = request_json(f"{root}/info", key, allow_missing=True)
        if isinstance(info, dict) and "model_id" in info and "max_client_batch_size" in info:
            return VectorServer("text-embeddings-inference", f"{root}/embed", None, key)
    for prefix in (f"{root}/v1", root):  # Infinity has the same routes without a version
        models = request_json(f"{prefix}/models", key, allow_missing=True)
        names = _model_names(models)
        if names:
            return VectorServer("OpenAI's API", f"{prefix}/embeddings", names[0], key)
    raise InputError(
        f"{url} has neither /info of text-embeddings-inference nor a list of models at /v1/models; "
        "name the route that makes vectors, such as http://localhost:8080/embed"
    )


def request_json(
    url: str, key: str, body: dict[str, Any] | None = None, allow_missing: bool = False
) -> Any:
    """Return the JSON that a server answers; with `allow_missing`, None if there is no such route.

    Raises `InputError`, with what to do, if it cannot be reached or refuses.
    """
    headers = {"Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, headers)
        if key:  # not for another server that this one redirects to
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            message = error.read(500).decode("utf-8", "replace")
        if error.code in (401, 403):
            raise InputError(
                f"{url} refuses the key ({error.code}); set PACKHORSE_API_KEY to one it accepts"
            ) from error
        if allow_missing and error.code in (404, 405):
            return None
        raise InputError(f"{url} answered {error.code}: {message}") from error
    except json.JSONDecodeError as error:
        if allow_missing:  # a page for people, at a path that another server uses for something
            return None
        raise InputError(f"{url} did not answer with JSON") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise InputError(f"cannot reach {url}: {reason}; is the server running?") from error


def _model_names(document: Any) -> list[str]:
    data = cast("Mapping[str, Any]", document).get("data") if isinstance(document, dict) else None
    if not isinstance(data, list):
        return []
    return [str(entry["id"]) for entry in cast("list[Any]", data) if "id" in entry]


def _read_vectors(answer: Any, count: int, url: str) -> np.ndarray:
    """Return the vectors in an answer of either API, in the order of the texts."""
    rows: Any = answer
    if isinstance(answer, dict):
        entries = sorted(cast("Any", answer).get("data", ()), key=lambda entry: entry["index"])
        rows = [entry["embedding"] for entry in entries]
    return as_vectors(rows, count, url)


# A file ------------------------------------------------------------------------------------------


def read_index(path: Path, texts_file: str | None, limit: int) -> tuple[list[str], np.ndarray]:
    """Return the first texts of an index and their vectors: parquet, jsonl, or npy beside texts.

    Vectors of an .npy file belong to the lines of `texts_file` in order. Rows of a table have their
    text in a column; if they have none, they belong to the texts whose id, or number, they have.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist; --against takes a URL or a file of vectors")
    suffix = path.suffix.lower()
    if suffix == ".npy":
        if texts_file is None:
            raise InputError(f"{path} has vectors without their texts; pass --texts FILE")
        texts = [text for _, text in _numbered_texts(texts_file, limit)]
        return texts, _read_npy(path, texts_file, len(texts), limit)
    if suffix not in (".parquet", ".jsonl"):
        raise InputError(f"{path}: vectors are read from .parquet, .jsonl and .npy")
    known = None if texts_file is None else dict(_numbered_texts(texts_file, limit))
    texts = []
    rows: list[Any] = []
    vector_column = text_column = ""
    for number, row in enumerate(islice(read_rows(path), limit)):
        if not rows:
            vector_column = _vector_column(row.cells, row.place)
            text_column = "" if known is not None else _text_column(row.cells, row.place)
        if known is None:
            text = row.cells.get(text_column)
        else:
            text = known.get(str(row.cells.get("id", number)))
        if not isinstance(text, str) or not text:
            raise InputError(f"{row.place}: this vector has no text")
        texts.append(text)
        rows.append(row.cells.get(vector_column))
    return texts, as_vectors(rows, len(texts), str(path))


def _read_npy(path: Path, texts_file: str, count: int, limit: int) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not an array of numbers: {error}") from error
    if array.ndim != 2 or len(array) < count or (count < limit and len(array) != count):
        raise InputError(
            f"{path} has shape {list(array.shape)}; {texts_file} has {count} texts, and each needs "
            "a row"
        )
    return as_vectors(np.asarray(array[:count]), count, str(path))


def _numbered_texts(file: str, limit: int) -> Iterator[tuple[str, str]]:
    for record in islice(read_texts(file), limit):
        yield str(record.id), str(record.text)


def _vector_column(cells: Mapping[str, Any], place: str) -> str:
    names = [name for name, value in cells.items() if _is_vector(value)]
    preferred = [name for name in names if name in VECTOR_COLUMNS]
    chosen = preferred or names
    if len(chosen) != 1:
        columns = ", ".join(cells)
        raise InputError(f"{place}: one column must have vectors; the columns are: {columns}")
    return chosen[0]


def _is_vector(value: Any) -> bool:
    if not isinstance(value, list | tuple | np.ndarray) or len(value) < 2:
        return False
    first: Any = value[0]
    return isinstance(first, int | float | np.number) and not isinstance(first, bool)


def _text_column(cells: Mapping[str, Any], place: str) -> str:
    if isinstance(cells.get("text"), str):
        return "text"
    names = [name for name, value in cells.items() if isinstance(value, str) and name != "id"]
    if len(names) != 1:
        raise InputError(
            f"{place}: there is no column `text`, and no other that is the only one with texts; "
            "pass --texts FILE with the texts in the order of the vectors"
        )
    return names[0]


def as_vectors(rows: Any, count: int, source: str) -> np.ndarray:
    """Return float32 [count, dimension]; raises `InputError` if that is not what the rows are."""
    try:
        vectors = np.asarray(rows, np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(f"{source}: not all vectors are numbers of one dimension") from error
    if vectors.ndim != 2 or len(vectors) != count or not vectors.shape[1]:
        raise InputError(f"{source}: {list(vectors.shape)} is not one vector for {count} texts")
    if not np.isfinite(vectors).all():
        raise InputError(f"{source}: a vector has numbers that are not finite")
    return vectors


# Both --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well two sets of vectors of the same texts agree."""

    mean_cosine: float
    least_cosine: float
    least_text: int  # index of the text whose vectors differ most
    overlap: float  # of the nearest neighbors of each text, by one and by the other


def compare(model_vectors: np.ndarray, compared_vectors: np.ndarray) -> Agreement:
    """Compare vectors of the same dimension; [n, E] both, of n different texts."""
    first = _directions(model_vectors)
    second = _directions(compared_vectors)
    cosines = (first * second).sum(1)  # [n]
    least = int(cosines.argmin())
    return Agreement(float(cosines.mean()), float(cosines[least]), least, _overlap(first, second))


def is_normalized(vectors: np.ndarray) -> bool:
    """Return whether all vectors have length one."""
    lengths = np.linalg.norm(vectors, axis=1)
    return bool((np.abs(lengths - 1) <= UNIT_TOLERANCE).all())


def _directions(vectors: np.ndarray) -> np.ndarray:
    wide = vectors.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    return wide / np.where(lengths > 0, lengths, 1)


def _overlap(first: np.ndarray, second: np.ndarray) -> float:
    """Return which part of the nearest neighbors both have in common, on average."""
    nearest = [_nearest(vectors) for vectors in (first, second)]
    shared = [len(set(a) & set(b)) for a, b in zip(*nearest, strict=True)]
    return float(np.mean(shared)) / nearest[0].shape[1]


def _nearest(vectors: np.ndarray) -> np.ndarray:
    """Return the nearest other vectors of each, [n, k]."""
    scores = vectors @ vectors.T
    np.fill_diagonal(scores, -np.inf)
    count = min(NEIGHBORS, len(vectors) - 1)
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]
