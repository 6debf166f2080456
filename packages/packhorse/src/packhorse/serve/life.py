"""The server's life: bind, load, serve, drain, leave.

The port is bound before the models are loaded, so that a port that is taken is told at once, and
listened on after it: who can connect is answered. SIGTERM while loading ends the process at once,
for there is nothing to lose. Later it drains: /health says 503, new requests get 503, those in
flight are finished, and the process exits with 0. A second signal ends it without waiting.

When an engine dies (the device is lost) everything is 503 for a few seconds, so that whoever
watches sees it, and then the process exits with 70: only a new process gets a new device context.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI

from packhorse.errors import InputError, PackhorseError
from packhorse.serve import cl100k, hosting, logs
from packhorse.serve.app import create, guarded
from packhorse.serve.connections import protocol, sweep
from packhorse.serve.guard import Guard
from packhorse.serve.hosting import Hosts
from packhorse.serve.settings import Settings

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LOOK_SECONDS = 0.1
SEEN_DEAD_SECONDS = 3.0  # between the death of an engine and the end of the process
CUT_SHORT, KILLED = 1, 143
OTHER_FILES = 256  # beside connections: what libraries open
Ready = Callable[[str, int, Hosts], None]  # host, port, models
House = Callable[[Settings], AbstractContextManager[tuple[FastAPI, Hosts]]]


class EngineDied(PackhorseError):
    """An engine ended by itself; the process has to be started again."""

    exit_code = 70


class CutShort(PackhorseError):
    """Requests were still being answered when the time to drain was over."""

    exit_code = CUT_SHORT


@contextmanager
def here(settings: Settings) -> Iterator[tuple[FastAPI, Hosts]]:
    """The application with its models in this process; it closes them itself."""
    cl100k.table(settings.token_ids)  # one that is missing is told before models are loaded
    hosts = hosting.open(settings)
    yield create(settings, hosts), hosts


def run(settings: Settings, ready: Ready, house: House = here) -> None:
    """Serve until a signal comes; `ready` is called when requests are answered."""
    logs.set_up(settings)
    make_room(settings)
    bound = _bind(settings)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with house(settings) as (app, hosts):
        outer, guard = guarded(app)
        gc.collect()
        gc.freeze()  # what lives as long as the process is looked at no more
        tell = partial(_tell, ready, bound, hosts)
        server = Server(_configuration(outer, settings), guard, hosts, tell)
        server.run(sockets=[bound])
    if server.died:
        raise EngineDied("the engine died; see the log above, and start the server again")
    if guard.in_flight:
        seconds = settings.drain_seconds
        raise CutShort(f"{guard.in_flight} requests were cut short after {seconds:g} s")


def make_room(settings: Settings) -> None:
    """Let the process have as many files as connections are allowed.

    Most systems start one with room for a thousand, and let it ask for more. Beyond that a
    connection would neither be taken nor closed: it waits, as does everyone behind it.
    """
    wanted = settings.max_connections + OTHER_FILES
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now != resource.RLIM_INFINITY and now < wanted:
        now = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (now, most))
        if now < wanted:
            message = "only %d files may be open, too few for --max-connections %d: see ulimit -n"
            logs.LOGGER.warning(message, now, settings.max_connections)


def _bind(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((settings.host, settings.port))
    except OSError as error:
        bound.close()
        place = f"{settings.host}:{settings.port}"
        raise InputError(f"cannot listen on {place}: {error.strerror or error}") from error
    return bound


def _tell(ready: Ready, bound: socket.socket, hosts: Hosts) -> None:
    host, port, *_ = bound.getsockname()
    for each in hosts:
        tasks = ", ".join(each.tasks)
        logs.LOGGER.info("%s on %s can be asked for: %s", each.name, each.encoder.device, tasks)
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    logs.LOGGER.info("serving on http://%s", place, extra={"facts": {"host": host, "port": port}})
    ready(host, port, hosts)


def _configuration(app: Any, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol(settings),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=min(settings.max_connections, 2048),
        timeout_keep_alive=math.ceil(settings.idle_seconds),
        timeout_graceful_shutdown=1,  # of its own, after ours
    )


class Server(uvicorn.Server):
    """uvicorn with our way to leave."""

    def __init__(
        self, config: uvicorn.Config, guard: Guard, hosts: Hosts, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.guard, self.hosts, self.ready = guard, hosts, ready
        self.died = False
        self._tasks: list[asyncio.Task[None]] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours, from `startup` on; uvicorn would die of the one it has drained for."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._asked_to_leave)
        self._tasks += [
            loop.create_task(sweep(self.server_state.connections)),
            loop.create_task(self._watch()),
        ]
        self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections and end the engines."""
        for task in self._tasks:
            task.cancel()
        await super().shutdown(sockets)

    def _asked_to_leave(self) -> None:
        if self.guard.draining:
            os._exit(KILLED)
        self.guard.draining = True
        logs.LOGGER.info("draining: %d requests in flight", self.guard.in_flight)
        self._tasks.append(asyncio.get_running_loop().create_task(self._drain()))

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self.guard.settings.drain_seconds
        while self.guard.in_flight and loop.time() < until:
            await asyncio.sleep(LOOK_SECONDS)
        self.should_exit = True

    async def _watch(self) -> None:
        """An engine that died does not come back."""
        while self.hosts.alive:
            await asyncio.sleep(LOOK_SECONDS)
        logs.LOGGER.critical("an engine died; the server leaves in %.0f s", SEEN_DEAD_SECONDS)
        self.died = True
        await asyncio.sleep(SEEN_DEAD_SECONDS)
        self.should_exit = True
