"""The supervisor: starts fronts and engines, connects them, replaces those that die.

It opens no model and reads no request of clients, so that what kills a front or an engine does not
kill it. It alone serves --metrics-port, so that the state of the server is known when fronts die.
Signals reach it alone, because the others run in sessions of their own: it tells the fronts to
drain and then the engines to stop. If it is killed itself, the others see their control sockets
closed and end. It imports neither torch nor the web framework, which the others wait for: what
serves --metrics-port is imported while they start.

A process that keeps dying soon after its start is not replaced for ever: after `MAX_QUICK_DEATHS`
in a row the server ends, so that whoever watches it sees it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from packhorse import processor
from packhorse.errors import CheckpointError, PackhorseError, RunnerStopped
from packhorse.serve import logs
from packhorse.serve.keys import KeyReloader
from packhorse.serve.metrics import families_to_json, merge_counters
from packhorse.serve.processes import arena
from packhorse.serve.processes.gpus import finds_gpu
from packhorse.serve.processes.messages import READY, Control, rebuild_error
from packhorse.serve.settings import ServeSettings
from packhorse.serve.starting import (
    EXIT_SECOND_SIGNAL,
    SIGNALS,
    CutShort,
    EngineDied,
    Ready,
    StartedModel,
    bind,
    bind_ports,
    check_files,
    report_ready,
)

if TYPE_CHECKING:
    from packhorse.serve.processes.side_port import MetricsPort

ARENA_BYTES = 256 << 20  # per front and engine; pages take memory only while they are in use
MAX_FRONTS = 8  # by default
CORES_PER_FRONT = 2  # by default: fronts take half of the cores, the rest is the engine's
MAX_QUICK_DEATHS = 3
QUICK_SECONDS = 30.0
ASK_SECONDS = 2.0  # for the figures of all processes
OPEN_SECONDS = 3600.0  # for an engine to open a model, which may have to be fetched first
SERVE_SECONDS = 60.0  # for a front to serve another model
STOP_SECONDS = 10.0  # for an engine to stop, and for a front beyond its time to drain


@dataclass(eq=False)
class ChildProcess:
    """A front or an engine."""

    kind: Literal["front", "engine"]
    number: int
    process: asyncio.subprocess.Process
    control: Control
    ready_since: float = 0.0  # `time.monotonic`
    # The first message of an engine (its models, or why it has none) and of a front (ready).
    first_message: asyncio.Future[dict[str, Any]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    metrics: list[Any] = field(default_factory=list)  # the last that it reported

    def __str__(self) -> str:
        return f"{self.kind} {self.number} (process {self.process.pid})"


def count_fronts(settings: ServeSettings) -> int:
    """Return how many fronts to start; 0: one process does everything.

    A CPU computes with all cores, and a front would only take some of them away; so does a machine
    with few cores beside its GPU.
    """
    if settings.fronts is not None:
        return settings.fronts
    if not hasattr(os, "memfd_create"):
        return 0
    if len(settings.devices) > 1:
        return len(settings.devices)
    cores = processor.usable_cores()
    if cores < 2 * CORES_PER_FRONT:
        return 0
    name = settings.devices[0] if settings.devices else settings.device
    if not finds_gpu(name):
        from packhorse import device  # takes seconds, which one process for everything needs anyway

        if device.choose_device(name or None).type == "cpu":
            return 0
    return min(MAX_FRONTS, cores // CORES_PER_FRONT)


def run(settings: ServeSettings, ready: Ready, fronts: int) -> None:
    """Serve with this many fronts until a signal arrives; `ready` is called once they answer."""
    logs.set_up(settings)
    check_files(settings)
    bound, side_bound = bind_ports(settings)
    if settings.grpc_port:
        # Fronts share this port by SO_REUSEPORT, with which two servers could take the same one.
        bind(settings, settings.grpc_port).close()
    asyncio.run(Supervisor(settings, bound, ready, fronts, side_bound).run())


class Supervisor:
    """All processes of a server."""

    def __init__(
        self,
        settings: ServeSettings,
        bound: socket.socket,
        ready: Ready,
        fronts: int,
        side_bound: socket.socket | None = None,
    ) -> None:
        """Prepare; `bound` is the socket for clients, `side_bound` that of --metrics-port."""
        self.settings = settings
        self.bound = bound
        self.side_bound = side_bound
        self.side_port: MetricsPort | None = None
        self.ready = ready
        self.devices = settings.devices or (settings.device,)
        self.front_count = fronts
        self.children: set[ChildProcess] = set()  # all that run, also those still starting
        self.engines: dict[int, ChildProcess] = {}  # ready, by number
        self.fronts: dict[int, ChildProcess] = {}
        self.models: list[dict[str, Any]] = []
        # The numbers of fronts with requests under way on a model that was removed, by its place.
        self.users: dict[int, set[int]] = {}
        self._first_places = range(len(settings.model) + len(settings.adapter))
        self._places = count(len(self._first_places))  # of the next models
        self._change = asyncio.Lock()  # held while models are changed
        self.retired: list[Any] = []  # the last metrics of fronts that are gone, added up
        self.has_started = False  # requests are answered
        self.stopping = False
        self.failure: PackhorseError | None = None
        self.ended = asyncio.Event()
        self._quick_deaths: dict[tuple[str, int], int] = {}  # in a row
        self._numbers = count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until a signal arrives, or until processes keep dying."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        kept = self.settings.keys[self.settings.file_keys :]
        KeyReloader(self.settings.api_key_file, kept, self._use_keys).listen(loop)
        async with AsyncExitStack() as stack:  # the second port answers until all is drained
            try:
                starting = loop.create_task(self._start_all())
                stopped = loop.create_task(self.ended.wait())
                # A signal while models are being loaded ends the server at once: nothing is lost.
                await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
                if starting.done():
                    starting.result()
                    if self.side_bound is not None:
                        from packhorse.serve.processes.side_port import MetricsPort

                        self.side_port = MetricsPort(self)
                        await self.side_port.open(stack, self.side_bound)
                    started = [
                        StartedModel(model["name"], model["tasks"], model["device"])
                        for model in self.models
                    ]
                    report_ready(self.ready, self.settings, self.bound, started)
                    for engine in self.engines.values():
                        self._tell(engine, {"kind": "prepare"})
                    self.has_started = True
                    await stopped
                starting.cancel()
            finally:
                self.stopping = True
                if self.side_port is not None:
                    self.side_port.begin_draining()
                self.bound.close()
                unfinished = await self._stop()
        if self.failure is not None:
            raise self.failure
        if unfinished:
            seconds = self.settings.drain_seconds
            raise CutShort(f"requests were not finished within {seconds:g} s")

    # Starting ----------------------------------------------------------------------------------

    async def _start_all(self) -> None:
        # Fronts import their code while engines open the models.
        logs.LOGGER.info("starting; fronts: %d, engines: %d", self.front_count, len(self.devices))
        fronts = [await self._start("front", i) for i in range(self.front_count)]
        engines = [self._start_engine(i) for i in range(len(self.devices))]
        await asyncio.gather(*engines, self._import_side_port())
        await asyncio.gather(*[self._open_front(front) for front in fronts])

    async def _import_side_port(self) -> None:
        if self.side_bound is not None:
            await asyncio.to_thread(import_module, "packhorse.serve.processes.side_port")

    async def _start_engine(self, number: int) -> None:
        threads = self.settings.threads
        if len(self.devices) > 1:
            threads = threads or max(1, processor.usable_cores() // len(self.devices))
        settings = replace(
            self.settings,
            device=self.devices[number],
            devices=(),
            threads=threads,
            keys=(),
            admin_key="",
        )
        engine = await self._start("engine", number)
        places = [model["place"] for model in self.models] or list(self._first_places)
        start = {
            "settings": asdict(settings),
            "labels": self._labels(number),
            "places": places,
            "served": [(model["name"], model["source"], model["adapter"]) for model in self.models],
        }
        engine.control.send(start)
        message = await engine.first_message
        if message["kind"] == "failed":
            raise rebuild_error(message["error"], message["message"])
        self.models = self.models or message["models"]
        try:
            _check_same(self.models, message["models"])
        except PackhorseError:
            _kill(engine)
            raise
        engine.ready_since = time.monotonic()
        logs.LOGGER.info("%s is ready", engine)
        self.engines[number] = engine
        for front in self.fronts.values():
            self._link(front, engine)
        if self.has_started:
            self._tell(engine, {"kind": "prepare"})

    async def _start_front(self, number: int) -> None:
        await self._open_front(await self._start("front", number))

    async def _open_front(self, front: ChildProcess) -> None:
        start = {
            "settings": asdict(self.settings),
            "models": self.models,
            "fronts": self.front_count,
        }
        with suppress(OSError):  # it is gone, as its first message, which never came, says
            front.control.send(start, [self.bound.fileno()])
        for engine in self.engines.values():
            self._link(front, engine)
        self.fronts[front.number] = front
        await front.first_message
        front.ready_since = time.monotonic()
        logs.LOGGER.info("%s is ready", front)

    async def _start(self, kind: Literal["front", "engine"], number: int) -> ChildProcess:
        control, child_end = Control.pair()
        descriptor = child_end.socket.fileno()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # the folder that the server was started in has no modules for it
                "-m",
                "packhorse.serve.processes",
                kind,
                str(descriptor),
                pass_fds=[descriptor],
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            child_end.close()
        child = ChildProcess(kind, number, process, control)
        self.children.add(child)
        loop = asyncio.get_running_loop()
        loop.add_reader(control.socket, self._on_message, child)
        self._spawn(self._watch(child))
        return child

    def _link(self, front: ChildProcess, engine: ChildProcess) -> None:
        """Connect a front and an engine; where one is gone, its replacement gets a link later."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        memory = arena.create(ARENA_BYTES)
        child = engine
        try:
            engine.control.send({"kind": "link"}, [ends[0].fileno(), memory])
            child = front
            front.control.send(
                {"kind": "link", "engine": engine.number, "ran": engine.ready_since},
                [ends[1].fileno(), memory],
            )
        except OSError:  # it is gone, or has not read its messages for long
            logs.LOGGER.error("%s could not be reached; it is ended", child)
            _kill(child)
        finally:
            os.close(memory)
            for end in ends:
                end.close()

    # Replacing ---------------------------------------------------------------------------------

    async def _watch(self, child: ChildProcess) -> None:
        """Wait for the end of a process, and replace it."""
        code = await child.process.wait()
        self.children.discard(child)
        asyncio.get_running_loop().remove_reader(child.control.socket)
        while self._receive(child):  # the last of it may be why it ended
            pass
        child.control.close()
        if not child.first_message.done():
            child.first_message.set_exception(
                EngineDied(f"{child} ended with {_exit(code)} while it was starting")
            )
            child.first_message.exception()  # somebody may have stopped waiting for it
            return
        if child.kind == "front":
            self._forget_user(child.number)
        group = self.engines if child.kind == "engine" else self.fronts
        if self.stopping or group.get(child.number) is not child:
            return
        del group[child.number]
        if child.kind == "front":
            self.retired = merge_counters([self.retired, child.metrics])
        logs.LOGGER.error("%s ended with %s; it is replaced", child, _exit(code))
        await self._replace(child)

    async def _replace(self, child: ChildProcess) -> None:
        key = (child.kind, child.number)
        quick = time.monotonic() - child.ready_since < QUICK_SECONDS
        self._quick_deaths[key] = self._quick_deaths.get(key, 0) + 1 if quick else 1
        while self._quick_deaths[key] < MAX_QUICK_DEATHS and not self.stopping:
            try:
                start = self._start_engine if child.kind == "engine" else self._start_front
                return await start(child.number)
            except Exception as error:
                logs.LOGGER.error("%s %d did not start: %s", child.kind, child.number, error)
                self._quick_deaths[key] += 1
                await asyncio.sleep(1.0)
        if not self.stopping:
            self.failure = EngineDied(
                f"{child.kind} {child.number} died {MAX_QUICK_DEATHS} times in a row; see the log"
            )
            self.ended.set()

    # Messages ----------------------------------------------------------------------------------

    def _on_message(self, child: ChildProcess) -> None:
        if not self._receive(child):  # its end was closed; `_watch` does the rest
            asyncio.get_running_loop().remove_reader(child.control.socket)

    def _receive(self, child: ChildProcess) -> bool:
        """Handle one message of a process; return whether there was one."""
        received = child.control.receive()
        if received is None:
            return False
        message, _ = received
        if message["kind"] == "ask" and message["what"] == "change":
            self._spawn(self._change_models(child, message))
        elif message["kind"] == "ask":
            self._spawn(self._answer(child, message))
        elif message["kind"] == "unused":
            self._on_unused(message["place"], child.number)
        elif message["kind"] == "reply":
            if (reply := self._replies.get(message["id"])) and not reply.done():
                reply.set_result(message["value"])
        elif not child.first_message.done():
            child.first_message.set_result(message)
        return True

    async def _answer(self, front: ChildProcess, message: dict[str, Any]) -> None:
        """Send the figures that a front asks for."""
        values = await self.collect(message)
        try:
            front.control.send({"kind": "reply", "id": message["id"], "value": values})
        except OSError:
            logs.LOGGER.debug("%s was gone before its figures came", front)

    # Models that come and go -------------------------------------------------------------------

    async def _change_models(self, front: ChildProcess, message: dict[str, Any]) -> None:
        """Make a change that a front asks for, and reply when all fronts have made it."""
        change = message["change"]
        async with self._change:
            try:
                models = [model for model in self.models if model["name"] != change["name"]]
                if change["action"] == "open":
                    models = await self._open_model(change["name"], change["source"])
                await self._serve_models(models)
                value: dict[str, Any] = {}
            except PackhorseError as error:
                value = {"error": type(error).__name__, "message": str(error)}
        with suppress(OSError):  # the front is gone, and with it whoever asked
            front.control.send({"kind": "reply", "id": message["id"], "value": value})

    async def _open_model(self, name: str, source: str) -> list[dict[str, Any]]:
        """Open a model in all engines; return the models with it in its place."""
        place = next(self._places)
        engines = list(self.engines.values())
        if not engines:
            raise RunnerStopped("no engine is running; one is being started")
        request = {"kind": "open", "place": place, "entry": f"{name}={source}"}
        replies = await asyncio.gather(
            *[self._request(engine, request, OPEN_SECONDS) for engine in engines]
        )
        opened: list[dict[str, Any]] = []
        try:
            for reply in replies:
                if reply is None:
                    raise RunnerStopped(f"an engine ended while it opened {name}")
                if "error" in reply:
                    raise rebuild_error(reply["error"], reply["message"])
                opened.append(reply)
                _check_same(opened[:1], [reply])
        except PackhorseError:
            for engine in engines:
                self._tell(engine, {"kind": "close", "place": place})
            raise
        models = {model["name"]: model for model in self.models}
        models[name] = opened[0]
        return list(models.values())

    async def _serve_models(self, models: list[dict[str, Any]]) -> None:
        """Have all processes serve these models; those that are gone are closed when unused."""
        gone = {model["place"] for model in self.models} - {model["place"] for model in models}
        self.models = models
        for engine in self.engines.values():
            places = [model["place"] for model in models]
            self._tell(engine, {"kind": "serve", "places": places})
        fronts = list(self.fronts.values())
        for place in gone:
            self.users[place] = {front.number for front in fronts}
        request = {"kind": "ask", "what": "serve", "models": models}
        await asyncio.gather(*[self._request(front, request, SERVE_SECONDS) for front in fronts])
        if self.side_port is not None:
            self.side_port.show(models)

    async def _request(
        self, child: ChildProcess, message: dict[str, Any], seconds: float
    ) -> Any | None:
        """Return the reply of a process to a message; None if it has ended or takes too long."""
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        ended = asyncio.ensure_future(child.process.wait())
        try:
            child.control.send({**message, "id": number})
            await asyncio.wait([reply, ended], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return reply.result() if reply.done() else None
        except OSError:
            return None
        finally:
            ended.cancel()
            del self._replies[number]

    def _tell(self, child: ChildProcess, message: dict[str, Any]) -> None:
        with suppress(OSError):  # it is gone; its replacement starts with the new models
            child.control.send(message)

    def _forget_user(self, front: int) -> None:
        """A front is gone, and its requests with it."""
        for place in list(self.users):
            self._on_unused(place, front)

    def _on_unused(self, place: int, front: int) -> None:
        """Close a model that was removed once no front has requests under way on it."""
        users = self.users.get(place)
        if users is None:
            return
        users.discard(front)
        if not users:
            del self.users[place]
            for engine in self.engines.values():
                self._tell(engine, {"kind": "close", "place": place})

    async def collect(self, message: dict[str, Any]) -> list[Any]:
        """Return the figures of all processes: "metrics", or "engines" for the page."""
        children = list(self.engines.values())
        if message["what"] == "metrics":
            children += self.fronts.values()
        values = await asyncio.gather(*[self._ask(child, message) for child in children])
        if message["what"] == "metrics":
            values.append(self.retired)
            values += [self._down(i) for i in range(len(self.devices)) if i not in self.engines]
            if self.side_port is not None:
                values.append(families_to_json(self.side_port.requests.requests_only()))
        return values

    async def check_ready(self) -> None:
        """Raise `RunnerStopped` unless a front can reach engines that ran a batch lately."""
        # One that is being started does not reply yet; one that hangs must not keep others waiting.
        fronts = [front for front in self.fronts.values() if front.ready_since]
        replies = [asyncio.ensure_future(self._ask(front, {"what": "ready"})) for front in fronts]
        try:
            for earliest in asyncio.as_completed(replies):
                if await earliest == READY:
                    return
        finally:
            for reply in replies:
                reply.cancel()
        raise RunnerStopped("no front can reach an engine that runs")

    def _down(self, number: int) -> list[Any]:
        """Return the metric of an engine that is being replaced."""
        labels = self._labels(number)
        samples = [["packhorse_up", {"model": model["name"], **labels}, 0] for model in self.models]
        return [["packhorse_up", "1 while the engine runs.", "gauge", samples]]

    def _labels(self, number: int) -> dict[str, str]:
        """Return what tells the metrics of this engine from those of others."""
        return {"engine": str(number)} if len(self.devices) > 1 else {}

    async def _ask(self, child: ChildProcess, message: dict[str, Any]) -> list[Any]:
        """Return the figures of one process; the last known ones if it does not reply."""
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            child.control.send({**message, "kind": "ask", "id": number})
            async with asyncio.timeout(ASK_SECONDS):
                value = await reply
        except (OSError, TimeoutError):
            # A front's counters must not go back; what an engine last said is no longer true.
            is_counted = child.kind == "front" and message["what"] == "metrics"
            return child.metrics if is_counted else []
        finally:
            del self._replies[number]
        if message["what"] == "metrics":
            child.metrics = value
        return value

    def _use_keys(self, keys: tuple[str, ...]) -> None:
        """Give new API keys to all fronts, also to those that will be started."""
        self.settings = replace(self.settings, keys=keys)
        for front in self.fronts.values():
            try:
                front.control.send({"kind": "keys", "keys": keys})
            except OSError:  # it would go on to accept keys that were removed
                logs.LOGGER.error("%s could not be told the new API keys; it is ended", front)
                _kill(front)

    # Stopping ----------------------------------------------------------------------------------

    def _on_signal(self) -> None:
        if self.stopping:
            for child in self.children:
                _kill(child)
            os._exit(EXIT_SECOND_SIGNAL)
        self.stopping = True
        logs.LOGGER.info("draining %d fronts", len(self.fronts))
        self.ended.set()

    async def _stop(self) -> bool:
        """Drain the fronts, then stop the engines; return whether a front had to be cut short."""
        for child in self.children - {*self.fronts.values(), *self.engines.values()}:
            _kill(child)  # it was still starting
        seconds = self.settings.drain_seconds + STOP_SECONDS
        codes = await asyncio.gather(
            *[self._stop_child(front, seconds) for front in self.fronts.values()]
        )
        await asyncio.gather(
            *[self._stop_child(engine, STOP_SECONDS) for engine in self.engines.values()]
        )
        return any(codes)

    async def _stop_child(self, child: ChildProcess, seconds: float) -> int:
        try:
            child.control.send({"kind": "stop"})
            async with asyncio.timeout(seconds):
                return await child.process.wait()
        except (OSError, TimeoutError):
            _kill(child)
            return await child.process.wait()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task; the loop itself would not keep the task alive."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _check_same(served: list[dict[str, Any]], opened: list[dict[str, Any]]) -> None:
    """Raise `CheckpointError` unless an engine's models give the same results as those served.

    Their files may have changed since the first engine was started; fronts would tokenize for the
    old model and report its fingerprint.
    """
    if [model["place"] for model in served] != [model["place"] for model in opened]:
        raise CheckpointError("models were changed while an engine was starting; it starts again")
    for model, engine_model in zip(served, opened, strict=True):
        for part, value in model["fingerprint"].items():
            if engine_model["fingerprint"][part] != value:
                raise CheckpointError(
                    f"{model['name']} is not the same in all engines: its {part} differs; restart "
                    "the server to serve a changed model, and set --dtype for unlike devices"
                )
        if model["outputs"] != engine_model["outputs"]:
            raise CheckpointError(f"{model['name']} has other outputs; restart the server")


def _kill(child: ChildProcess) -> None:
    if child.process.returncode is None:
        child.process.kill()


def _exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"
