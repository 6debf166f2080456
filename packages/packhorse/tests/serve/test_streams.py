"""A request in the runner: what it reserves comes back, however it ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.errors import RequestFailed
from packhorse.runtime.runner import PackRunner
from packhorse.runtime.tasks import InferenceJob
from packhorse.serve import streams
from packhorse.serve.processes.arena import Arena, create
from packhorse.serve.processes.engine import EngineRequest, FrontLink, ReceivedSequence, _jobs
from packhorse.serve.processes.messages import DONE, FAILED, Records, Run, unpack_failed

POISON = 20  # its id in the vocabulary of conftest


def fail_on_poison(packed: Any) -> None:
    if (packed.ids == POISON).any():
        raise RuntimeError("the model cannot take this")


@pytest.fixture
def runner(tiny) -> Any:
    with PackRunner(tiny("tiny", fail_on_poison), rows=2, timeout=0, publish=False) as runner:
        yield runner


def run(runner: PackRunner, texts: list[str]) -> tuple[BaseException | None, Any, Any]:
    """Run texts as one request, one job per text; return how it ended, and its stream."""
    ended = threading.Event()
    outcome: list[Any] = []

    def on_end(error: BaseException | None, result: Any) -> None:
        outcome.extend((error, result))
        ended.set()

    jobs = [job for text in texts for job in runner.prepare([text])]
    merged = [InferenceJob(job.sequences, job.heads, list) for job in jobs]
    stream = streams.start(runner, merged, on_end)
    assert ended.wait(60)
    return outcome[0], outcome[1], stream


def test_rows_come_in_order(runner) -> None:
    texts = ["the cat", "a mat", "one red hat"] * 20
    error, result, _ = run(runner, texts)
    assert error is None
    vectors = [row[0] for row in result.rows]
    np.testing.assert_allclose(vectors, runner.encoder.embed(texts), atol=1e-6)


def test_a_failed_request_leaves_nothing_in_the_queue(runner) -> None:
    error, result, _ = run(runner, ["poison", *["the cat sat on a mat"] * 200])
    assert isinstance(error, RequestFailed) and result is None
    while runner.waiting_tokens:  # what was submitted already runs or is cancelled
        threading.Event().wait(0.01)
    assert run(runner, ["the cat"])[0] is None


class Front:
    """The other end of a link, with one request in shared memory."""

    def __init__(self, ids: list[int], output_end: int = 4096) -> None:
        self.socket, end = socket.socketpair()
        self.link = FrontLink(end, Arena(create(1 << 16)))
        data = self.link.arena.array(0, 2 + len(ids), np.int32)
        data[:] = [len(ids), 0, *ids]
        self.run = Run(1, 0, -1, 1, len(ids), 0, 1024, output_end, "embed")

    def request(self, runner: PackRunner) -> EngineRequest:
        """The request as the engine's main thread receives it."""
        request = self.link.requests[self.run.request] = EngineRequest(self.link, runner, self.run)
        return request

    def replies(self) -> list[tuple[int, bytes]]:
        """All replies so far."""
        assert self.link.flush()
        self.socket.setblocking(False)
        try:
            return Records().feed(self.socket.recv(1 << 16))
        except BlockingIOError:
            return []

    def reply(self) -> tuple[int, bytes]:
        """The first reply, when it is there."""
        deadline = time.monotonic() + 60
        while not (replies := self.replies()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        (reply,) = replies
        return reply

    def close(self) -> None:
        """Close both ends."""
        self.link.close()
        self.socket.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., Front]]:
    """Makes fronts, and closes them when the test is over."""
    fronts: list[Front] = []

    def front(*arguments: Any) -> Front:
        fronts.append(Front(*arguments))
        return fronts[-1]

    yield front
    for opened in fronts:
        opened.close()


@pytest.mark.parametrize("ids", [[2, 6, 3], [2, POISON, 3]])
def test_an_answer_that_comes_while_the_request_is_started_is_a_reply(
    runner, connect, ids: list[int], monkeypatch
) -> None:
    """The runner may be faster than the thread that submits: then the callback runs there."""
    enqueue = runner.enqueue

    def enqueue_and_wait(job: InferenceJob, share: Any) -> Any:
        future = enqueue(job, share)
        future.exception(60)
        return future

    monkeypatch.setattr(runner, "enqueue", enqueue_and_wait)
    front = connect(ids)
    front.request(runner).start()
    ((kind, body),) = front.replies()
    if POISON in ids:
        assert kind == FAILED and "cannot take this" in str(unpack_failed(body)[1])
    else:
        assert kind == DONE
        expected = runner.encoder.run(runner.encoder.tokenize([np.array(ids)]), "embed")[0][0]
        output = front.link.arena.array(1024, len(expected), np.float32)
        np.testing.assert_allclose(output, expected, atol=1e-6)
    assert not front.link.requests


def test_results_larger_than_the_block_are_refused(runner, connect) -> None:
    front = connect([2, 6, 3], 1028)
    front.request(runner).start()
    assert front.reply()[0] == FAILED
    assert not front.link.arena.array(1028, 100, np.float32).any()


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_request_that_is_cancelled_while_it_runs_is_replied_to_once(
    tiny, connect, cancelled: bool
) -> None:
    """And its block stays as it is, because the front uses it again."""
    launched, release = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        launched.set()
        assert release.wait(60)

    with PackRunner(tiny("tiny", hold), rows=2, timeout=0, publish=False) as runner:
        front = connect([2, 6, 3])
        request = front.request(runner)
        request.start()
        assert launched.wait(60)
        if cancelled:
            request.cancel()
            request.cancel()
            ((kind, body),) = front.replies()
            assert kind == FAILED and "cancelled" in str(unpack_failed(body)[1])
        release.set()
    written = front.link.arena.array(1024, 8, np.float32).any()
    if cancelled:
        assert not written and not front.replies()
    else:  # the control
        assert written and [kind for kind, _ in front.replies()] == [DONE]


@given(
    inputs=st.lists(
        st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=3),
        min_size=1,
        max_size=8,
    ),
    batch_tokens=st.integers(1, 30),
)
def test_an_engine_reads_the_jobs_that_merging_one_per_input_gives(
    inputs: list[list[tuple[int, int]]], batch_tokens: int
) -> None:
    """`inputs` has the length and the prompt of each sequence of each input."""
    sequences = [sequence for sequences in inputs for sequence in sequences]
    n = len(sequences)
    lengths, prompts = zip(*sequences, strict=True)
    tokens = sum(lengths)
    output = 4 * (2 * n + tokens) + tokens + n
    arena = Arena(create(1 << 12))
    arena.array(0, 2 * n + tokens, np.int32)[:] = [*lengths, *prompts, *range(tokens)]
    types = [token % 2 for token in range(tokens)]
    starts = [int(index == 0) for part in inputs for index in range(len(part))]
    arena.array(4 * (2 * n + tokens), tokens + n, np.uint8)[:] = [*types, *starts]
    run = Run(1, 0, -1, n, tokens, 0, output, output, "embed")

    jobs: list[InferenceJob] = []
    begin = 0
    for part in inputs:
        received: list[Any] = []
        for length, prompt in part:
            ids = np.arange(begin, begin + length)
            received.append(ReceivedSequence(ids, ids % 2, prompt))
            begin += length
        jobs.append(InferenceJob(tuple(received), ("embed",), list))

    def plain(job: InferenceJob) -> Any:
        sequences = [(s.ids.tolist(), s.types.tolist(), s.prompt_length) for s in job.sequences]
        return sequences, job.heads, job.only, job.inputs

    read = _jobs(arena, run, batch_tokens)
    assert [*map(plain, read)] == [*map(plain, streams.merge(jobs, batch_tokens))]
