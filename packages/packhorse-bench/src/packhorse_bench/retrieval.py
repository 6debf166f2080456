"""`packhorse bench sparse` and `bench multi`: sparse vectors and vectors of tokens, beside peers.

Every engine gets the whole list in one call of its own interface, tokenizing and all, and returns
what its users get: ours a CSR matrix or a list of arrays, the peers' sparse tensors or lists. Ours
has a second row, "text by text": the same model with an object for each text, as servers need it.
sentence-transformers and PyLate sort and batch by themselves. All are timed in rounds of one pass
each, and outputs are compared with ours in fp32.

Without a model the weights are random, of a known size. A random SPLADE would give half of all
words a weight, which no trained one does, so its words have a bias: about one in a hundred remains.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch

from packhorse import __version__
from packhorse import device as devices
from packhorse.checkpoint import configuration, hf
from packhorse.errors import InputError
from packhorse.reports.padded import silence_libraries
from packhorse.reports.random_model import CONFIGS
from packhorse.results import csr
from packhorse.runtime.loading import load
from packhorse.tokens import Tokenizer
from packhorse_bench import peers

Output = Literal["sparse", "multi"]
Progress = Callable[[int, int], None]
OURS = "packhorse"
BY_TEXT = "packhorse, text by text"
PEERS: dict[str, tuple[str, ...]] = {
    "sparse": ("sentence-transformers",),
    "multi": ("sentence-transformers", "pylate"),
}
WIDTH = 128  # of a token's vector, as in ColBERT
DEVIATIONS = 3  # of the scores of random words, by which their bias is below 0


@dataclass(frozen=True)
class RetrievalRequest:
    """What to measure: texts as documents, or as queries."""

    output: Output
    model: str | None
    texts: tuple[str, ...]
    config: str | None = None  # of random weights, if there is no model
    vocab: str | None = None
    as_query: bool = False
    dtype: str = "fp32"
    device: str | None = None
    peers: tuple[str, ...] | None = None  # None: those that are installed
    batch_size: int = 32  # of the peers
    repeats: int = 5
    seed: int = 0


@dataclass(frozen=True)
class RetrievalRow:
    """The figures of one engine; `problem` says why there are none."""

    engine: str
    version: str = ""
    texts_per_second: float = 0.0  # of the median round, as all figures below
    slowest: float = 0.0
    fastest: float = 0.0
    times_ours: float | None = None  # its seconds divided by ours
    difference: float = 0.0  # the largest to our output in fp32
    problem: str | None = None

    @property
    def subject(self) -> str:
        """The engine, for messages about this row."""
        return self.engine


@dataclass(frozen=True)
class RetrievalComparison:
    """The rows of all engines, and what they encoded."""

    rows: list[RetrievalRow]
    lengths: np.ndarray  # in tokens
    per_text: float  # weights of a sparse vector, or vectors of a text, on average


Run = Callable[[], Any]


@dataclass
class _RetrievalTrial:
    engine: str
    run: Run
    output: Any
    seconds: list[float] = field(default_factory=list)


def measure(request: RetrievalRequest, progress: Progress | None = None) -> RetrievalComparison:
    """Load, warm up and time all engines; one row each."""
    _check(request)
    device = devices.choose_device(request.device)
    names = request.peers
    if names is None:
        names = tuple(n for n in PEERS[request.output] if find_spec(n.replace("-", "_")))
    with TemporaryDirectory(prefix="packhorse-bench-", ignore_cleanup_errors=True) as scratch:
        folder = _folder(request, Path(scratch))
        encoder = load(folder, device=device, dtype=request.dtype)
        lengths = np.array([len(e) for e in encoder.tokenizer.encode(request.texts)])
        ours = _ours(encoder, request)
        exact = _plain(ours(), request.output)
        if request.dtype != "fp32":
            exact = _plain(_ours(load(folder, device=device), request)(), request.output)
        by_text = _ours_by_text(encoder, request)
        trials = [
            _RetrievalTrial(OURS, ours, exact),
            _RetrievalTrial(BY_TEXT, by_text, _plain(by_text(), request.output)),
        ]
        failures: list[RetrievalRow] = []
        for name in names:
            try:
                with silence_libraries():
                    run = _open(name, folder, request, device)
                    trials.append(_RetrievalTrial(name, run, _plain(run(), request.output)))
            except Exception as error:  # another library's code may raise anything
                failures.append(RetrievalRow(name, problem=peers.failure_reason(error)))
        turns = trials * request.repeats
        for done, trial in enumerate(turns, 1):
            devices.synchronize(device)
            start = time.perf_counter()
            trial.run()
            devices.synchronize(device)
            trial.seconds.append(time.perf_counter() - start)
            if progress is not None:
                progress(done, len(turns))
    rows = [_row(trial, trials[0], exact, len(request.texts)) for trial in trials]
    counts = [len(row) for row in exact] if request.output == "multi" else (exact > 0).sum(1)
    return RetrievalComparison([*rows, *failures], lengths, float(np.mean(counts)))


def _check(request: RetrievalRequest) -> None:
    if not request.texts:
        raise InputError("there is nothing to encode; pass texts")
    for flag, value in (("--batch-size", request.batch_size), ("--repeats", request.repeats)):
        if value < 1:
            raise InputError(f"{flag} {value} measures nothing; pass 1 or more")
    known = PEERS[request.output]
    for name in request.peers or ():
        if name not in known:
            raise InputError(f"unknown peer {name!r}; there are {', '.join(known)}")


def _row(trial: _RetrievalTrial, ours: _RetrievalTrial, exact: Any, texts: int) -> RetrievalRow:
    seconds = median(trial.seconds)
    is_ours = trial.engine in (OURS, BY_TEXT)
    return RetrievalRow(
        engine=trial.engine,
        version=__version__ if is_ours else version(trial.engine),
        texts_per_second=texts / seconds,
        slowest=texts / max(trial.seconds),
        fastest=texts / min(trial.seconds),
        times_ours=seconds / median(ours.seconds),
        difference=_difference(trial.output, exact),
    )


def _difference(output: Any, exact: Any) -> float:
    """The largest difference; infinite if a text has another number of vectors."""
    pairs = list(zip(output, exact, strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return float("inf")
    return float(max(np.abs(a - b).max(initial=0) for a, b in pairs))


def _ours(encoder: Any, request: RetrievalRequest) -> Run:
    method = encoder.sparse if request.output == "sparse" else encoder.multi
    return lambda: method(request.texts, query=request.as_query, long="truncate")


def _ours_by_text(encoder: Any, request: RetrievalRequest) -> Run:
    def run() -> Any:
        options = {"query": request.as_query, "long": "truncate"}
        jobs = encoder.prepare(request.output, list(request.texts), **options)
        sequences = [sequence for job in jobs for sequence in job.sequences]
        rows = iter(encoder.run(sequences, *jobs[0].heads))
        answers = [job.finish(list(islice(rows, len(job.sequences)))) for job in jobs]
        if request.output == "multi":
            return answers
        return csr(answers, encoder.sparse_settings.width)

    return run


def _open(name: str, folder: Path, request: RetrievalRequest, device: torch.device) -> Run:
    """Open a peer; the function encodes all texts in one call of its own."""
    dtype = devices.parse_dtype(request.dtype)
    options: dict[str, Any] = {"batch_size": request.batch_size, "show_progress_bar": False}
    texts = list(request.texts)
    if name == "pylate":
        from pylate import models  # pyright: ignore[reportMissingImports]

        model: Any = models.ColBERT(  # pyright: ignore[reportUnknownVariableType]
            str(folder), device=str(device), model_kwargs={"dtype": dtype}
        )
        return lambda: model.encode(texts, is_query=request.as_query, **options)
    import sentence_transformers as library

    kind = "SparseEncoder" if request.output == "sparse" else "MultiVectorEncoder"
    opened: Any = getattr(library, kind)(
        str(folder), device=str(device), model_kwargs={"dtype": dtype}
    )
    encode = opened.encode_query if request.as_query else opened.encode_document
    return lambda: encode(texts, **options)


def _plain(output: Any, kind: Output) -> Any:
    """An engine's output as arrays: [n, V], or a list of [k, D]."""
    if kind == "multi":
        return [torch.as_tensor(vectors).float().cpu().numpy() for vectors in output]
    dense = output.to_dense().float().cpu().numpy() if torch.is_tensor(output) else output.toarray()
    return np.asarray(dense, np.float32)


# Random weights, in folders that every engine reads ---------------------------------------------


def _folder(request: RetrievalRequest, scratch: Path) -> Path:
    if request.model is not None:
        return Path(request.model)
    if request.config not in CONFIGS:
        known = ", ".join(CONFIGS)
        raise InputError(f"unknown configuration {request.config!r}; there are {known}")
    import transformers

    folder = scratch / "model"
    folder.mkdir()
    vocabulary = configuration.vocabulary(folder, request.vocab)
    if vocabulary is None:
        raise InputError("random weights need a vocabulary; pass --vocab FILE")
    hf.copy_tokenizer(vocabulary if vocabulary.is_dir() else vocabulary.parent, folder)
    shape = CONFIGS[request.config]
    config = transformers.BertConfig(
        vocab_size=Tokenizer.load(folder).vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.intermediate_size,
    )
    torch.manual_seed(request.seed)
    is_sparse = request.output == "sparse"
    with silence_libraries():
        kind: Any = transformers.BertForMaskedLM if is_sparse else transformers.BertModel
        model: Any = kind(config)
        if is_sparse:
            deviation = config.initializer_range * shape.hidden_size**0.5
            torch.nn.init.constant_(model.cls.predictions.bias, -DEVIATIONS * deviation)
        model.save_pretrained(folder)
    (_sparse_files if is_sparse else _multi_files)(folder, shape.hidden_size)
    return folder


def _sparse_files(folder: Path, width: int) -> None:
    _write_modules(
        folder,
        "sparse_encoder.models.MLMTransformer",
        "1_SpladePooling",
        "sentence_transformers.sparse_encoder.models.SpladePooling",
    )
    words = json.loads((folder / "config.json").read_text())["vocab_size"]
    settings = {
        "pooling_strategy": "max",
        "activation_function": "relu",
        "word_embedding_dimension": words,
    }
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps(settings))
    # Without it the library takes the folder for another kind of model and adds a layer of its own.
    kind = {"model_type": "SparseEncoder"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(kind))


def _multi_files(folder: Path, width: int) -> None:
    """As PyLate writes them."""
    from safetensors.torch import (
        save_file,  # pyright: ignore[reportUnknownVariableType]  (PathLike without its parameter)
    )

    _write_modules(folder, "models.Transformer", "1_Dense", "pylate.models.Dense.Dense")
    settings = {
        "in_features": width,
        "out_features": WIDTH,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
        "use_residual": False,
    }
    (folder / "1_Dense" / "config.json").write_text(json.dumps(settings))
    weight = torch.randn(WIDTH, width) / width**0.5
    save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors")
    model = {
        "model_type": "ColBERT",
        "similarity_fn_name": "MaxSim",
        "prompts": {"query": "", "document": ""},
        "query_prefix": "[unused0]",
        "document_prefix": "[unused1]",
        "query_length": 32,
        "document_length": 300,
        "attend_to_expansion_tokens": False,
        "do_query_expansion": True,
    }
    (folder / "config_sentence_transformers.json").write_text(json.dumps(model))


def _write_modules(folder: Path, first: str, second: str, kind: str) -> None:
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"sentence_transformers.{first}"},
        {"idx": 1, "name": "1", "path": second, "type": kind},
    ]
    (folder / second).mkdir()
    (folder / "modules.json").write_text(json.dumps(modules))


def table_rows(rows: Sequence[RetrievalRow]) -> list[list[str]]:
    """The rows of a table, without engines that failed."""
    return [
        [
            f"{row.engine} {row.version}",
            f"{row.texts_per_second:,.1f}",
            f"{row.slowest:,.1f} to {row.fastest:,.1f}",
            f"{row.times_ours or 0:.2f}",
            f"{row.difference:.1e}",
        ]
        for row in rows
        if row.problem is None
    ]


COLUMNS = ("engine", "texts/s", "slowest to fastest", "times ours", "largest difference")
