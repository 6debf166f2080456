"""A pool of processes that each hold a model: `encode(pool=)`, `encode(device=[…])`.

The processes are spawned and not forked, because CUDA and torch's threads do not survive a fork.
Each opens the model from its folder. Those on a CPU divide its cores equally. The next process that
is free takes the next chunk, and results are returned in the order of the inputs. Chunks and
results are pickled here and not by the queues, which report no failure to pickle, and which pass
each tensor as an open file.
"""

# multiprocessing types its queues as of Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import threading
from collections.abc import Sequence
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from packhorse.errors import InputError, PackhorseError

CHUNKS_PER_PROCESS = 10
LARGEST_CHUNK = 5000  # inputs
POLL_SECONDS = 1.0

_calls = count()  # each call has a number, so that answers to an interrupted one are recognized


class PooledModel(Protocol):
    """What a process needs of its model; `PackedModel` implements it."""

    def to(self, *args: Any, **kwargs: Any) -> Any: ...
    def _inference(self, inputs: list[Any], **options: Any) -> Any: ...


class PoolError(PackhorseError):
    """A process of a pool failed or died."""


def start(model: PooledModel, devices: Sequence[str | torch.device] | None) -> dict[str, Any]:
    """Start a process per device; return them with the queues in and out."""
    if devices is None:
        gpus = torch.cuda.device_count()
        devices = [f"cuda:{number}" for number in range(gpus)] or ["cpu", "cpu"]
    names = [str(device) for device in devices]
    if not names:
        raise InputError("a pool needs at least one device")
    context = multiprocessing.get_context("spawn")
    inputs = context.Queue()
    outputs = context.Queue()
    on_cpu = sum(name.startswith("cpu") for name in names)
    threads = max(1, len(os.sched_getaffinity(0)) // max(1, on_cpu)) if on_cpu else 0
    processes: list[Any] = []
    for name in names:
        worker = context.Process(
            target=_work, args=(model, name, threads, inputs, outputs), daemon=True
        )
        worker.start()
        processes.append(worker)
    lock = threading.Lock()  # one call at a time
    return {"input": inputs, "output": outputs, "processes": processes, "lock": lock}


def stop(pool: dict[str, Any]) -> None:
    """End the processes of a pool."""
    for process in pool["processes"]:
        process.terminate()
    for process in pool["processes"]:
        process.join()
        process.close()
    pool["input"].cancel_join_thread()
    pool["input"].close()
    pool["output"].close()


def compute(
    pool: dict[str, Any], inputs: list[Any], chunk_size: int | None, options: dict[str, Any]
) -> Any:
    """Return the results of all inputs: one tensor, or a list."""
    if chunk_size is None:
        chunk_count = len(pool["processes"]) * CHUNKS_PER_PROCESS
        chunk_size = max(1, min(-(-len(inputs) // chunk_count), LARGEST_CHUNK))
    options = options | {"show_progress_bar": False}
    begins = range(0, len(inputs), chunk_size)
    try:
        chosen = pickle.dumps(options)
        parts = [pickle.dumps(inputs[begin : begin + chunk_size]) for begin in begins]
    except Exception as error:  # whatever an object's own pickling raises
        raise InputError(f"a pool cannot send this to its processes: {error}") from error
    try:
        with pool["lock"]:
            answers = _answers(pool, parts, chosen)
    except (ValueError, OSError) as error:  # queues and processes that `stop` has closed
        raise PoolError("the pool was stopped; start a new one") from error
    errors = [error for _, error in answers if error]
    if errors:
        raise PoolError(f"a process of the pool failed: {errors[0]}")
    chunks = [pickle.loads(result) for result, _ in answers]  # of our own processes
    if isinstance(chunks[0], Tensor):
        return torch.cat(chunks)
    return [result for chunk in chunks for result in chunk]


def _answers(pool: dict[str, Any], parts: list[bytes], options: bytes) -> list[tuple[bytes, str]]:
    """Return a pickled result, or an error, for each part."""
    call = next(_calls)
    for number, part in enumerate(parts):
        pool["input"].put((call, number, part, options))
    answers: dict[int, tuple[bytes, str]] = {}
    while len(answers) < len(parts):
        answered_call, number, result, error = _next_answer(pool)
        if answered_call == call:  # others are late answers to a call that was interrupted
            answers[number] = result, error
    return [answers[number] for number in range(len(parts))]


def _next_answer(pool: dict[str, Any]) -> tuple[int, int, bytes, str]:
    while True:
        try:
            return pool["output"].get(timeout=POLL_SECONDS)
        except queue.Empty:
            dead = [process for process in pool["processes"] if not process.is_alive()]
        if dead:
            codes = ", ".join(str(process.exitcode) for process in dead)
            raise PoolError(
                f"{len(dead)} processes of the pool died (exit code {codes}); start a new pool"
            )


def _work(model: PooledModel, device: str, threads: int, inputs: Any, outputs: Any) -> None:
    if threads and device.startswith("cpu"):
        torch.set_num_threads(threads)
    while True:
        call, number, chunk, options = inputs.get()
        try:
            model.to(device)
            result = model._inference(pickle.loads(chunk), **pickle.loads(options))  # pyright: ignore[reportPrivateUsage]
            pickled = pickle.dumps(_on_cpu(result))
        except Exception as error:  # whatever it is, the caller waits for an answer
            outputs.put((call, number, b"", f"{type(error).__name__}: {error}"))
        else:
            outputs.put((call, number, pickled, ""))


def _on_cpu(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.cpu()
    if isinstance(result, list):
        return [_on_cpu(entry) for entry in result]
    if isinstance(result, dict):
        return {name: _on_cpu(entry) for name, entry in result.items()}
    return result
