"""A front process: speaks HTTP, tokenizes, sends sequences to an engine, writes the answers.

A request takes a block of the link's arena, which holds, one after the other:

    lengths  int32 [S]     prompt lengths  int32 [S]     ids  int32 [T]
    types    uint8 [T]     whether an input begins with the sequence  uint8 [S]
    results  float32, head by head; from the next multiple of 64 bytes

Everything here runs on the event loop, so there are no locks. A block is freed when the engine has
replied, also if nobody waits for the reply any more: until then the engine may write into it.
"""

from __future__ import annotations

import asyncio
import gc
import math
import socket
import sys
import time
import weakref
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, cast

import numpy as np

from packhorse.checkpoint.fingerprint import Fingerprint
from packhorse.errors import Overloaded, PackhorseError, RunnerStopped
from packhorse.runtime.batches import PER_TOKEN, PackedShape
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.shares import Share, Ticket
from packhorse.runtime.tasks import InferenceJob, Row, TaskInput
from packhorse.serve import logs, tls
from packhorse.serve.app import create, guarded
from packhorse.serve.dialects import token_ids
from packhorse.serve.failures import TooLarge
from packhorse.serve.hosting import ServedModel, ServedModels
from packhorse.serve.life import (
    TURN_SECONDS,
    DrainingServer,
    configuration,
    open_rpc,
    raise_file_limit,
)
from packhorse.serve.metrics import families_to_json, merged_page
from packhorse.serve.processes.arena import Arena
from packhorse.serve.processes.descriptions import ModelDescription
from packhorse.serve.processes.messages import (
    DONE,
    FAILED,
    READ_BYTES,
    READY,
    Control,
    Done,
    Records,
    Run,
    pack_cancel,
    rebuild_error,
    unpack_failed,
)
from packhorse.serve.settings import ServeSettings
from packhorse.serve.starting import open_telemetry
from packhorse.serve.streams import StreamResult

ASK_SECONDS = 2.0  # for the figures of the other processes
MAX_INLINE_BYTES = 4 << 20  # of a request; to copy 64 MiB on the event loop takes it 30 ms
ENGINE_LOST = "the engine that ran this request ended; another is being started"
NO_TICKET = Ticket()
NO_ENGINE = "no engine is running; one is being started"


@dataclass(eq=False, slots=True)
class FrontRequest:
    """A request that an engine runs."""

    finished: asyncio.Future[StreamResult]
    link: EngineLink
    number: int
    run: Run
    size: int  # of its block, in bytes
    shapes: list[tuple[str, list[int]]]  # per head: its name, its output's shape per row
    lengths: np.ndarray  # of the sequences
    counts: np.ndarray  # rows of per-token heads by sequence

    def stop(self) -> None:
        """Cancel the request; its block is freed when the engine replies."""
        self.link.cancel(self)

    def result(self, done: Done) -> StreamResult:
        """Read the results."""
        offset = self.run.output
        columns: list[list[np.ndarray]] = []
        for head, shape in self.shapes:
            counts = self.counts if head in PER_TOKEN else np.ones(len(self.lengths), int)
            rows = int(counts.sum())
            size = rows * math.prod(shape)
            # A copy, because the block is used again.
            values = self.link.arena.array(offset, size, np.float32).copy().reshape(rows, *shape)
            offset += 4 * size
            if head in PER_TOKEN:
                columns.append(np.split(values, np.cumsum(counts)[:-1]))
            else:
                columns.append(list(values))
        results: list[Row] = list(zip(*columns, strict=True))
        return StreamResult(results, done.pack_info)


class EngineLink:
    """An engine as this front sees it."""

    def __init__(self, end: socket.socket, arena: Arena, loop: asyncio.AbstractEventLoop) -> None:
        end.setblocking(False)
        self.socket = end
        self.arena = arena
        self.loop = loop
        self.alive = True
        self.tokens = 0  # of requests under way
        self.waiting_tokens = 0.0  # in the engine's queue when it last replied
        self.rate = 0.0  # tokens per second when it last replied
        self.last_reply = -math.inf  # `time.monotonic` of the last results
        self._requests: dict[int, FrontRequest] = {}
        self._numbers = count(1)
        self._records = Records()
        self._unsent = bytearray()
        self._watches_writable = False
        loop.add_reader(end, self._on_readable)

    def start(
        self,
        description: ModelDescription,
        jobs: Sequence[InferenceJob],
        ticket: Ticket | None = None,
    ) -> FrontRequest:
        """Send the sequences of jobs, which all need the same heads, to the engine."""
        sequences = [sequence for job in jobs for sequence in job.sequences]
        heads = jobs[0].heads
        only = jobs[0].only
        lengths = np.array([len(sequence) for sequence in sequences], np.int32)
        ids = np.concatenate([sequence.ids for sequence in sequences], dtype=np.int32)
        counts = lengths  # rows of a per-token head
        if only is not None:  # as many as tokens with this id
            counts = np.add.reduceat(ids == only, np.cumsum(lengths) - lengths, dtype=int)
        n = len(sequences)
        tokens = len(ids)
        # Two int32 and a flag per sequence, an int32 and a type per token; then to a cache line.
        output = -(-(8 * n + 5 * tokens + n) // 64) * 64
        numbers = sum(description.output_size(head, int(counts.sum()), n) for head in heads)
        size = output + 4 * numbers
        if size > self.arena.size:
            raise TooLarge(
                f"the results of this request would take {numbers * 4 >> 20} MiB, more than the "
                f"{self.arena.size >> 20} MiB there are; send fewer inputs at once"
            )
        offset = self.arena.allocate(size)
        if offset is None:
            raise Overloaded("the memory for requests under way is full; try again in a moment")
        data = self.arena.array(offset, 2 * n + tokens, np.int32)
        data[:n] = lengths
        # Of a sequence either is 0, so that one number has both.
        data[n : 2 * n] = [s.prompt_length or -s.key_length for s in sequences]
        data[2 * n :] = ids
        rest = self.arena.array(offset + data.nbytes, tokens + n, np.uint8)
        np.concatenate([sequence.types for sequence in sequences], out=rest[:tokens])
        rest[tokens:] = [
            index == 0  # an input begins with the first sequence of its job
            for job in jobs
            for index in range(len(job.sequences))
        ]
        number = next(self._numbers)
        run = Run(
            number,
            description.place,
            -1 if only is None else only,
            n,
            tokens,
            offset,
            offset + output,
            offset + size,
            ",".join(heads),
            ticket or NO_TICKET,
        )
        shapes = [(head, list(description.outputs[head])) for head in heads]
        finished: asyncio.Future[StreamResult] = self.loop.create_future()
        request = FrontRequest(finished, self, number, run, size, shapes, lengths, counts)
        self._requests[number] = request
        self.tokens += tokens
        self._send(run.pack())
        return request

    def cancel(self, request: FrontRequest) -> None:
        """Tell the engine that nobody waits for a request any more."""
        if request.number in self._requests and self.alive:
            self._send(pack_cancel(request.number))

    def close(self) -> None:
        """Fail what is under way: the engine is gone."""
        if not self.alive:
            return
        self.alive = False
        self.loop.remove_reader(self.socket)
        self.loop.remove_writer(self.socket)
        self.socket.close()
        requests = list(self._requests.values())
        self._requests.clear()
        for request in requests:
            if not request.finished.done():
                request.finished.set_exception(RunnerStopped(ENGINE_LOST))

    def _on_readable(self) -> None:
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self.close()
        try:
            for kind, body in self._records.feed(data):
                if kind == DONE:
                    self._on_done(Done.unpack(body))
                elif kind == FAILED:
                    self._on_failed(body)
        except Exception:
            logs.LOGGER.exception("a reply of an engine cannot be read; its requests fail")
            self.close()

    def _on_done(self, done: Done) -> None:
        self.waiting_tokens = done.waiting_tokens
        self.rate = done.rate
        self.last_reply = time.monotonic()
        request = self._requests.pop(done.request)
        if request.size > MAX_INLINE_BYTES and not request.finished.done():
            copying = self.loop.run_in_executor(None, request.result, done)
            copying.add_done_callback(partial(self._on_result, request))
            return
        if not request.finished.done():
            request.finished.set_result(request.result(done))
        self._free(request)

    def _on_result(self, request: FrontRequest, copying: asyncio.Future[StreamResult]) -> None:
        """Called when a thread has copied the results of a request."""
        error = copying.exception()
        if not request.finished.done():
            if error is None:
                request.finished.set_result(copying.result())
            else:
                request.finished.set_exception(error)
        self._free(request)

    def _on_failed(self, body: bytes) -> None:
        number, error, self.waiting_tokens, self.rate = unpack_failed(body)
        request = self._requests.pop(number)
        if not request.finished.done():
            request.finished.set_exception(error)
        self._free(request)

    def _free(self, request: FrontRequest) -> None:
        self.tokens -= request.run.tokens
        self.arena.release(request.run.offset, request.size)

    def _send(self, record: bytes) -> None:
        """Send a record, together with others of this turn of the event loop.

        To send wakes the engine's process, which costs more than all else here.
        """
        if not self._unsent:
            self.loop.call_soon(self._on_writable)
        self._unsent += record

    def _on_writable(self) -> None:
        if not self.alive:
            return
        try:
            sent = self.socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            return self.close()
        del self._unsent[:sent]
        if self._unsent and not self._watches_writable:
            self._watches_writable = True
            self.loop.add_writer(self.socket, self._on_writable)
        elif not self._unsent and self._watches_writable:
            self._watches_writable = False
            self.loop.remove_writer(self.socket)


class EnginePool:
    """All engines; a request goes to the one with the least to do."""

    def __init__(self) -> None:
        self._links: dict[int, EngineLink] = {}  # by the engine's number

    def add(self, number: int, link: EngineLink) -> None:
        """Use an engine from now on; it replaces the one of this number, which is gone."""
        if number in self._links:
            self._links[number].close()
        self._links[number] = link

    @property
    def links(self) -> list[EngineLink]:
        """The engines that run."""
        return [link for link in self._links.values() if link.alive]

    def least_busy(self) -> EngineLink:
        """Return the engine with the fewest tokens under way from here; raise if there is none."""
        if not self.links:
            raise RunnerStopped(NO_ENGINE)
        return min(self.links, key=lambda link: link.tokens)


class FrontRunner:
    """Takes the place of a `PackRunner` in a front, whose models run in engines."""

    def __init__(self, description: ModelDescription, encoder: Encoder, pool: EnginePool) -> None:
        self.description = description
        self.encoder = encoder
        self.pool = pool
        self.shape = PackedShape(**description.shape)
        self.max_waiting_requests = description.max_waiting_requests
        self.max_waiting_tokens = description.max_waiting_tokens

    def prepare(
        self,
        texts: Sequence[TaskInput],
        task: str = "embed",
        *,
        share: Share | None = None,
        **options: Any,
    ) -> list[InferenceJob]:
        """Tokenize; how many requests do so at once is limited by the guard."""
        return self.encoder.prepare(task, texts, **options)

    def start(self, jobs: Sequence[InferenceJob], ticket: Ticket | None = None) -> FrontRequest:
        """Send jobs, which all need the same heads, to an engine."""
        return self.pool.least_busy().start(self.description, jobs, ticket)

    def submit(self, text: TaskInput, task: str = "embed") -> Future[None]:
        """Run the probe of /ready."""
        return asyncio.run_coroutine_threadsafe(self._probe(text, task), asyncio.get_running_loop())

    async def _probe(self, text: TaskInput, task: str) -> None:
        # An engine whose queue is full has replied, and is busy with requests of other fronts.
        with suppress(Overloaded):
            await self.start(self.encoder.prepare(task, [text])).finished

    @property
    def alive(self) -> bool:
        """Whether an engine runs."""
        return bool(self.pool.links)

    @property
    def waiting_tokens(self) -> float:
        """Tokens in the queues of all engines when they last replied."""
        return sum(link.waiting_tokens for link in self.pool.links)

    def rate(self) -> float:
        """Return the tokens per second of all engines when they last replied."""
        return sum(link.rate for link in self.pool.links)

    def seconds_until_run(self) -> float:
        """Return in how many seconds what waits in all engines will have run; 0: unknown."""
        rate = self.rate()
        return self.waiting_tokens / rate if rate else 0.0

    def idle_seconds(self) -> float:
        """Return the seconds since an engine last replied to this front."""
        return time.monotonic() - max((link.last_reply for link in self.pool.links), default=-1e9)

    def close(self, drain: bool = True) -> None:
        """Do nothing: engines end when the supervisor says so."""


class SupervisorClient:
    """The supervisor as a front sees it: links to new engines, figures of other processes."""

    def __init__(self, control: Control, pool: EnginePool) -> None:
        self.control = control
        self.pool = pool
        self.server: DrainingServer | None = None
        self._numbers = count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self) -> None:
        """Handle messages from now on, on the event loop that runs."""
        asyncio.get_running_loop().add_reader(self.control.socket, self._on_message)

    async def engines(self, batches: int) -> list[dict[str, Any]]:
        """Return what the page shows of every engine."""
        return [engine for part in await self._ask("engines", batches=batches) for engine in part]

    async def metrics(self) -> bytes:
        """Return the metrics of all processes."""
        return merged_page(await self._ask("metrics"))

    async def open(self, name: str, source: str) -> None:
        """Have the engines open a model, and all fronts serve it; see `admin.ModelChanger`."""
        await self._change(action="open", name=name, source=source)

    async def remove(self, name: str) -> None:
        """Have all fronts serve a model no more."""
        await self._change(action="remove", name=name)

    async def _change(self, **change: str) -> None:
        """Ask for a change, which ends when this front and all others have made it."""
        result = await self._ask("change", seconds=None, change=change)
        if "error" in result:
            raise rebuild_error(result["error"], result["message"])

    async def _ask(
        self, subject: str, seconds: float | None = ASK_SECONDS + 1, **options: Any
    ) -> Any:
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            self.control.send({"kind": "ask", "id": number, "what": subject, **options})
            async with asyncio.timeout(seconds):
                return await reply
        except (OSError, TimeoutError) as error:
            raise RunnerStopped("the other processes of the server did not reply") from error
        finally:
            del self._replies[number]

    def _on_message(self) -> None:
        received = self.control.receive()
        if received is None:  # the supervisor is gone, and the engines end with it
            asyncio.get_running_loop().remove_reader(self.control.socket)
            if self.server is not None:
                self.server.begin_draining()
            return
        message, descriptors = received
        if message["kind"] == "link":
            self.add_link(message["engine"], descriptors, message["ran"])
        elif message["kind"] == "reply":
            reply = self._replies.get(message["id"])
            if reply is not None and not reply.done():
                reply.set_result(message["value"])
        elif message["kind"] == "ask" and self.server is not None:
            if message["what"] == "ready":
                self._spawn(self._check_ready(message["id"]))
            elif message["what"] == "serve":
                self._spawn(self._serve(message["id"], message["models"]))
            else:
                value = families_to_json(self.server.guard.metrics.requests_only())
                self._reply(message["id"], value)
        elif message["kind"] == "keys" and self.server is not None:
            self.server.guard.use_keys(message["keys"])
        elif message["kind"] == "stop" and self.server is not None:
            self.server.begin_draining()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, number: int, descriptions: list[dict[str, Any]]) -> None:
        """Serve these models from now on; tell when no request uses those that are gone."""
        served = cast(DrainingServer, self.server).models
        kept = {_place(model): model for model in served}
        models: list[ServedModel] = []
        for fields in descriptions:
            description = ModelDescription(**fields)
            model = kept.pop(description.place, None)
            if model is None:  # in a thread, because a tokenizer takes its time
                model = await asyncio.to_thread(open_model, description, self.pool)
            models.append(model)
        served.serve(models)
        self._reply(number, READY)
        for place, model in kept.items():
            weakref.finalize(model, self._on_unused, place).atexit = False

    def _on_unused(self, place: int) -> None:
        """Called on any thread when no request uses a model any more that was removed."""
        with suppress(OSError):
            self.control.send({"kind": "unused", "place": place})

    async def _check_ready(self, number: int) -> None:
        """Reply to the supervisor whether requests can be answered."""
        server = cast(DrainingServer, self.server)
        try:
            if server.guard.draining:
                raise RunnerStopped("this front is shutting down")
            await server.models.check_ready(server.guard.settings.ready_seconds)
            value = READY
        except PackhorseError as error:
            value = str(error)
        self._reply(number, value)

    def _reply(self, number: int, value: Any) -> None:
        with suppress(OSError):  # a supervisor that does not read has no use for it
            self.control.send({"kind": "reply", "id": number, "value": value})

    def add_link(self, engine: int, descriptors: Sequence[int], ran: float) -> None:
        """Use an engine, by the socket and the shared memory that the supervisor sent.

        `ran` is when it opened its models, which ends with a batch (`time.monotonic`, the same in
        all processes).
        """
        end = socket.socket(fileno=descriptors[0])
        link = EngineLink(end, Arena(descriptors[1]), asyncio.get_running_loop())
        link.last_reply = ran
        self.pool.add(engine, link)


def _place(model: ServedModel) -> int:
    return cast(FrontRunner, model.dispatcher).description.place


class FairSocket(socket.socket):
    """A listening socket that returns one connection each time that the event loop looks at it.

    asyncio accepts all connections that wait in one go, so that the first front to wake up would
    get all clients that connect at the same time, and the other fronts none.
    """

    has_accepted = False

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; at every second call there is none."""
        self.has_accepted = not self.has_accepted
        if not self.has_accepted:
            raise BlockingIOError
        try:
            return super().accept()
        except OSError:  # another front was faster
            self.has_accepted = False
            raise


def open_models(descriptions: Sequence[ModelDescription], pool: EnginePool) -> ServedModels:
    """Return the models of the engines, as the application takes them."""
    return ServedModels([open_model(description, pool) for description in descriptions])


def open_model(description: ModelDescription, pool: EnginePool) -> ServedModel:
    """Return a model of the engines, as the application takes it."""
    encoder = description.encoder()
    encoder.tokenizer.encode(["the first text builds what the others use"])
    runner = FrontRunner(description, encoder, pool)
    return ServedModel(
        description.name,
        description.source,
        encoder,
        cast(Any, runner),
        runner,
        Fingerprint(**description.fingerprint),
        description.opened,
    )


def divide_limits(settings: ServeSettings, fronts: int) -> ServeSettings:
    """Return the settings with one front's share of the limits that are per process."""
    return replace(
        settings,
        max_concurrent_requests=math.ceil(settings.max_concurrent_requests / fronts),
        max_connections=math.ceil(settings.max_connections / fronts),
        max_buffered_bytes=max(
            settings.max_body_bytes, math.ceil(settings.max_buffered_bytes / fronts)
        ),
    )


def main(control: Control) -> int:
    """Serve on the socket that the supervisor passes, until it says stop."""
    gc.collect()
    gc.freeze()  # the code: there is time for it while engines open their models
    received = control.receive()
    if received is None:
        return 0
    message, (listening,) = received
    settings = ServeSettings.from_json(message["settings"])
    logs.set_up(settings)
    sys.setswitchinterval(TURN_SECONDS)
    limits = divide_limits(settings, message["fronts"])
    raise_file_limit(limits)
    token_ids.load_table(settings.token_ids)
    pool = EnginePool()
    supervisor = SupervisorClient(control, pool)
    descriptions = [ModelDescription(**model) for model in message["models"]]
    models = open_models(descriptions, pool)
    app = create(settings, models, supervisor)
    outer, guard = guarded(app, limits)
    gc.collect()
    gc.freeze()
    certificate = tls.Certificate.of(settings)
    server = DrainingServer(
        configuration(outer, limits, settings.max_connections, certificate),
        guard,
        models,
        lambda: control.send({"kind": "ready"}),
        ends_with_engine=False,
        rpc=open_rpc(app, guard, share_port=True),
    )
    supervisor.server = server

    async def serve() -> None:
        supervisor.listen()
        while not pool.links:  # the only engine is being replaced
            if guard.draining:
                return
            await asyncio.sleep(0.01)
        await server.serve(sockets=[FairSocket(fileno=listening)])

    with open_telemetry(settings) as telemetry:
        guard.telemetry = telemetry
        asyncio.run(serve())
    return 1 if server.unfinished else 0
