"""Opening a checkpoint side by side: our reader, TensorFlow's, and a plain read with checksum.

A TensorFlow checkpoint of BERT's tensors is written, then read by each engine in turn, round after
round. Every reading has a process of its own, so that its peak of memory is its own too; what it
imports is imported before the clock starts and before memory is looked at. The plain read (the data
file in order, into one buffer that is used again, its crc32c on the way) is the floor: nothing that
checks the bytes does less. All read from the system's cache, where the file has just been written.
Before the clock starts a process also takes as much memory as the file is large and gives it back:
a virtual machine may have to ask its host for it, which takes seconds and says nothing of a reader.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from packhorse import wire
from packhorse.checkpoint.tensorflow import tf1
from packhorse.errors import InputError
from packhorse.model.config import BertConfig
from packhorse.reports.random_model import CONFIGS
from packhorse.reports.tables import Table

PLAIN_CHUNK = 8 << 20  # bytes
STATUS = Path("/proc/self/status")
SMALL = 64 << 20  # bytes, which no host is asked for
TAKEN_BACK = 2.5  # seconds; Linux reports what is free to its host after two
PLAIN = "plain read"
Shape = tuple[int, ...]
Trial = tuple[float, int | None]  # seconds, and the bytes by which memory rose at most


@dataclass(frozen=True)
class LoadRow:
    """The figures of one engine; `problem` says why there are none."""

    engine: str
    seconds: float = 0.0  # of the median round
    best_seconds: float = 0.0
    gigabytes_per_second: float = 0.0  # of the median round
    over_plain: float = 0.0  # times the plain read, median against median
    best_over_plain: float = 0.0
    memory: int | None = None  # bytes above what the imports took, at most; None: not known here
    problem: str | None = None

    @property
    def subject(self) -> str:
        """What the row is about, in words."""
        return self.engine


@dataclass(frozen=True)
class Loading:
    """A checkpoint, and what it took to open it."""

    tensors: int
    bytes: int
    rows: tuple[LoadRow, ...]


def compare(
    config: str = "large",
    repeats: int = 5,
    folder: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    engines: Sequence[str] = ("packhorse", "tensorflow"),
) -> Loading:
    """Write a checkpoint of this geometry into a passing folder (in `folder`) and time them all.

    The plain read comes first in every round.
    """
    if config not in CONFIGS:
        raise InputError(f"unknown configuration {config!r}; there are {', '.join(CONFIGS)}")
    if repeats < 1 or not set(engines) <= set(ENGINES):
        raise InputError(f"{repeats} rounds of {', '.join(engines)} cannot be measured")
    lanes = (PLAIN, *engines)
    trials: dict[str, list[Trial]] = {engine: [] for engine in lanes}
    problems: dict[str, str] = {}
    with TemporaryDirectory(dir=folder) as place:
        prefix, shapes = write(Path(place), CONFIGS[config])
        size = _data(prefix).stat().st_size
        for done, (_, engine) in enumerate(product(range(repeats), lanes), 1):
            if engine not in problems and (problem := _try(engine, prefix, trials[engine])):
                problems[engine] = problem
            if progress is not None:
                progress(done, repeats * len(lanes))
    rows = [
        LoadRow(engine, problem=problems[engine])
        if engine in problems
        else _row(engine, trials[engine], trials[PLAIN], size)
        for engine in lanes
    ]
    return Loading(len(shapes), size, tuple(rows))


def write(folder: Path, config: BertConfig) -> tuple[Path, dict[str, Shape]]:
    """A checkpoint with these tensors, all cut from one stretch of noise, safely on disk."""
    shapes = variables(config)
    noise = torch.randn(max(_count(shape) for shape in shapes.values())) * 0.02
    tensors: Mapping[str, Tensor] = {
        name: noise[: _count(shape)].reshape(shape) for name, shape in shapes.items()
    }
    prefix = folder / "bert_model.ckpt"
    tf1.write(prefix, tensors)
    with _data(prefix).open("rb+") as file:
        os.fsync(file.fileno())  # else the disk is busy with it while we measure
    return prefix, shapes


def variables(config: BertConfig) -> dict[str, Shape]:
    """What Google's BERT for pretraining keeps in a checkpoint."""
    wide = config.hidden_size
    inner = config.intermediate_size
    shapes: dict[str, Shape] = {
        "bert/embeddings/word_embeddings": (config.vocab_size, wide),
        "bert/embeddings/position_embeddings": (config.max_positions, wide),
        "bert/embeddings/token_type_embeddings": (config.type_vocab_size, wide),
        "cls/predictions/output_bias": (config.vocab_size,),
        "cls/seq_relationship/output_weights": (2, wide),
        "cls/seq_relationship/output_bias": (2,),
    }
    shapes |= _norm("bert/embeddings", wide) | _dense("bert/pooler", wide, wide)
    shapes |= _dense("cls/predictions/transform", wide, wide)
    shapes |= _norm("cls/predictions/transform", wide)
    for number in range(config.layers):
        layer = f"bert/encoder/layer_{number}"
        for part in ("query", "key", "value"):
            shapes |= _dense(f"{layer}/attention/self", wide, wide, part)
        shapes |= _dense(f"{layer}/attention/output", wide, wide)
        shapes |= _dense(f"{layer}/intermediate", wide, inner)
        shapes |= _dense(f"{layer}/output", inner, wide)
        shapes |= _norm(f"{layer}/attention/output", wide) | _norm(f"{layer}/output", wide)
    return shapes


def _dense(scope: str, inputs: int, outputs: int, name: str = "dense") -> dict[str, Shape]:
    return {f"{scope}/{name}/kernel": (inputs, outputs), f"{scope}/{name}/bias": (outputs,)}


def _norm(scope: str, wide: int) -> dict[str, Shape]:
    return {f"{scope}/LayerNorm/{name}": (wide,) for name in ("beta", "gamma")}


def _count(shape: Shape) -> int:
    return torch.Size(shape).numel()


def _data(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".data-00000-of-00001")


def _plain() -> Callable[[Path], object]:
    wire.crc32c(b"")
    return _read_plainly


def _read_plainly(prefix: Path) -> int:
    buffer = memoryview(bytearray(PLAIN_CHUNK))
    crc = 0
    with _data(prefix).open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = wire.crc32c(buffer[:count], crc)
    return crc


def _ours() -> Callable[[Path], object]:
    wire.crc32c(b"")
    return tf1.read


def _tensorflow() -> Callable[[Path], object]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # of no use here, and it says so
    import tensorflow

    def read(prefix: Path) -> object:
        reader = tensorflow.train.load_checkpoint(str(prefix))
        return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}

    return read


# Each function does its imports and returns a reader, so that imports are not timed.
ENGINES = {PLAIN: _plain, "packhorse": _ours, "tensorflow": _tensorflow}


def _try(engine: str, prefix: Path, trials: list[Trial]) -> str | None:
    """Run one trial in a process of its own; returns why it failed, if a peer's did.

    Peak memory is a figure of the whole process, so each trial needs a fresh one. It is spawned and
    not forked, since a fork would start with this process's memory.
    """
    if engine == "tensorflow" and find_spec("tensorflow") is None:
        return "tensorflow is not installed"
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            trials.append(pool.submit(_timed, engine, prefix).result())
    except Exception as error:
        if engine in (PLAIN, "packhorse"):
            raise
        return f"{type(error).__name__}: {error}"
    return None


def _timed(engine: str, prefix: Path) -> Trial:
    """Seconds, and the bytes by which memory rose at most."""
    read = ENGINES[engine]()
    _take_and_give_back(_data(prefix).stat().st_size)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far, of importing, is forgotten
    before = _memory("VmRSS")
    start = time.perf_counter()
    held = read(prefix)
    seconds = time.perf_counter() - start
    peak = _memory("VmHWM")
    del held
    return seconds, None if before is None or peak is None else peak - before


def _take_and_give_back(size: int) -> None:
    """Allocate and free as much memory as the file has, so that a virtual machine has it ready.

    Linux returns free memory to its host after a while (`TAKEN_BACK`); to wait that long keeps the
    return out of the timed read.
    """
    memory = tf1.allocate(size)
    memory[::4096] = 1
    if size > SMALL:
        time.sleep(TAKEN_BACK)


def _memory(kind: str) -> int | None:
    with suppress(OSError):
        if match := re.search(rf"^{kind}:\s*(\d+) kB", STATUS.read_text(), re.M):
            return int(match[1]) * 1024
    return None


def _row(engine: str, trials: Sequence[Trial], plain: Sequence[Trial], size: int) -> LoadRow:
    taken, floor = ([seconds for seconds, _ in of] for of in (trials, plain))
    return LoadRow(
        engine=engine,
        seconds=median(taken),
        best_seconds=min(taken),
        gigabytes_per_second=size / median(taken) / 1e9,
        over_plain=median(taken) / median(floor),
        best_over_plain=min(taken) / min(floor),
        memory=max((peak for _, peak in trials if peak is not None), default=None),
    )


def table(loading: Loading) -> Table:
    """Measured engines; those with a problem are for `report.problems`."""
    columns = (
        "engine",
        "seconds",
        "best",
        "GB/s",
        "x plain",
        "best x plain",
        "peak MiB",
        "above the file, MiB",
    )
    return Table.of(
        columns,
        [
            (
                row.engine,
                f"{row.seconds:.3f}",
                f"{row.best_seconds:.3f}",
                f"{row.gigabytes_per_second:.2f}",
                f"{row.over_plain:.2f}",
                f"{row.best_over_plain:.2f}",
                _mebibytes(row.memory),
                _mebibytes(row.memory, loading.bytes),
            )
            for row in loading.rows
            if row.problem is None
        ],
    )


def _mebibytes(memory: int | None, above: int = 0) -> str:
    return "-" if memory is None else f"{(memory - above) / 2**20:,.0f}"
