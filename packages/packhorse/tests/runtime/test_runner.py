"""The runner: the encoder's own answers, in time; what fails, fails alone; nothing hangs."""

from __future__ import annotations

import asyncio
import gc
import math
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from packhorse import status
from packhorse.errors import (
    CheckpointError,
    InputError,
    Overloaded,
    RequestFailed,
    RunnerStopped,
)
from packhorse.packing.batch import Packed
from packhorse.runtime import engine as engine_module
from packhorse.runtime.batches import MODES
from packhorse.runtime.encoder import Encoder, TruncationWarning
from packhorse.runtime.runner import PackRunner, joined

pytestmark = pytest.mark.usefixtures("quiet_runtime")

PATIENCE = 60  # seconds that no test needs, unless something hangs
TEXTS = ["the cat", "a red hat . ", "one mat saw a cat on the mat and sat", "who ?", "the horse"]
LONG = "one red hat and the cat saw a mat . " * 12
KERNEL = {"ragged": "bucketed", "mask": "mask", "repack": "repack"}
ASKED: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "embed": (TEXTS, {}),
    "hidden": (TEXTS, {}),
    "classify": ([*TEXTS, ("the cat", "a mat")], {}),
    "answer": ([("who sat ?", "the cat sat on a mat"), ("what ?", LONG)], {"top_k": 3}),
    "fill": (["the [MASK] sat", "a [MASK] on a [MASK] ."], {"top_k": 2}),
    "label": (TEXTS, {}),
}


class Gate:
    """Holds the device up until it is opened; remembers the batches that came through."""

    def __init__(self, make_encoder: Callable[..., Encoder], **options: Any) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.batches: list[Any] = []
        self.encoder = make_encoder(before=self._pass, **options)

    def _pass(self, packed: Any) -> None:
        self.batches.append(packed)
        self.reached.set()
        assert self.opened.wait(PATIENCE)


@pytest.fixture
def gate(make_encoder) -> Iterator[Gate]:
    new_gate = Gate(make_encoder)
    yield new_gate
    new_gate.opened.set()


def held(gate: Gate, runner: PackRunner) -> Any:
    """A request that is on the device and stays there until the gate opens."""
    future = runner.submit("the cat")
    assert gate.reached.wait(PATIENCE)
    return future


def poisoned_by(token: str, error: BaseException, tokenizer: Any) -> Callable[[Any], None]:
    """Raise where a batch has this token in it."""
    id = tokenizer.id(token)

    def before(packed: Any) -> None:
        if (packed.ids == id).any():
            raise error

    return before


def alike(a: Any, b: Any) -> bool:
    """Equal, numbers up to rounding."""
    if is_dataclass(a):
        return type(a) is type(b) and all(
            alike(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return alike(sorted(a.items()), sorted(b.items()))
    if isinstance(a, np.ndarray | float):
        return np.shape(a) == np.shape(b) and np.allclose(a, b, atol=1e-5, rtol=1e-5)
    return a == b


def settled(condition: Callable[[], bool]) -> bool:
    """Becomes true in time; a future tells its waiters before it tells us."""
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


# What is answered


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("task", ASKED)
def test_answers_are_the_encoders_own(make_encoder, task: str, mode: str) -> None:
    encoder = make_encoder(task, KERNEL[mode])
    texts, options = ASKED[task]
    expected = list(getattr(encoder, task)(texts, **options))
    with PackRunner(encoder, rows=3, timeout=0.001) as runner:
        assert runner.shape.mode == mode
        assert alike(runner.run(texts, task, **options), expected)
        futures = [runner.submit(text, task, **options) for text in texts]
        assert alike([future.result(PATIENCE) for future in futures], expected)
        assert not alike([future.result() for future in futures], expected[::-1])


@pytest.mark.parametrize("mode", MODES)
def test_a_ranking_is_one_request_of_many_sequences(make_encoder, mode: str) -> None:
    encoder = make_encoder("rerank", KERNEL[mode])
    documents = [" ".join(TEXTS[i % 5] for i in range(n)) for n in range(1, 9)]
    with PackRunner(encoder, rows=1, timeout=0.001) as runner:
        expected = encoder.rerank("what cat", documents)
        ranking = runner.submit("what cat", "rerank", documents=documents).result(PATIENCE)
        assert alike(ranking, expected)
        assert runner.submit("what cat", "rerank", documents=[]).result(PATIENCE) == []
        assert runner.stats().batches > 3


def test_tasks_do_not_disturb_each_other(make_encoder) -> None:
    encoder = make_encoder()
    with PackRunner(encoder, timeout=0.01) as runner:
        futures = [
            (task, text, runner.submit(text, task, **options))
            for task, (texts, options) in ASKED.items()
            if task != "label"  # has other labels
            for text in texts
        ]
        for task, text, future in futures:
            expected = getattr(encoder, task)([text], **ASKED[task][1])[0]
            assert alike(future.result(PATIENCE), expected), task


def test_token_ids_are_taken_as_they_are(make_encoder) -> None:
    encoder = make_encoder()
    (encoding,) = encoder.tokenize(["the cat sat"])
    with PackRunner(encoder, timeout=0) as runner:
        expected = runner.submit("the cat sat").result(PATIENCE)
        for tokens in (encoding, encoding.ids, encoding.ids.tolist(), tuple(encoding.ids.tolist())):
            assert alike(runner.submit(tokens).result(PATIENCE), expected)
        assert alike(list(encoder.embed(["the cat sat", encoding.ids])), [expected] * 2)
        for bad, message in [
            ([1] * 49, "there are 49 token ids; the model takes 1 to 48"),
            (np.zeros(0, int), "there are 0 token ids"),
            ([5, 1000], "token ids must be from 0 to 34; these are 5 to 1000"),
            ([-1, 3], "these are -1 to 3"),
            ([5, 5.5], "flat list of integers"),
            (np.zeros((2, 2), int), "flat list of integers"),
        ]:
            with pytest.raises(InputError, match=message):
                runner.submit(bad)
        for task in ("fill", "label"):
            with pytest.raises(InputError, match="takes single texts, not pairs or token ids"):
                runner.submit([5, 6], task)


def test_prompts_go_before_texts_alone(make_encoder) -> None:
    encoder = replace(make_encoder(), default_prompt="query")
    with PackRunner(encoder, timeout=0) as runner:
        prompted = runner.submit("the cat").result(PATIENCE)
        assert alike(prompted, runner.submit("the cat", prompt="query").result(PATIENCE))
        plain = PackRunner(make_encoder(), timeout=0)
        assert alike(prompted, plain.submit("who saw the cat").result(PATIENCE))
        assert not alike(prompted, plain.submit("the cat").result(PATIENCE))
        plain.close()
        runner.submit([5, 6]).result(PATIENCE)
        with pytest.raises(InputError, match="not before pairs or token ids"):
            runner.submit([5, 6], prompt="query")


def test_long_texts_are_cut_as_the_encoder_cuts_them(make_encoder) -> None:
    encoder = make_encoder()
    with PackRunner(encoder, timeout=0) as runner, pytest.warns(TruncationWarning) as caught:
        assert alike(runner.submit(LONG).result(PATIENCE), encoder.embed([LONG])[0])
    assert [warning.filename for warning in caught] == [__file__] * 2, "where the user asked"
    with PackRunner(encoder, capacity=16, timeout=0) as runner:
        with pytest.warns(TruncationWarning, match="cut to 16 tokens"):
            cut = runner.submit(LONG).result(PATIENCE)
            assert alike(cut, encoder.embed([LONG], max_length=16)[0])
        with pytest.raises(InputError, match="tiny takes 16 tokens"):
            runner.submit(LONG, max_length=20)


def test_no_texts_give_no_vectors(make_encoder) -> None:
    with PackRunner(make_encoder()) as runner:
        assert runner.run([]) == []


def test_what_cannot_be_asked_is_refused_at_once(make_encoder) -> None:
    encoder = make_encoder()
    with PackRunner(encoder) as runner:
        for options, kind, message in [
            ({"task": "sing"}, InputError, "unknown task 'sing'; use one of embed, classify"),
            ({"prompt": "passage"}, InputError, "no prompt 'passage'"),
            ({"text": 5}, InputError, "neither a string nor a pair"),
            ({"text": "\ud800"}, InputError, "not Unicode"),
            ({"task": "fill"}, InputError, "no .MASK. to fill"),
            ({"color": "red"}, TypeError, "color"),
        ]:
            with pytest.raises(kind, match=message):
                runner.submit(**({"text": "the cat"} | options))
        assert runner.stats().requests == 0 and runner._admission.preparing == 0
    headless = replace(encoder, heads=("embed",))
    with PackRunner(headless) as runner, pytest.raises(CheckpointError, match="no 'classify' head"):
        runner.submit("the cat", "classify")
    for options, message in [
        ({"timeout": -1}, "timeout is -1"),
        ({"timeout": math.nan}, "timeout is nan"),
        ({"capacity": 0}, "capacity must be at least 1"),
        ({"max_waiting_tokens": 10}, "at least a sequence of 48"),
        ({"max_waiting_requests": 0}, "max_waiting_requests .0. at least 1"),
    ]:
        with pytest.raises(InputError, match=message):
            PackRunner(encoder, **options)
    with pytest.raises(InputError, match="load it with another kernel"):
        PackRunner(make_encoder(kernel="mask"), mode="ragged")


# When it is answered


def test_a_lone_request_goes_out_after_the_timeout(make_encoder) -> None:
    with PackRunner(make_encoder(), timeout=0.2) as runner:
        runner.run(["warm"])
        begin = time.monotonic()
        runner.submit("the cat").result(PATIENCE)
        assert time.monotonic() - begin >= 0.2
    with PackRunner(make_encoder(), timeout=10 * PATIENCE) as runner:
        future = runner.submit("the cat")
        with pytest.raises(TimeoutError):
            future.result(0.1)
        assert future.cancel()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_left_at_the_end_of_a_run_waits_for_nobody(make_encoder, device: str) -> None:
    encoder = make_encoder()
    encoder = replace(encoder, device=torch.device(device))
    with PackRunner(encoder, rows=2, timeout=10 * PATIENCE) as runner:
        texts = [[6] * length for length in (30, 20, 40, 7, 1)]
        assert alike(runner.run(texts), list(make_encoder().embed(texts)))
        future = runner.submit("the cat")  # the control: who submits may go on
        with pytest.raises(TimeoutError):
            future.result(0.1)
        assert future.cancel()


def test_a_run_submits_parts_of_a_batch(make_encoder) -> None:
    encoder = make_encoder()
    lengths = [9, 1, 30, 4, 4, 4, 4, 12]
    jobs = encoder.prepare("embed", [[6 + i] * length for i, length in enumerate(lengths)])
    parts = list(joined(jobs, tokens=16, inputs=3))
    assert [[len(s) for s in part.sequences] for part in parts] == [
        [9, 1],
        [30],
        [4, 4, 4],
        [4, 12],
    ]
    assert [part.inputs for part in parts] == [2, 1, 3, 2]
    rows = encoder.run([s for job in jobs for s in job.sequences], *jobs[0].heads)
    remaining = iter(rows)
    answers = [
        answer
        for part in parts
        for answer in part.finish([next(remaining) for _ in part.sequences])
    ]
    expected = [job.finish([row]) for job, row in zip(jobs, rows, strict=True)]
    assert alike(answers, expected) and not alike(answers, expected[::-1])


def test_a_run_keeps_to_the_limit_of_requests(make_encoder) -> None:
    most = 0

    def look(_: Any) -> None:
        nonlocal most
        most = max(most, runner.stats().waiting_requests)

    with PackRunner(make_encoder(before=look), rows=1, timeout=0, max_waiting_requests=3) as runner:
        texts = [[6 + i % 20] * (1 + i % 5) for i in range(60)]
        assert alike(runner.run(texts), list(make_encoder().embed(texts)))
        stats = runner.stats()
    assert most <= 3 and (stats.requests, stats.answered) == (60, 60)


@pytest.mark.parametrize("options", [{"rows": 2}, {"max_sequences": 2}, {"mode": "mask"}])
def test_a_full_batch_does_not_wait(make_encoder, options: dict[str, Any]) -> None:
    encoder = make_encoder(kernel=KERNEL[options.get("mode", "ragged")])
    options = {"rows": 2} | options
    with PackRunner(encoder, timeout=10 * PATIENCE, **options) as runner:
        futures = [runner.submit([6] * 32) for _ in range(3)]
        assert [future.result(PATIENCE).shape for future in futures[:2]] == [(96,)] * 2
        runner.close()
        futures[2].result(0)


def test_the_next_batch_is_packed_while_one_runs(gate: Gate) -> None:
    with PackRunner(gate.encoder, rows=1, timeout=0) as runner:
        held(gate, runner)
        futures = [runner.submit([6] * 10) for _ in range(4)]
        open_batch = next(iter(runner._admission.queues.values())).open
        assert len(open_batch) == 4, "it stays open, however long that takes"
        gate.opened.set()
        for future in futures:
            future.result(PATIENCE)
        assert [len(packed) for packed in gate.batches] == [1, 4]


def test_an_accelerator_is_given_one_full_batch_ahead(gate: Gate) -> None:
    encoder = replace(gate.encoder, device=torch.device("meta"))  # computes by itself, as it were
    with PackRunner(encoder, rows=1, timeout=0, lookahead=0) as runner:
        futures = [held(gate, runner)]
        futures += [runner.submit([6] * 40) for _ in range(4)]
        launched: list[int] = []
        for future in futures:
            future.add_done_callback(lambda _: launched.append(len(gate.batches)))
        gate.opened.set()
        for future in futures:
            future.result(PATIENCE)
        assert settled(lambda: len(launched) == 5)
        # When one is answered the next runs and one more waits; the last, not full, is launched as
        # soon as nothing runs, before the replies to the one before it.
        assert launched == [3, 4, 4, 5, 5]


@pytest.mark.parametrize(
    ("mode", "sizes"), [("ragged", [64, 80, 96, 112, 128, 160, 192]), ("repack", [192])]
)
def test_warming_runs_a_batch_of_every_size(make_encoder, mode: str, sizes: list[int]) -> None:
    encoder, seen = make_encoder(), []

    def backend(packed: Packed, heads: Any, at: Any = None) -> Any:
        seen.append(len(packed.ids))
        return encoder.backend(packed, heads, at)

    watched = replace(encoder, backend=backend)
    with PackRunner(watched, rows=6, capacity=32, mode=mode, publish=False) as runner:
        runner.warm()
        assert seen == sizes
        assert runner.stats().requests == 0
        assert len(runner.run([[5, 6, 7]])) == 1


def test_answers_are_not_kept(make_encoder) -> None:
    with PackRunner(make_encoder(), timeout=0) as runner:
        future = runner.submit("the cat", "hidden")
        references = [weakref.ref(future), weakref.ref(future.result(PATIENCE).states)]
        del future
        assert settled(lambda: all(ref() is None for ref in references))


def test_what_is_cancelled_costs_nothing(gate: Gate) -> None:
    with PackRunner(gate.encoder, timeout=0) as runner:
        running = held(gate, runner)
        futures = [runner.submit([7 + i] * 5) for i in range(4)]
        assert futures[1].cancel() and futures[3].cancel()
        assert not running.cancel(), "it is too late"
        stats = runner.stats()
        assert (stats.waiting_requests, stats.waiting_tokens, stats.cancelled) == (2, 10, 2)
        gate.opened.set()
        assert futures[0].result(PATIENCE).shape == futures[2].result(PATIENCE).shape == (96,)
        assert set(gate.batches[1].ids.tolist()) == {7, 9}


def test_beyond_the_allowance_overloaded_at_once(gate: Gate) -> None:
    runner = PackRunner(gate.encoder, timeout=0, max_waiting_requests=3, max_waiting_tokens=59)
    first = held(gate, runner)
    futures = [runner.submit("the cat"), runner.submit([6] * 48)]
    for refused in ([6] * 9, "the cat sat on a mat"):
        with pytest.raises(Overloaded, match="try again"):
            runner.submit(refused)
    futures.append(runner.submit([6] * 2))
    with pytest.raises(Overloaded), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Encoder, "prepare", None)  # not even tokenized
        runner.submit("the cat")
    answers: list[Any] = []
    patient = threading.Thread(target=lambda: answers.extend(runner.run(["the cat"] * 9)))
    patient.start()
    assert settled(lambda: runner.stats().waiting_requests == 3)
    gate.opened.set()
    patient.join(PATIENCE)
    assert len(answers) == 9
    runner.run(["the cat"] * 5)
    stats = runner.stats()
    assert stats.refused == 3
    assert first.done() and all(future.result(PATIENCE).shape == (96,) for future in futures)
    with pytest.raises(InputError, match="will never be admitted"):
        runner.submit(("what ?", LONG), "answer")
    runner.close()


# What fails


@pytest.mark.parametrize("mode", MODES)
def test_a_nan_stays_with_its_own_request(make_encoder, make_model, mode: str) -> None:
    encoder = make_encoder(kernel=KERNEL[mode])
    words = encoder.backend.model.bert.embed.words.weight
    poison = encoder.tokenizer.id("poison")
    before = words[poison].clone()
    with torch.no_grad():
        words[poison] = math.nan
    try:
        with PackRunner(encoder, rows=2, timeout=0.05) as runner:
            futures = [runner.submit(text) for text in ["a poison hat", *TEXTS, "poison"]]
            for bad in (futures[0], futures[-1]):
                with pytest.raises(RequestFailed, match="not finite"):
                    bad.result(PATIENCE)
            for future, expected in zip(futures[1:-1], encoder.embed(TEXTS), strict=True):
                assert alike(future.result(PATIENCE), expected)
            assert runner.stats().reruns == 0 and runner.stats().failed == 2
    finally:
        with torch.no_grad():
            words[poison] = before


class Panic(BaseException):
    """As native libraries raise it."""


@pytest.mark.parametrize("error", [ValueError("no such word"), Panic("index out of range")])
def test_who_makes_the_model_raise_fails_alone(make_encoder, error: BaseException) -> None:
    plain = make_encoder()
    encoder = make_encoder(before=poisoned_by("poison", error, plain.tokenizer))
    texts = [TEXTS[i % 5] for i in range(31)]
    with PackRunner(encoder, rows=16, timeout=0.2) as runner:
        futures = [runner.submit(text) for text in [*texts[:11], "a poison hat", *texts[11:]]]
        bad = futures.pop(11)
        with pytest.raises(RequestFailed, match=str(error)) as caught:
            bad.result(PATIENCE)
        assert type(caught.value.__cause__) is type(error)
        assert "in before" in "".join(caught.value.__notes__), "where it was raised"
        for future, expected in zip(futures, plain.embed(texts), strict=True):
            assert alike(future.result(PATIENCE), expected)
        assert 2 <= runner.stats().reruns <= 2 * math.log2(32)
        assert alike(runner.run(texts), list(plain.embed(texts)))


def test_several_poisons_and_windows_in_one_batch(make_encoder) -> None:
    plain = make_encoder()
    error = ValueError("no such word")
    encoder = make_encoder(before=poisoned_by("poison", error, plain.tokenizer))
    good = [("who ?", LONG), ("what ?", "the cat sat")]
    bad = [("poison ?", LONG), ("what ?", LONG + "poison")]
    with PackRunner(encoder, rows=4, timeout=0.05) as runner:
        futures = [runner.submit(pair, "answer") for pair in [bad[0], *good, bad[1]]]
        for future in (futures[0], futures[3]):
            with pytest.raises(RequestFailed, match="no such word"):
                future.result(PATIENCE)
        for pair, future in zip(good, futures[1:3], strict=True):
            assert alike(future.result(PATIENCE), plain.answer([pair])[0])
        assert settled(lambda: runner.stats().running_requests == 0)
        assert runner.stats().waiting_tokens == 0 and runner.stats().failed == 2


def test_a_failed_batch_is_gone_when_its_halves_run(make_encoder) -> None:
    """Its frames hold its tensors, and halves of a batch without memory need that memory."""
    tensors: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def fail_at_first(packed: Packed) -> None:
        states = packed.ids.float()
        alive.extend(tensor() is not None for tensor in tensors)
        tensors.append(weakref.ref(states))
        if len(tensors) == 1:
            raise torch.OutOfMemoryError("no memory")

    with PackRunner(make_encoder(before=fail_at_first), rows=4, timeout=0.05) as runner:
        futures = [runner.submit(text) for text in ("the cat", "on a mat")]
        for future in futures:
            future.result(PATIENCE)
        assert runner.stats().reruns == 2
    assert alive and not any(alive)


def test_an_answer_that_cannot_be_read_fails_alone(make_encoder) -> None:
    encoder = replace(make_encoder(), labels=())
    with PackRunner(encoder, timeout=0.01) as runner:
        bad = runner.submit("the cat", "classify")
        good = runner.submit("the cat")
        with pytest.raises(RequestFailed, match="IndexError"):
            bad.result(PATIENCE)
        assert alike(good.result(PATIENCE), encoder.embed(["the cat"])[0])


def test_errors_do_not_keep_the_batch_alive(make_encoder) -> None:
    plain = make_encoder()
    encoder = make_encoder(before=poisoned_by("poison", ValueError("no"), plain.tokenizer))
    with PackRunner(encoder, timeout=0.05) as runner:
        neighbor, bad = runner.submit("the cat"), runner.submit("poison")
        neighbor.result(PATIENCE)
        error = bad.exception(PATIENCE)
        tracebacks = [
            link
            for link in (error, error and error.__cause__)
            if link is not None and link.__traceback__ is not None
        ]
        assert error is not None and tracebacks == []


def test_callbacks_cannot_harm_the_engine(gate: Gate, caplog) -> None:
    def careless(future: Any) -> None:
        raise Panic("from a callback")

    with PackRunner(gate.encoder, timeout=0) as runner:
        running = held(gate, runner)
        raising, closing = runner.submit("the cat"), runner.submit("the cat")
        running.set_result("answered by someone else")
        raising.add_done_callback(careless)
        closing.add_done_callback(lambda future: runner.close())
        gate.opened.set()
        assert running.result() == "answered by someone else"
        assert raising.result(PATIENCE).shape == closing.result(PATIENCE).shape == (96,)
    assert "a callback of a future raised" in caplog.text


@pytest.mark.parametrize("place", ["backend", "loop"])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_dead_engine_leaves_no_one_waiting(
    gate: Gate, monkeypatch, caplog, place: str, error: BaseException
) -> None:
    runner = PackRunner(gate.encoder, rows=1, timeout=0)
    running = held(gate, runner)
    waiting = [runner.submit([6] * 30) for _ in range(5)]

    def die(*arguments: Any) -> Any:
        raise error

    if place == "loop":
        monkeypatch.setattr(runner._engine, "_reply", die)
    else:
        monkeypatch.setattr(runner.encoder.backend, "backend", die)
    gate.opened.set()
    for future in [running, *waiting]:
        with pytest.raises(RunnerStopped, match=f"engine died: {type(error).__name__}"):
            future.result(PATIENCE)
    assert not runner.alive
    for ask in (lambda: runner.submit("the cat"), lambda: runner.run(["the cat"])):
        with pytest.raises(RunnerStopped, match="engine died"):
            ask()
    with pytest.raises(RunnerStopped):
        asyncio.run(runner.asubmit("the cat"))
    runner.close()
    assert runner.stats().running_requests == runner.stats().waiting_requests == 0


def looped(kind: str) -> BaseException:
    """An error whose chain comes back to itself."""
    first, second = ValueError("poison"), KeyError("second")
    if kind == "cause":
        first.__cause__, second.__cause__ = second, first
    elif kind == "context":
        first.__context__, second.__context__ = second, first
    elif kind == "both":  # the way out of the loop is not the one that is looked at first
        first.__cause__, second.__context__ = second, first
        first.__context__ = OSError("aside")
    else:
        second.__context__ = first
        first.__cause__ = ExceptionGroup("several", [second, OSError("aside")])
    return first


@pytest.mark.parametrize("kind", ["cause", "context", "both", "group"])
def test_an_error_whose_chain_loops_fails_its_request_alone(make_encoder, kind: str) -> None:
    error = looped(kind)
    encoder = make_encoder(before=poisoned_by("poison", error, make_encoder().tokenizer))
    with PackRunner(encoder, timeout=0.01) as runner:
        bad, good = runner.submit("a poison hat"), runner.submit("the cat")
        with pytest.raises(RequestFailed, match="ValueError: poison") as caught:
            bad.result(PATIENCE)
        assert good.result(PATIENCE) is not None
    assert "ValueError: poison" in caught.value.__notes__[0]
    chain = engine_module._chain(error)
    expected = {"cause": 2, "context": 2, "both": 3, "group": 4}[kind]
    assert len(chain) == len(set(map(id, chain))) == expected
    assert all(link.__traceback__ is None for link in chain), "frames would keep the batch"


def test_a_lost_device_ends_the_engine(make_encoder, monkeypatch, caplog) -> None:
    plain = make_encoder()
    encoder = make_encoder(before=poisoned_by("poison", RuntimeError("assert"), plain.tokenizer))

    def lost(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("device-side assert triggered")

    with PackRunner(encoder, timeout=0.05) as runner:
        runner.run(TEXTS)
        monkeypatch.setattr(engine_module.torch, "zeros", lost)
        futures = [runner.submit(text) for text in ["poison", *TEXTS]]
        for future in futures:
            with pytest.raises(RunnerStopped, match="device-side assert"):
                future.result(PATIENCE)


def test_an_error_that_comes_late_is_isolated_too(make_encoder) -> None:
    """An accelerator raises when its results are read, not when it is given work."""
    plain = make_encoder()
    poison = plain.tokenizer.id("poison")

    class Late:
        is_cuda = False

        def float(self) -> Any:
            raise RuntimeError("an illegal instruction, some time ago")

    def backend(packed: Any, heads: Any, at: Any = None) -> Any:
        return [Late()] if (packed.ids == poison).any() else plain.backend(packed, heads, at)

    with PackRunner(replace(plain, backend=backend), timeout=0.05) as runner:
        futures = [runner.submit(text) for text in [*TEXTS, "poison"]]
        with pytest.raises(RequestFailed, match="some time ago"):
            futures.pop().result(PATIENCE)
        vectors = [future.result(PATIENCE) for future in futures]
        assert alike(vectors, list(plain.embed(TEXTS)))


# How it ends


def test_closing_drains(gate: Gate) -> None:
    runner = PackRunner(gate.encoder, rows=1, timeout=10 * PATIENCE, max_sequences=1)
    futures = [runner.submit("the cat") for _ in range(5)]
    assert gate.reached.wait(PATIENCE)
    closing = threading.Thread(target=runner.close)
    closing.start()
    assert settled(lambda: not runner.alive)
    with pytest.raises(RunnerStopped, match="closed"):
        runner.submit("the cat")
    gate.opened.set()
    closing.join(PATIENCE)
    assert all(future.done() and future.result().shape == (96,) for future in futures)
    runner.close()


def test_closing_without_drain_fails_what_waits(gate: Gate) -> None:
    runner = PackRunner(gate.encoder, timeout=0)
    running = held(gate, runner)
    waiting = [runner.submit("the cat") for _ in range(5)]
    closing = threading.Thread(target=runner.close, kwargs={"drain": False})
    closing.start()
    for future in waiting:
        with pytest.raises(RunnerStopped, match="closed"):
            future.result(PATIENCE)
    gate.opened.set()
    closing.join(PATIENCE)
    assert running.result(0).shape == (96,)
    assert runner.stats().failed == 5 and runner.stats().waiting_tokens == 0


def test_patience_ends_with_the_runner(gate: Gate) -> None:
    runner = PackRunner(gate.encoder, timeout=0, max_waiting_requests=1)
    held(gate, runner)
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            runner.run(TEXTS)
        except RunnerStopped as error:
            caught.append(error)

    patient = threading.Thread(target=ask)
    patient.start()
    assert settled(lambda: runner.stats().waiting_requests == 1)
    threading.Timer(0.05, gate.opened.set).start()
    runner.close(drain=False)
    patient.join(PATIENCE)
    assert len(caught) == 1


def test_a_runner_that_is_let_go_answers_and_ends(gate: Gate) -> None:
    runner = PackRunner(gate.encoder, timeout=10 * PATIENCE)
    future, workers = runner.submit("the cat"), runner._engine.threads
    del runner
    gc.collect()
    gate.opened.set()
    assert future.result(PATIENCE).shape == (96,)
    for worker in workers:
        worker.join(PATIENCE)
        assert not worker.is_alive()


SCRIPT = """
    import os, sys, threading, time, types
    import torch
    from packhorse.errors import RunnerStopped
    from packhorse.runtime.encoder import Encoder
    from packhorse.runtime.runner import PackRunner

    busy = threading.Event()

    def backend(packed, heads, at=None):
        busy.set()
        time.sleep(0.2)
        return [torch.ones(len(packed), 4)]

    cpu = torch.device("cpu")
    words = types.SimpleNamespace(vocab_size=10, mask_id=None)
    encoder = Encoder("stub", words, backend, ("embed",), 4, (), "", {}, None, 8, cpu,
                      torch.float32, "reference", "")
    runner = PackRunner(encoder, timeout=0)
    print(runner.submit([1, 2]).result().tolist())
    sys.stdout.flush()
    busy.clear()
    futures = [runner.submit([1] * 8) for _ in range(50)]
    busy.wait()
    child = os.fork()
    if child == 0:
        try:
            runner.submit([1])
        except RunnerStopped as error:
            print("child:", error)
        runner.close()
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    waiter = threading.Thread(target=lambda: print(futures[0].result().tolist()))
    waiter.start()
    {last}
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork there")
@pytest.mark.parametrize("last", ["", "del runner, encoder"])
def test_a_fork_and_an_exit_without_close_do_not_hang(last: str) -> None:
    code = textwrap.dedent(SCRIPT).replace("{last}", last)
    command = [sys.executable, "-W", "ignore", "-c", code]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert completed.returncode == 0, completed.stderr
    assert "child: a runner cannot be used after a fork" in completed.stdout
    assert completed.stdout.count("[1.0, 1.0, 1.0, 1.0]") == 2
    assert completed.stderr == ""
    assert status.read() == []


# asyncio


def test_asyncio_shares_the_engine(make_encoder) -> None:
    encoder = make_encoder()

    async def ask(runner: PackRunner) -> list[Any]:
        return await asyncio.gather(*(runner.asubmit(text) for text in TEXTS * 4))

    with PackRunner(encoder, timeout=0.01) as runner:
        assert alike(asyncio.run(ask(runner)), list(encoder.embed(TEXTS * 4)))
        with pytest.raises(InputError, match="unknown task"):
            asyncio.run(runner.asubmit("the cat", "sing"))


def test_cancelling_the_await_cancels_the_request(gate: Gate) -> None:
    async def ask(runner: PackRunner) -> None:
        tasks = [asyncio.create_task(runner.asubmit("the cat")) for _ in range(6)]
        while runner.stats().waiting_requests < 6:
            await asyncio.sleep(0.005)
        with pytest.raises(Overloaded):
            await runner.asubmit("the cat")
        for task in tasks[:5]:
            task.cancel()
        await asyncio.gather(*tasks[:5], return_exceptions=True)
        assert (runner.stats().waiting_requests, runner.stats().cancelled) == (1, 5)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tasks[5], 0.05)
        assert runner.stats().waiting_tokens == 0
        gate.opened.set()

    with PackRunner(gate.encoder, timeout=0, max_waiting_requests=6) as runner:
        held(gate, runner)
        asyncio.run(ask(runner))
        assert runner._admission.preparing == 0


def test_tokenizing_does_not_hold_up_the_loop(make_encoder, monkeypatch) -> None:
    plain, release = Encoder.prepare, threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        assert release.wait(PATIENCE)
        return plain(*arguments, **options)

    monkeypatch.setattr(Encoder, "prepare", slow)

    async def ask(runner: PackRunner) -> Any:
        tasks = [asyncio.create_task(runner.asubmit("the cat")) for _ in range(2)]
        while runner._admission.preparing < 2:
            await asyncio.sleep(0.001)
        tasks[0].cancel()
        await asyncio.sleep(0.01)
        release.set()  # only a loop that runs gets here
        return (await asyncio.gather(*tasks, return_exceptions=True))[1]

    with PackRunner(make_encoder(), timeout=0) as runner:
        assert asyncio.run(ask(runner)).shape == (96,)
        assert runner.stats().requests == 1, "the one given up while it was tokenized never came"


def test_a_place_is_kept_until_the_tokenizing_thread_ends(make_encoder, monkeypatch) -> None:
    """Who gives up while it is tokenized leaves a thread behind: that must stay bounded."""
    plain, begun, release = Encoder.prepare, threading.Semaphore(0), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        begun.release()
        assert release.wait(PATIENCE)
        return plain(*arguments, **options)

    monkeypatch.setattr(Encoder, "prepare", slow)

    async def ask(runner: PackRunner) -> None:
        queue = runner._admission
        # One thread: the first runs, the second waits for the thread and is given up before it.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        tasks = [asyncio.create_task(runner.asubmit("the cat")) for _ in range(2)]
        await _acquired(begun)
        assert queue.preparing == 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert queue.preparing == 1, "the one that runs has its place, the other never began"
        waits = asyncio.create_task(runner.asubmit("a mat"))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await runner.asubmit("a hat")
        release.set()
        assert (await waits).shape == (96,)
        assert queue.preparing == 0

    async def ask_and_release(runner: PackRunner) -> None:
        try:
            await ask(runner)
        finally:
            release.set()

    with PackRunner(make_encoder(), timeout=0, max_waiting_requests=2) as runner:
        asyncio.run(ask_and_release(runner))
        assert runner.stats().requests == 1


async def _acquired(semaphore: threading.Semaphore) -> None:
    while not semaphore.acquire(blocking=False):
        await asyncio.sleep(0.001)


# What it says of itself


def test_figures_add_up_and_are_published(gate: Gate) -> None:
    gate.opened.set()
    runner = PackRunner(gate.encoder, rows=2, timeout=0.001)
    assert settled(lambda: len(status.read()) == 1)
    (entry,) = status.read()
    assert entry.figures["model"] == "tiny" and entry.figures["waiting_requests"] == 0
    runner.run(TEXTS * 3)
    runner.close()
    stats = runner.stats()
    assert stats.requests == stats.answered == 15
    assert stats.failed == stats.cancelled == stats.running_requests == stats.waiting_tokens == 0
    assert stats.batches == len(gate.batches)
    assert stats.tokens == sum(len(packed.ids) for packed in gate.batches)
    assert stats.fill == 1.0 and stats.sequences_a_batch == pytest.approx(15 / stats.batches)
    assert 0 < stats.queue_ms <= stats.p50_ms <= stats.p99_ms and stats.compute_ms > 0
    assert status.read() == []
    assert "ragged, 2 rows of 48 tokens" in repr(runner)


def test_fill_counts_what_rows_leave_empty(make_encoder) -> None:
    with PackRunner(make_encoder(kernel="mask"), rows=4, timeout=0.01) as runner:
        runner.run([[6] * 24] * 4)
        assert runner.stats().fill == pytest.approx(24 * 4 / (4 * 48))


def test_an_answer_knows_its_batch(make_encoder) -> None:
    with PackRunner(make_encoder(), timeout=0.05) as runner:
        assert (runner.recent(), runner.rate(), runner.idle_seconds()) == ([], 0.0, math.inf)
        jobs = runner.prepare([[6] * 20, [7] * 30, [8] * 40], "embed")
        runner.reserve(jobs)
        futures = [runner.admit(job) for job in jobs]
        vectors = np.stack([future.result(PATIENCE) for future in futures])
        assert np.array_equal(vectors, runner.encoder.embed([[6] * 20, [7] * 30, [8] * 40]))
        (ran,) = runner.recent()
        assert all(future.ran is ran for future in futures)
        assert (ran.rows, ran.tokens, ran.sequences, ran.fill) == (((20, 30, 40),), 90, 3, 1.0)
        assert 0 < futures[-1].waited <= futures[0].waited < PATIENCE
        assert runner.rate() == pytest.approx(90 / ran.seconds)
        assert 0 <= runner.idle_seconds() < PATIENCE
        assert (runner.waiting_tokens, runner.max_waiting_tokens) == (0, 8 * runner.shape.tokens)


def test_recent_batches_count_unfilled_tokens(make_encoder) -> None:
    with PackRunner(make_encoder(kernel="mask"), rows=2, timeout=0.05) as runner:
        runner.run([[6] * 24] * 3)
        (ran,) = runner.recent()
        assert sorted(map(len, ran.rows)) == [1, 2] and ran.fill == 24 * 3 / (2 * 48)


def test_what_was_promised_counts_as_if_it_waited(make_encoder) -> None:
    with PackRunner(make_encoder(), max_waiting_tokens=100, timeout=0) as runner:
        jobs = runner.prepare([[6] * 40, [7] * 40], "embed")
        runner.reserve(jobs)
        assert runner.waiting_tokens == 80
        with pytest.raises(Overloaded):
            runner.submit([8] * 21)
        with pytest.raises(Overloaded):
            runner.reserve(jobs)
        assert runner.submit([8] * 20).result(PATIENCE) is not None
        assert runner.admit(jobs[0]).result(PATIENCE) is not None
        assert runner.waiting_tokens == 40
        runner.release(jobs[1:])
        assert runner.waiting_tokens == 0
        runner.reserve(jobs)
    with pytest.raises(RunnerStopped):
        runner.admit(jobs[0])


def test_no_more_can_be_promised_than_may_wait(make_encoder) -> None:
    with PackRunner(make_encoder(), max_waiting_requests=10, timeout=0) as runner:
        jobs = runner.prepare([[6]] * 3000, "embed")
        with pytest.raises(InputError, match="at most 10 may wait"):
            runner.reserve(jobs)
        runner.reserve(jobs[:10])
        with pytest.raises(Overloaded):
            runner.reserve(jobs[10:11])
        assert all(runner.admit(job).result(PATIENCE) is not None for job in jobs[:10])
        runner.reserve(jobs[10:20])
        runner.release(jobs[10:20])


def test_a_full_queue_refuses_before_tokenizing(gate) -> None:
    with PackRunner(gate.encoder, max_waiting_requests=1, timeout=0) as runner:
        held(gate, runner)
        runner.submit("the cat")
        with pytest.raises(Overloaded):
            runner.prepare(["a mat"])
        gate.opened.set()


def test_a_runner_may_not_publish_its_status(make_encoder, tmp_path, monkeypatch) -> None:
    with PackRunner(make_encoder(), publish=False) as runner:
        runner.run(TEXTS)
        assert status.read() == [] and len(runner._engine.threads) == 1
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PACKHORSE_RUNTIME", str(tmp_path / "file"))
    with PackRunner(make_encoder()) as runner:
        assert len(runner.run(TEXTS)) == 5
