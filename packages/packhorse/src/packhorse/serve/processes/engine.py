"""An engine process: opens the models, runs the requests of all fronts, and replies.

The main thread reads the sockets of all links and submits; the runner's thread computes, writes the
results into the request's block and replies. Every `Run` gets exactly one reply, a cancelled one
too: only then does its front use the block again.

Both threads need the interpreter, and a thread that lets go of it, as `send` and large copies by
numpy do, waits until the other is done with what it has. So the replies of a batch go out together,
one `send` per front, and results are copied by `memoryview`, which does not let go.
"""

from __future__ import annotations

import gc
import math
import os
import select
import selectors
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from sys import byteorder
from typing import Any, cast

import numpy as np

from packhorse.errors import PackhorseError, RequestFailed, RunnerStopped
from packhorse.runtime.admission import PackedFuture
from packhorse.runtime.runner import PackRunner
from packhorse.runtime.tasks import InferenceJob
from packhorse.serve import hosting, logs
from packhorse.serve.hosting import ServedModel, ServedModels, describe_engine
from packhorse.serve.memory import trim_memory
from packhorse.serve.metrics import Metrics, families_to_json
from packhorse.serve.processes.arena import Arena
from packhorse.serve.processes.descriptions import describe
from packhorse.serve.processes.messages import (
    CANCEL,
    READ_BYTES,
    RUN,
    Control,
    Records,
    Run,
    pack_done,
    pack_failed,
    unpack_cancel,
)
from packhorse.serve.settings import ServeSettings
from packhorse.serve.starting import open_telemetry
from packhorse.serve.streams import StreamResult, pack_info, start

POLL_SECONDS = 0.5  # how often a dead runner is looked for
EXIT_ENGINE_DIED = 70
EXIT_NOT_OPENED = 71  # the models could not be opened; the supervisor has the reason


class ReceivedSequence:
    """Token ids from a front; all that a batch needs of `tokens.Encoding`."""

    __slots__ = ("ids", "key_length", "prompt_length", "types")

    def __init__(self, ids: np.ndarray, types: np.ndarray, number: int) -> None:
        self.ids = ids
        self.types = types
        self.prompt_length = max(number, 0)
        self.key_length = max(-number, 0)

    def __len__(self) -> int:
        return len(self.ids)


class FrontLink:
    """A front as the engine sees it."""

    def __init__(self, end: socket.socket, arena: Arena) -> None:
        end.setblocking(False)
        self.socket = end
        self.arena = arena
        self.records = Records()
        self.requests: dict[int, EngineRequest] = {}  # nobody has begun to reply to them
        self.closed = False
        self._replies: deque[bytes] = deque()
        self._unsent = bytearray()
        self._lock = threading.Lock()  # of whoever sends

    def claim(self, request: int) -> bool:
        """Return True to the one caller that may reply to a request, on any thread.

        Without a lock: to take something out of a dictionary is one step for the interpreter.
        """
        return self.requests.pop(request, None) is not None

    def reply(self, record: bytes) -> None:
        """Add a reply to those that the next `flush` sends, from any thread."""
        self._replies.append(record)

    def refuse(self, request: int, error: PackhorseError) -> None:
        """Add the reply to a request that was not started to those that wait."""
        with self._lock:
            self._unsent += pack_failed(request, error, 0, 0.0)

    def flush(self) -> bool:
        """Send the replies that wait, from any thread; return whether none is left."""
        if not (self._replies or self._unsent):
            return True
        with self._lock:
            while self._replies:
                self._unsent += self._replies.popleft()
            return self.closed or self._send()

    def close(self) -> None:
        """Cancel all requests of a front that is gone."""
        with self._lock:
            self.closed = True
        requests = list(self.requests.values())
        self.requests.clear()
        for request in requests:
            request.stop()
        self.socket.close()

    def _send(self) -> bool:
        """Send until the socket takes no more; the lock is held."""
        while self._unsent:
            try:
                sent = self.socket.send(self._unsent)
            except BlockingIOError:
                return False
            except OSError:  # the front is gone; the main thread sees that too and closes the link
                sent = len(self._unsent)
            del self._unsent[:sent]
        return True


class EngineRequest:
    """A request of a front on its way through the runner.

    Who replies claims the request first, and writes results only then: once a cancellation was
    replied to, nobody writes into the block.
    """

    __slots__ = ("_stop", "link", "run", "runner")

    def __init__(self, link: FrontLink, runner: PackRunner, run: Run) -> None:
        self.link = link
        self.runner = runner
        self.run = run
        self._stop: Callable[[], Any] = _nothing

    def start(self) -> None:
        """Admit the request, or reply why not."""
        jobs = _jobs(self.link.arena, self.run, self.runner.shape.tokens)
        ticket = self.run.ticket
        try:
            if len(jobs) == 1:  # as `streams.SingleJob`, for less
                if ticket.deadline < math.inf:
                    self.runner.check_deadline(jobs[0].tokens, ticket)
                future = self.runner.enqueue(jobs[0], ticket.share)
                self._stop = future.cancel
                future.add_done_callback(self._on_answer)
            else:
                self._stop = start(self.runner, jobs, self._on_end, ticket).stop
        except PackhorseError as error:
            self._on_end(error, None)

    def cancel(self) -> None:
        """Cancel what has not run; the front waits for this reply before it frees the block."""
        self.stop()
        self._on_end(RequestFailed("the request was cancelled"), None)

    def stop(self) -> None:
        """Cancel what has not run, without a reply."""
        self._stop()

    def _on_answer(self, answered: Future[Any]) -> None:
        future = cast(PackedFuture, answered)
        if future.cancelled():  # who cancels replies
            return
        error = future.exception()
        if error is None:
            self._on_end(None, StreamResult(future.result(), pack_info((future,))))
        else:
            self._on_end(error, None)

    def _on_end(self, error: BaseException | None, result: StreamResult | None) -> None:
        if self.link.claim(self.run.request):
            self.link.reply(self._record(error, result))

    def _record(self, error: BaseException | None, result: StreamResult | None) -> bytes:
        """Write the results, and return the reply."""
        request = self.run.request
        waiting = self.runner.waiting_tokens
        rate = self.runner.waiting_rate()
        if result is not None:
            try:
                self._write(result.rows)
                return pack_done(request, result.pack, waiting, rate)
            except Exception as caught:
                error = caught
        failure = error or RequestFailed("the request was not run")
        return pack_failed(request, failure, waiting, rate)

    def _write(self, rows: Sequence[tuple[np.ndarray, ...]]) -> None:
        """Write the results head by head, the rows of all sequences one after the other."""
        offset = self.run.output
        limit = self.run.end
        write = self.link.arena.write
        for column in zip(*rows, strict=True):
            for part in column:
                end = offset + 4 * part.size
                if end > limit:  # into the block of another request
                    raise RequestFailed("the results are larger than the model's description says")
                write(offset, part)
                offset = end


def _nothing() -> None:
    """Stop a request that was not admitted."""


def _jobs(arena: Arena, run: Run, batch_tokens: int) -> list[InferenceJob]:
    """Read the sequences of a request as jobs of at most a batch, which return their rows.

    The same as `streams.merge`, without a job per input in between.
    """
    n = run.sequences
    heads = _heads(run.heads)
    only = None if run.only < 0 else run.only
    # A copy: after a cancellation the front uses the block again, whatever still runs here.
    data = arena.read(run.offset, run.output)
    if n == 1:
        ids = np.frombuffer(data, np.int32, run.tokens, 8)
        types = np.frombuffer(data, np.uint8, run.tokens, 8 + 4 * run.tokens)
        number = int.from_bytes(data[4:8], byteorder, signed=True)
        sequence: Any = ReceivedSequence(ids, types, number)
        return [InferenceJob((sequence,), heads, list, only)]
    numbers = np.frombuffer(data, np.int32, 2 * n + run.tokens)
    ids = numbers[2 * n :]
    rest = np.frombuffer(data, np.uint8, offset=numbers.nbytes)
    ends = np.cumsum(numbers[:n])
    prompts = numbers[n : 2 * n].tolist()
    sequences: list[Any] = []
    begin = 0
    for end, prompt in zip(ends.tolist(), prompts, strict=True):
        sequences.append(ReceivedSequence(ids[begin:end], rest[begin:end], prompt))
        begin = end
    starts = rest[run.tokens : run.tokens + n]  # 1 where an input begins with the sequence
    jobs: list[InferenceJob] = []
    first = 0
    while first < n:
        # As many sequences as fit into a batch, but at least one.
        limit = batch_tokens + (int(ends[first - 1]) if first else 0)
        last = max(first + 1, int(np.searchsorted(ends, limit, side="right")))
        inputs = int(starts[first:last].sum())
        jobs.append(InferenceJob(tuple(sequences[first:last]), heads, list, only, inputs))
        first = last
    return jobs


@cache
def _heads(names: str) -> tuple[str, ...]:
    return tuple(names.split(","))


class EngineProcess:
    """The main loop of an engine process."""

    def __init__(
        self,
        control: Control,
        settings: ServeSettings,
        served: ServedModels,
        models: dict[int, ServedModel],
        labels: dict[str, str],
    ) -> None:
        """`models` are by their place; see `ModelDescription`."""
        self.control = control
        self.settings = settings
        self.models = models  # also those that only requests under way still use
        self.served = served
        self.labels = labels
        self.metrics = Metrics(self.served, labels=labels)
        self.selector = selectors.DefaultSelector()
        self.links: tuple[FrontLink, ...] = ()  # replaced and not changed: runners read it
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.selector.register(control.socket, selectors.EVENT_READ, self._on_control)
        self.selector.register(self._eventfd, selectors.EVENT_READ, self._on_wake)
        self.stopping = False
        for model in models.values():
            model.runner.on_replied(self._send_replies)

    def run(self) -> None:
        """Serve until the supervisor says stop or is gone."""
        idle = True
        while not self.stopping:
            selected = self.selector.select(POLL_SECONDS)
            if not selected and not idle:
                trim_memory()  # of batches, most of which the C library would keep
            idle = not selected
            for key, events in selected:
                if isinstance(key.data, FrontLink):
                    self._on_link(key.data, events)
                else:
                    key.data()
            if not self.served.alive:
                logs.LOGGER.critical("the engine died; its process ends and is replaced")
                os._exit(EXIT_ENGINE_DIED)

    def _on_control(self) -> None:
        received = self.control.receive()
        if received is None:  # the supervisor is gone
            os._exit(0)
        message, descriptors = received
        if message["kind"] == "link":
            end = socket.socket(fileno=descriptors[0])
            link = FrontLink(end, Arena(descriptors[1]))
            self.links = (*self.links, link)
            self.selector.register(end, selectors.EVENT_READ, link)
        elif message["kind"] == "ask":
            with suppress(OSError):  # a supervisor that does not read has no use for them
                value = self._reply(message)
                self.control.send({"kind": "reply", "id": message["id"], "value": value})
        elif message["kind"] == "open":
            threading.Thread(target=self._open, args=[message], daemon=True).start()
        elif message["kind"] == "prepare":  # requests are answered
            self.served.begin_preparing()
        elif message["kind"] == "serve":
            self.served.serve([self.models[place] for place in message["places"]])
        elif message["kind"] == "close":
            if (model := self.models.pop(message["place"], None)) is not None:
                hosting.release(model)
        elif message["kind"] == "stop":
            self.stopping = True

    def _open(self, message: dict[str, Any]) -> None:
        """Open a model and reply with its description, or why there is none."""
        place = message["place"]
        try:
            model = hosting.open_model(message["entry"], self.settings)
            value = asdict(describe(model, place))
            model.runner.on_replied(self._send_replies)
            self.models[place] = model
        except PackhorseError as error:
            value = {"error": type(error).__name__, "message": str(error)}
        except Exception as error:
            logs.LOGGER.exception("a model could not be opened")
            value = {"error": type(error).__name__, "message": "it could not be opened"}
        with suppress(OSError):
            self.control.send({"kind": "reply", "id": message["id"], "value": value})

    def _reply(self, message: dict[str, Any]) -> Any:
        if message["what"] == "metrics":
            return families_to_json(self.metrics.runners())
        return [
            {**describe_engine(model, message["batches"]), **self.labels} for model in self.served
        ]

    def _on_link(self, link: FrontLink, events: int) -> None:
        if events & selectors.EVENT_WRITE and link.flush():
            self.selector.modify(link.socket, selectors.EVENT_READ, link)
        if not events & selectors.EVENT_READ:
            return
        try:
            data = link.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(link.socket)
            self.links = tuple(known for known in self.links if known is not link)
            return link.close()
        for kind, body in link.records.feed(data):
            if kind == RUN:
                self._start(link, Run.unpack(body))
            elif kind == CANCEL and (request := link.requests.get(unpack_cancel(body))):
                request.cancel()
        if not link.flush():  # refusals and cancellations
            self._watch_writable(link)

    def _start(self, link: FrontLink, run: Run) -> None:
        model = self.models.get(run.model)
        if model is None:  # it was removed, and this engine was started afterwards
            return link.refuse(run.request, RunnerStopped("this model is served no more"))
        model.runner.wait_for_engine()
        request = EngineRequest(link, model.runner, run)
        link.requests[run.request] = request
        request.start()

    def _send_replies(self) -> None:
        """Send the replies of a batch, on the thread of a runner."""
        flushed = [link.flush() for link in self.links]
        if not all(flushed):
            os.eventfd_write(self._eventfd, 1)

    def _on_wake(self) -> None:
        os.eventfd_read(self._eventfd)
        for link in self.links:
            if not link.flush():
                self._watch_writable(link)

    def _watch_writable(self, link: FrontLink) -> None:
        """Send what waits on a link as soon as its socket takes it."""
        both = selectors.EVENT_READ | selectors.EVENT_WRITE
        self.selector.modify(link.socket, both, link)


def _end_with_supervisor(control: Control) -> None:
    """End the process when the supervisor is gone, also while models are being loaded."""
    poll = select.poll()
    poll.register(control.socket, select.POLLHUP)  # and no data, which the main thread reads
    poll.poll()
    os._exit(0)


def main(control: Control) -> int:
    """Open the models that the supervisor names, and run requests until it says stop."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the supervisor decides when an engine ends
    received = control.receive()
    if received is None:
        return 0
    threading.Thread(target=_end_with_supervisor, args=[control], daemon=True).start()
    message, _ = received
    settings = ServeSettings.from_json(message["settings"])
    logs.set_up(settings)
    try:
        models = hosting.open_models(settings, message["served"])
        places = dict(zip(message["places"], models, strict=True))
        described = [asdict(describe(model, place)) for place, model in places.items()]
    except PackhorseError as error:
        control.send({"kind": "failed", "error": type(error).__name__, "message": str(error)})
        return EXIT_NOT_OPENED
    control.send({"kind": "models", "models": described})
    gc.collect()  # while fronts make their part of the models
    gc.freeze()  # models and code live as long as the process; never scan them again
    process = EngineProcess(control, settings, models, places, message["labels"])
    with open_telemetry(settings) as telemetry:
        if telemetry is not None:
            telemetry.observe(process.metrics.read_figures)
        process.run()
    models.close()
    return 0
