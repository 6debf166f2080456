"""The runner under everything at once: threads, cancels, poison, overload; at length if slow.

Every answer is compared with the one that was computed alone, and every other one must be far from
it: an answer to somebody else's question cannot pass.
"""

from __future__ import annotations

import math
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packhorse.errors import Overloaded, RequestFailed, RunnerStopped
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.runner import PackRunner

pytestmark = pytest.mark.usefixtures("quiet_runtime")

PATIENCE = 120
WORDS = "the cat sat on a mat and saw one red hat who what horse mule carries sacks to"
slow = pytest.mark.slow


def texts(count: int) -> list[str]:
    """Different texts of 1 to 40 words."""
    chance, words = random.Random(0), WORDS.split()
    unique = {" ".join(chance.choices(words, k=1 + n % 40)): None for n in range(3 * count)}
    return list(unique)[:count]


class Questions:
    """Texts and their answers, each computed alone; `check` tells whose answer a vector is."""

    def __init__(self, encoder: Encoder, count: int = 200) -> None:
        self.texts = texts(count)
        self.answers = np.stack([encoder.embed([text])[0] for text in self.texts])
        apart = np.linalg.norm(self.answers[:, None] - self.answers[None], axis=-1)
        assert apart[~np.eye(count, dtype=bool)].min() > 1e-3, "answers must tell texts apart"

    def check(self, index: int, answer: np.ndarray) -> bool:
        return float(np.abs(answer - self.answers[index]).max()) <= 1e-5


@pytest.fixture(scope="module")
def questions(make_encoder) -> Questions:
    return Questions(make_encoder())


def at_once(count: int, work: Callable[[int], None]) -> None:
    """Run `work` in so many threads; what one of them raises is raised here."""
    caught: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            caught.append(error)

    workers = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE)
        assert not worker.is_alive(), "hangs"
    if caught:
        raise caught[0]


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns every few microseconds, so that what can come between does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def patiently(runner: PackRunner, text: str) -> Future[Any]:
    while True:
        try:
            return runner.submit(text)
        except Overloaded:
            time.sleep(0.001)


@pytest.mark.parametrize("mode", ["bucketed", "mask", "repack"])
@pytest.mark.parametrize(("clients", "requests"), [(16, 40), pytest.param(64, 500, marks=slow)])
def test_every_answer_belongs_to_its_question(
    make_encoder, questions: Questions, mode: str, clients: int, requests: int
) -> None:
    """A fifth is cancelled at some moment, early or late; no answer is lost or somebody else's."""
    outcomes: dict[str, int] = {"right": 0, "cancelled": 0}
    counting = threading.Lock()
    options = {"max_waiting_requests": 24, "max_sequences": 20, "rows": 3, "timeout": 0.001}
    with PackRunner(make_encoder(kernel=mode), **options) as runner:

        def client(number: int) -> None:
            chance = random.Random(number)
            for _ in range(requests):
                index = chance.randrange(len(questions.texts))
                future = patiently(runner, questions.texts[index])
                if chance.random() < 0.2:
                    if chance.random() < 0.5:
                        time.sleep(chance.random() * 0.003)
                    future.cancel()
                try:
                    assert questions.check(index, future.result(PATIENCE))
                    outcome = "right"
                except CancelledError:
                    outcome = "cancelled"
                with counting:
                    outcomes[outcome] += 1

        at_once(clients, client)
    stats = runner.stats()
    assert sum(outcomes.values()) == clients * requests == stats.requests
    assert (stats.answered, stats.cancelled) == (outcomes["right"], outcomes["cancelled"])
    assert outcomes["cancelled"] > 0 and stats.failed == stats.reruns == 0
    assert stats.waiting_requests == stats.waiting_tokens == stats.running_requests == 0
    assert not runner._admission.unanswered and not runner._admission.queues


def test_somebody_elses_answer_would_be_noticed(make_encoder, questions: Questions) -> None:
    """The control: replies that are handed out in the wrong order fail the check."""
    with PackRunner(make_encoder(), timeout=0.05) as runner:
        reply = runner._engine._reply
        runner._engine._reply = lambda pieces, rows, ran: reply(pieces, rows[::-1], ran)
        answers = runner.run(questions.texts[:8])
    assert not any(questions.check(i, answer) for i, answer in enumerate(answers))


@pytest.mark.parametrize(("good", "bad"), [(600, 12), pytest.param(10_000, 100, marks=slow)])
def test_poison_among_the_good(make_encoder, questions: Questions, good: int, bad: int) -> None:
    """Some make the model raise, some a panic, some nothing but NaN: the good are all answered."""
    tokenizer = make_encoder().tokenizer
    raises, panics, nans = (tokenizer.id(word) for word in ("poison", "load", "?"))

    def before(packed: Any) -> None:
        if (packed.ids == raises).any():
            raise ValueError("poison")
        if (packed.ids == panics).any():
            raise type("PanicException", (BaseException,), {})("a native library gave up")

    encoder = make_encoder(before=before)
    inner = encoder.backend.backend  # type: ignore[attr-defined]

    def unsound(packed: Any, heads: Any, at: Any = None) -> Any:
        (vectors,) = inner(packed, heads, at)
        vectors = vectors.clone()
        for place, ids in enumerate(packed.split(packed.ids)):
            if (ids == nans).any():
                vectors[packed.places[place]] = math.inf
        return [vectors]

    encoder.backend.backend = unsound  # type: ignore[attr-defined]
    order = [-1 - i for i in range(bad)] + [i % len(questions.texts) for i in range(good)]
    random.Random(1).shuffle(order)
    words = ["a poison hat", "no load", "who sat ?"]
    with PackRunner(encoder, rows=4, timeout=0.002) as runner:
        for begin in range(0, len(order), 500):
            part = order[begin : begin + 500]
            part_texts = [questions.texts[i] if i >= 0 else words[i % 3] for i in part]
            futures = [patiently(runner, text) for text in part_texts]
            for index, future in zip(part, futures, strict=True):
                if index >= 0:
                    assert questions.check(index, future.result(PATIENCE))
                else:
                    with pytest.raises(RequestFailed):
                        future.result(PATIENCE)
    stats = runner.stats()
    assert (stats.answered, stats.failed, stats.waiting_requests) == (good, bad, 0)
    assert 0 < stats.reruns <= 2 * bad * math.log2(stats.sequences_a_batch * 8)


def resident() -> int:
    """Bytes of memory this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Light:
    """A backend that costs a nap and no memory: each sequence gets a sum of its words' vectors.

    A real one would do, but libraries keep what they prepared for each shape they have seen, which
    is many megabytes and no fault of the runner.
    """

    def __init__(self, nap: float, leak: int = 0) -> None:
        self.words = torch.randn(99, 8, generator=torch.Generator().manual_seed(0))
        self.nap, self.leak, self.kept = nap, leak, []

    def __call__(self, packed: Any, heads: Any, at: Any = None) -> list[torch.Tensor]:
        time.sleep(self.nap)
        self.kept += [bytes(self.leak) for _ in range(len(packed)) if self.leak]
        moved = self.words[packed.ids] * (packed.positions + 1.0).sqrt()[:, None]
        return [torch.segment_reduce(moved, "sum", lengths=packed.lengths.long(), axis=0)]


@dataclass
class Flood:
    """Four clients that ask without pause, and what became of it."""

    latencies: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)  # that were run while a request waited
    refused: int = 0
    grown: int = 0  # bytes
    most: int = 0  # requests that waited at once
    batch: float = 0.0  # seconds

    def run(self, encoder: Encoder, questions: Questions, allowed: int, seconds: float) -> None:
        options = {"rows": 9, "timeout": 0.002, "max_sequences": 10}
        with PackRunner(encoder, max_waiting_requests=allowed, **options) as runner:
            self._flood(runner, questions, 0.5)  # threads and pools are there
            before, self.latencies = resident(), []
            self._flood(runner, questions, seconds)
            self.grown = resident() - before - 128 * len(self.latencies)
            self.batch = runner.stats().compute_ms / 1e3
            begin = time.monotonic()
            assert all(map(questions.check, count(), runner.run(questions.texts)))
            assert time.monotonic() - begin < 30, "recovers"
        assert runner.stats().refused == self.refused > 0
        assert runner.stats().waiting_requests == runner.stats().waiting_tokens == 0

    def _flood(self, runner: PackRunner, questions: Questions, seconds: float) -> None:
        end = time.monotonic() + seconds
        refused = [0] * 4

        def client(number: int) -> None:
            chance = random.Random(number)
            seen = runner._engine.recorder
            while (begin := time.monotonic()) < end:
                batch = seen.batches

                def answered(_: Any, begin: float = begin, batch: int = batch) -> None:
                    self.latencies.append(time.monotonic() - begin)
                    self.batches.append(seen.batches - batch)

                try:
                    runner.submit(chance.choice(questions.texts)).add_done_callback(answered)
                except Overloaded:
                    refused[number] += 1
                    self.most = max(self.most, runner._admission.waiting_requests)
                    time.sleep(0.0002)

        at_once(4, client)
        self.refused += sum(refused)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the kernel does not tell")
@pytest.mark.parametrize("seconds", [1.5, pytest.param(60.0, marks=slow)])
def test_overload_is_refused_and_leaves_nothing_behind(make_encoder, seconds: float) -> None:
    """Many times what can be run: what is admitted is answered in time, memory stays flat."""
    encoder = replace(make_encoder(), backend=Light(nap=0.004), width=8)
    flood = Flood()
    flood.run(encoder, Questions(encoder), allowed=60, seconds=seconds)
    assert flood.refused > 3 * len(flood.latencies) > 0 and flood.most <= 60
    assert flood.grown < 16 << 20, f"{flood.grown >> 20} MiB more than before"
    # 60 requests are 6 batches; one is under way, and a client may be slow to hand its request in.
    assert np.percentile(flood.batches, 99) <= 60 / 10 + 4
    if seconds > 10:
        assert np.percentile(flood.latencies, 99) <= 2 * (0.002 + (60 / 10 + 2) * flood.batch)


@slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the kernel does not tell")
def test_a_leak_would_be_noticed(make_encoder) -> None:
    """The control: 4 KiB a request are lost."""
    encoder = replace(make_encoder(), backend=Light(nap=0.004, leak=4096), width=8)
    flood = Flood()
    flood.run(encoder, Questions(encoder), allowed=60, seconds=20)
    assert flood.grown > 16 << 20


@pytest.mark.parametrize("rounds", [20, pytest.param(500, marks=slow)])
def test_closing_at_any_moment_answers_everyone(
    make_encoder, questions: Questions, rounds: int
) -> None:
    """Submitters against close: whoever got a future gets an answer or an error, soon."""
    for number in range(rounds):
        runner = PackRunner(make_encoder(), rows=2, timeout=0.0005, publish=False)
        futures: list[Future[Any]] = []

        def client(_: int, runner: PackRunner = runner, futures: list[Future[Any]] = futures):
            try:
                while True:
                    futures.append(patiently(runner, questions.texts[len(futures) % 50]))
            except RunnerStopped:
                pass

        def closer(_: int, runner: PackRunner = runner, number: int = number) -> None:
            time.sleep(random.Random(number).random() * 0.01)
            runner.close(drain=bool(number % 2))

        at_once(4, lambda i, client=client, closer=closer: (closer if i == 3 else client)(i))
        for future in futures:
            if (error := future.exception(PATIENCE)) is not None:
                assert isinstance(error, RunnerStopped) and number % 2 == 0
        stats = runner.stats()
        assert stats.requests == len(futures) == stats.answered + stats.failed


@pytest.mark.parametrize("rounds", [40, pytest.param(1000, marks=slow)])
def test_closing_without_draining_while_others_are_answered(
    make_encoder, hasty: None, rounds: int
) -> None:
    """Some run, some wait, some are cancelled: the engine ends, and everyone is told, once."""
    encoder = replace(make_encoder(), backend=Light(nap=0.0), width=8)
    options = {"rows": 2, "max_sequences": 2, "timeout": 0.0, "publish": True}
    for number in range(rounds):
        runner = PackRunner(encoder, max_waiting_requests=4096, **options)
        finished: list[Future[Any]] = []
        futures: list[Future[Any]] = []
        for _ in range(200):
            futures.append(runner.submit([7]))
            futures[-1].add_done_callback(finished.append)
        begin = threading.Barrier(3)

        def closer(runner: PackRunner = runner, begin: threading.Barrier = begin) -> None:
            begin.wait(PATIENCE)
            runner.close(drain=False)

        def canceller(
            which: slice,
            begin: threading.Barrier = begin,
            futures: list[Future[Any]] = futures,
        ) -> None:
            begin.wait(PATIENCE)
            for future in futures[which]:
                future.cancel()

        work = (
            closer,
            lambda c=canceller: c(slice(0, None, 7)),
            lambda c=canceller: c(slice(3, None, 7)),
        )
        at_once(3, lambda i, work=work: work[i]())
        assert not any(thread.is_alive() for thread in runner._engine.threads)
        assert sorted(map(id, finished)) == sorted(map(id, futures)), "each is told once"
        failed = [f for f in futures if not f.cancelled() and f.exception() is not None]
        assert all(isinstance(future.exception(), RunnerStopped) for future in failed)
        stats = runner.stats()
        cancelled = sum(future.cancelled() for future in futures)
        assert (stats.failed, stats.cancelled) == (len(failed), cancelled), number
        assert stats.answered == len(futures) - len(failed) - cancelled
        assert stats.waiting_requests == stats.running_requests == 0
