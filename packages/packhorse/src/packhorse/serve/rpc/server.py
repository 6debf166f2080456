"""The gRPC server: the life of a call, from its metadata to its status.

A call is an HTTP/2 request, and gets the ASGI scope that it would have: so the functions behind the
HTTP routes run it unchanged, and keys, limits, metrics and log are the guard's (`Guard.run_call`).

Every method is registered as a stream in both directions, because gRPC's Python server would wait
without limit for the message of a call with a single one. On the wire there is no difference. The
messages of a stream run together, `MAX_STREAM_MESSAGES` of them at a time, so that they share
batches; their answers come in their order, and the first that fails ends the stream.

Errors have the codes of text-embeddings-inference: INVALID_ARGUMENT for what the client has to
change, FAILED_PRECONDITION for what the model cannot do, RESOURCE_EXHAUSTED for a full queue,
UNAVAILABLE while the server ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from fastapi import FastAPI
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection, reflection_pb2
from starlette.requests import Request

from packhorse.errors import InputError, PackhorseError
from packhorse.serve import logs
from packhorse.serve.app import failure_of
from packhorse.serve.failures import ClientGone, Failure, TooLarge
from packhorse.serve.guard import CLIENT_GONE, Guard, Refused
from packhorse.serve.metrics import RequestRecord
from packhorse.serve.rpc.descriptors import read_interface
from packhorse.serve.rpc.methods import METHODS, Method, RpcCall
from packhorse.serve.settings import ServeSettings
from packhorse.serve.tracing import CURRENT, read_ids

# Enough to fill batches on a CPU; a stream never has more than these in the queue, so that one
# client cannot take all of it.
MAX_STREAM_MESSAGES = 64
MAX_REFLECTING = 16  # calls that ask about the interface at once
HEALTH = "grpc.health.v1.Health"
HEALTH_SERVING = 1
HEALTH_NOT_SERVING = 2
# What each service needs of a model to be healthy; Info and Tokenize need nothing.
SERVICE_TASKS = {"tei.v1.Embed": "embed", "tei.v1.Predict": "classify", "tei.v1.Rerank": "rerank"}
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    424: grpc.StatusCode.FAILED_PRECONDITION,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
}
SHUTTING_DOWN = Failure(503, "the server is shutting down", {"retry-after": "1"})


@dataclass(frozen=True, slots=True)
class RpcRoute:
    """The path of a method, as metrics and log name it."""

    path: str


class RpcServer:
    """Serves `tei.proto`, gRPC's health checks and reflection over the models of an application."""

    def __init__(self, app: FastAPI, guard: Guard, share_port: bool = False) -> None:
        """`share_port`: other processes listen on the same port and share its connections."""
        self.app = app
        self.guard = guard
        self.settings: ServeSettings = app.state.settings
        self.share_port = share_port
        self.interface = read_interface("tei.proto", "health.proto")
        self._server: Any = None
        self._draining: asyncio.Future[None] | None = None
        self._reflection: Any = None
        self._reflecting = 0  # calls that ask about the interface

    async def start(self) -> None:
        """Listen on `settings.grpc_port`; raises `InputError` if that is not possible."""
        self._draining = asyncio.get_running_loop().create_future()
        limits = self.guard.settings
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", int(self.share_port)),
                ("grpc.max_receive_message_length", limits.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", limits.max_header_bytes),
                ("grpc.absolute_max_metadata_size", limits.max_header_bytes),
                ("grpc.max_concurrent_streams", limits.max_concurrent_requests),
                ("grpc.max_allowed_incoming_connections", limits.max_connections),
                ("grpc.server_handshake_timeout_ms", round(1e3 * limits.receive_seconds)),
                ("grpc.max_connection_idle_ms", round(1e3 * limits.idle_seconds)),
            ]
        )
        for name, service in self.interface.services.items():
            handlers: dict[str, Any] = {}
            for method in service.methods:
                handler = self._health if name == HEALTH else partial(self._handle, method)
                # Without serializers: messages are parsed here, where an error has its answer.
                handlers[method.name] = grpc.stream_stream_rpc_method_handler(_coroutine(handler))
            generic = grpc.method_handlers_generic_handler(name, handlers)
            self._server.add_generic_rpc_handlers((generic,))
        names = (*self.interface.services, reflection.SERVICE_NAME)
        self._reflection = reflection.ReflectionServicer(names, self.interface.pool)
        handler = grpc.stream_stream_rpc_method_handler(_coroutine(self._reflect))
        generic = grpc.method_handlers_generic_handler(
            reflection.SERVICE_NAME, {"ServerReflectionInfo": handler}
        )
        self._server.add_generic_rpc_handlers((generic,))
        host = f"[{limits.host}]" if ":" in limits.host else limits.host
        address = f"{host}:{limits.grpc_port}"
        try:
            if limits.tls_cert:
                self._server.add_secure_port(address, _credentials(limits))
            else:
                self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise InputError(f"cannot listen on {address} for gRPC: {error}") from error
        await self._server.start()
        logs.LOGGER.info("serving gRPC on %s", address)

    def begin_draining(self) -> None:
        """End streams as soon as what they have sent is answered; the guard refuses new calls."""
        if self._draining is not None and not self._draining.done():
            self._draining.set_result(None)

    async def stop(self) -> None:
        """Close all connections; calls that still run are cancelled."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None  # gRPC's thread ends with the last server of the process

    # Calls -------------------------------------------------------------------------------------

    async def _handle(self, method: Any, context: Any) -> None:
        """Answer one call and report it to metrics and log, however it ends."""
        path = f"/{method.containing_service.full_name}/{method.name}"
        headers = [
            (key.encode(), value if isinstance(value, bytes) else value.encode())
            for key, value in context.invocation_metadata()
        ]
        record = RequestRecord(ids=read_ids(headers))
        if (seconds := context.time_remaining()) is not None:
            record.deadline = time.monotonic() + seconds
        scope = {
            "type": "http",
            "http_version": "2",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": headers,
            "route": RpcRoute(path),
            "app": self.app,
            "packhorse": record,
        }
        request = Request(scope, _never)
        current = CURRENT.set(record.ids)  # for the log
        status = CLIENT_GONE  # unless something else ends the call, it was cancelled
        try:
            status = await self._answer(request, method, context)
        except asyncio.CancelledError:
            record.error = ClientGone.__name__
            raise
        finally:
            self.guard.report(scope, record, status)
            CURRENT.reset(current)

    async def _answer(self, request: Request, method: Any, context: Any) -> int:
        """Answer a call, or end it with the code of its error; return the HTTP status of that."""
        record: RequestRecord = request.scope["packhorse"]
        call = RpcCall(
            request, self.app.state.models, self.settings, self.interface.messages, headers={}
        )
        name = f"{method.containing_service.name}/{method.name}"
        session = _Session(self, call, method, METHODS[name], context)
        try:
            await self.guard.run_call(request.scope, session.receive_first, session.answer)
            context.set_trailing_metadata(_packhorse_headers(record))
            return 200
        except Refused as error:
            failure = error.failure
            record.error = record.error or str(failure.status)
        except PackhorseError as error:
            failure = failure_of(request, error)
            record.error = type(error).__name__
        except Exception as error:
            failure = Failure(500, "internal server error")
            record.error = type(error).__name__
            logs.LOGGER.error("a call failed in the server", exc_info=True)
        # Not `context.abort`, which would wait until a client that reads nothing has read this.
        context.set_code(CODES.get(failure.status, grpc.StatusCode.INTERNAL))
        context.set_details(failure.message)
        retry = [(key, value) for key, value in failure.headers.items() if key == "retry-after"]
        context.set_trailing_metadata((*retry, *_packhorse_headers(record)))
        return failure.status

    async def read(self, context: Any, seconds: float) -> bytes | None:
        """Return the next message of a client, or None after its last one.

        Raises `Refused` if none comes in time, or if the server begins to shut down.
        """
        reading = asyncio.ensure_future(context.read())
        waiting = {reading, self._draining} if self._draining else {reading}
        try:
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                message = reading.result()
                return message if isinstance(message, bytes) else None  # gRPC's EOF
        except grpc.aio.UsageError as error:  # the call has ended
            raise ClientGone("the client left while it sent its request") from error
        finally:
            reading.cancel()
        if self._draining and self._draining.done():
            raise Refused(SHUTTING_DOWN)
        raise Refused(Failure(408, f"no message arrived within {seconds:g} seconds"))

    # Health ------------------------------------------------------------------------------------

    async def _health(self, context: Any) -> None:
        """Answer a health check; it needs no key and is answered under any load."""
        body = None
        try:
            async with asyncio.timeout(self.guard.settings.receive_seconds):
                body = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no message arrived in time")
        message = self.interface.messages["grpc.health.v1.HealthCheckRequest"]()
        try:
            message.ParseFromString(body if isinstance(body, bytes) else b"")
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message cannot be read")
        if message.service and message.service not in self.interface.services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        models = self.app.state.models
        task = SERVICE_TASKS.get(message.service)
        is_able = task is None or task in models.tasks
        is_healthy = is_able and models.alive and not self.guard.draining
        response = self.interface.messages["grpc.health.v1.HealthCheckResponse"](
            status=HEALTH_SERVING if is_healthy else HEALTH_NOT_SERVING
        )
        await context.write(response.SerializeToString())

    # Reflection --------------------------------------------------------------------------------

    async def _reflect(self, context: Any) -> None:
        """Answer questions about the interface; that needs no key.

        Not by the servicer's own asynchronous form, which waits for questions without limit.
        """
        if self._reflecting == MAX_REFLECTING:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many ask; try again later")
        self._reflecting += 1
        try:
            while True:
                async with asyncio.timeout(self.guard.settings.receive_seconds):
                    body = await context.read()
                if not isinstance(body, bytes):
                    return
                question = reflection_pb2.ServerReflectionRequest.FromString(body)
                (answer,) = self._reflection.ServerReflectionInfo(iter([question]), context)
                async with asyncio.timeout(self.guard.settings.send_seconds):
                    await context.write(answer.SerializeToString())
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no question arrived in time")
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message cannot be read")
        finally:
            self._reflecting -= 1


class _Session:
    """The messages of one call, and its answers."""

    def __init__(
        self, server: RpcServer, call: RpcCall, method: Any, run: Method, context: Any
    ) -> None:
        self.server = server
        self.call = call
        self.method = method
        self.run = run
        self.context = context
        self.record: RequestRecord = call.request.scope["packhorse"]
        self.limits = server.guard.settings
        self.has_begun = False  # an answer, and with it the initial metadata, was sent
        self.is_empty = False  # a stream that ended before its first message
        self.held = 0  # bytes of messages after the first; the guard counts that one
        self.request_class = call.messages[method.input_type.full_name]

    async def receive_first(self) -> bytes:
        body = await self.server.read(self.context, self.limits.receive_seconds)
        if body is None and not self.method.client_streaming:
            raise InputError("the call ended without a message")
        self.is_empty = body is None
        return body or b""

    async def answer(self, first: bytes) -> None:
        try:
            if not self.method.client_streaming:
                await self.write(await self.run(self.call, self.parse(first)))
            elif self.method.server_streaming:
                await self.answer_stream(first)
            else:
                messages = await self.collect(first)
                await self.write(await self.run(self.call, messages))
        finally:
            self.release(self.held)

    def hold(self, size: int) -> None:
        """Count the bytes of a message among all that the server holds."""
        guard = self.server.guard
        if not guard.bytes.has_room(self.record.share, size):
            raise Refused(guard.overloaded("too many bytes are being received"))
        guard.bytes.take(self.record.share, size)
        self.held += size

    def release(self, size: int) -> None:
        self.server.guard.bytes.give_back(self.record.share, size)
        self.held -= size

    async def messages(self, first: bytes) -> AsyncIterator[bytes]:
        """All messages of a stream; time is limited between any two."""
        body = None if self.is_empty else first
        while body is not None:
            yield body
            body = await self.server.read(self.context, self.limits.idle_seconds)
            if body is not None:
                self.check_key()
                self.hold(len(body))

    def check_key(self) -> None:
        """End a stream whose key is no longer one of the server's."""
        if self.record.api_key is not None and self.record.api_key not in self.server.guard.keys:
            raise Refused(Failure(401, "the API key is no longer valid"))

    async def collect(self, first: bytes) -> list[Any]:
        """Return all messages of a stream, within the limits of a single request."""
        messages: list[Any] = []
        size = 0
        async for body in self.messages(first):
            size += len(body)
            if size > self.limits.max_body_bytes:
                raise TooLarge(f"the stream has more than {self.limits.max_body_bytes} bytes")
            if len(messages) == self.limits.max_batch_inputs:
                raise TooLarge(
                    f"the stream has more than {self.limits.max_batch_inputs} texts to rank"
                )
            messages.append(self.parse(body))
        return messages

    async def answer_stream(self, first: bytes) -> None:
        """Answer each message of a stream, several at a time and in their order."""
        answers: asyncio.Queue[asyncio.Future[Any] | None] = asyncio.Queue(MAX_STREAM_MESSAGES)
        tasks: set[asyncio.Future[Any]] = set()

        def on_answer(size: int, task: asyncio.Future[Any]) -> None:
            tasks.discard(task)
            self.release(size)
            if not task.cancelled():
                task.exception()  # so that asyncio logs no error behind the one that is reported

        async def read_messages() -> None:
            try:
                async for body in self.messages(first):
                    task = asyncio.ensure_future(self.run(self.call, self.parse(body)))
                    tasks.add(task)
                    task.add_done_callback(partial(on_answer, 0 if body is first else len(body)))
                    await answers.put(task)
            except Exception as error:
                failed = asyncio.get_running_loop().create_future()
                failed.set_exception(error)
                failed.exception()  # as above
                await answers.put(failed)
            else:
                await answers.put(None)

        reader = asyncio.ensure_future(read_messages())
        try:
            while (answer := await answers.get()) is not None:
                await self.write(await answer)
        finally:
            for task in (reader, *tasks):
                task.cancel()
            await asyncio.gather(reader, *tasks, return_exceptions=True)

    async def write(self, message: Any) -> None:
        """Send an answer; before the first one, the headers that its method has set."""
        try:
            if not self.has_begun:
                await self.context.send_initial_metadata(tuple(self.call.headers.items()))
                self.has_begun = True
            async with asyncio.timeout(self.limits.send_seconds):
                await self.context.write(message.SerializeToString())
        except TimeoutError as error:
            raise ClientGone("the client did not read its answer") from error

    def parse(self, body: bytes) -> Any:
        message = self.request_class()
        try:
            message.ParseFromString(body)
        except DecodeError as error:
            raise InputError("the message is not one of this method") from error
        return message


def _credentials(settings: ServeSettings) -> grpc.ServerCredentials:
    """Return the certificate that HTTP has too; `tls.Certificate` has checked its files."""
    key = Path(settings.tls_key).read_bytes()
    return grpc.ssl_server_credentials([(key, Path(settings.tls_cert).read_bytes())])


def _coroutine(handler: Any) -> Any:
    """Return a coroutine function, which gRPC recognizes; it does not recognize partials."""

    async def handle(messages: Any, context: Any) -> None:
        await handler(context)

    return handle


async def _never() -> dict[str, Any]:
    """Wait for ever: gRPC cancels the task of a call whose client leaves."""
    await asyncio.get_running_loop().create_future()
    return {"type": "http.disconnect"}


def _packhorse_headers(record: RequestRecord) -> Sequence[tuple[str, str]]:
    headers = [
        ("x-packhorse-pack", record.pack),
        ("x-packhorse-fingerprint", record.fingerprint),
        ("x-packhorse-truncated", str(record.truncated or "")),
        ("x-request-id", record.ids.request),
        ("traceparent", record.ids.traceparent),
    ]
    return [(key, value) for key, value in headers if value]
