"""TLS in front of HTTP: the certificate, and the bounds of a connection during its handshake.

uvicorn hands a connection to our protocol when the handshake has ended, and leaves a client a
minute for it; until then no limit of ours would see the connection. So connections are accepted
without TLS, which begins here: a connection counts from its first moment, and its handshake has as
long as headers have (`receive_seconds`). Afterwards a `BoundedConnection` takes over.

What arrives before the handshake begins would be taken for plain text, so reading has to pause when
a connection is made. asyncio's own event loop respects that, uvloop does not.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from functools import partial
from pathlib import Path
from typing import Any

from packhorse.errors import InputError
from packhorse.serve import logs
from packhorse.serve.connections import BoundedConnection
from packhorse.serve.keys import is_private
from packhorse.serve.settings import ServeSettings

LOOK_SECONDS = 5.0  # at most between a new certificate and the first connection that gets it


class Certificate:
    """The certificate of --tls-cert with its key, as a context for handshakes.

    Certificates are renewed every few weeks, so the files are looked at again as connections come.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        """Read both files; raises `InputError`."""
        self.certificate = certificate
        self.key = key
        self._files = self._look()
        self._looked = time.monotonic()
        self._context = _open_context(certificate, key)

    @classmethod
    def of(cls, settings: ServeSettings) -> Certificate | None:
        """Return the certificate of these settings; None if they name none."""
        if not settings.tls_cert:
            return None
        return cls(Path(settings.tls_cert), Path(settings.tls_key))

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection, of the files as they are now.

        Files that cannot be used, as when one of the two has been written, change nothing.
        """
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            files = self._look()
            if files != self._files:
                self._files = files
                self._reload()
        return self._context

    def _reload(self) -> None:
        try:
            self._context = _open_context(self.certificate, self.key)
        except InputError as error:
            logs.LOGGER.error("the certificate stays as it was: %s", error)
        else:
            logs.LOGGER.info("%s has changed; new connections get it", self.certificate)

    def _look(self) -> list[tuple[int, int] | None]:
        """Return what shows that a file was written or replaced."""
        states: list[tuple[int, int] | None] = []
        for path in (self.certificate, self.key):
            try:
                status = path.stat()
            except OSError:
                states.append(None)
            else:
                states.append((status.st_ino, status.st_mtime_ns))
        return states


def protocol(settings: ServeSettings, certificate: Certificate) -> Any:
    """Return the factory that uvicorn calls for each connection."""
    return partial(TlsConnection, settings, certificate)


class TlsConnection(asyncio.Protocol):
    """A connection until its handshake has ended."""

    transport: Any

    def __init__(self, settings: ServeSettings, certificate: Certificate, **arguments: Any) -> None:
        self.settings = settings
        self.certificate = certificate
        self.arguments = arguments  # of the protocol that follows
        self.connections: set[Any] = arguments["server_state"].connections
        self.task: asyncio.Task[None] | None = None
        self.early = bytearray()  # received before the protocol that follows was there
        self.lost = False

    def connection_made(self, transport: Any) -> None:
        """Begin the handshake; abort if there are too many connections."""
        self.transport = transport
        self.connections.add(self)
        if len(self.connections) > self.settings.max_connections:
            self.connections.discard(self)
            return transport.abort()
        transport.pause_reading()
        self.task = asyncio.get_running_loop().create_task(self._begin())

    def data_received(self, data: bytes) -> None:
        """Keep what came in the same packet as the end of the handshake."""
        self.early += data

    def connection_lost(self, exc: Exception | None) -> None:
        """Called instead of the following protocol's if the client leaves that early."""
        self.lost = True

    def expired(self, now: float) -> bool:
        """Return False: the handshake has a limit of its own."""
        return False

    def shutdown(self) -> None:
        """Called by uvicorn when the server ends."""
        self.transport.abort()

    async def _begin(self) -> None:
        """Do the handshake, then pass the connection on to HTTP."""
        loop = asyncio.get_running_loop()
        try:
            transport = await loop.start_tls(
                self.transport,
                self,
                self.certificate.context(),
                server_side=True,
                ssl_handshake_timeout=self.settings.receive_seconds,
                # It also cuts off what is left of the answer, so it cannot be short.
                ssl_shutdown_timeout=self.settings.send_seconds,
            )
        except (OSError, asyncio.CancelledError) as error:  # ssl.SSLError is an OSError
            logs.LOGGER.debug("a TLS handshake failed: %s", error)
            return self.transport.abort()
        finally:
            self.connections.discard(self)
        if transport is None or self.lost:
            return
        connection = BoundedConnection(self.settings, **self.arguments)
        transport.set_protocol(connection)
        connection.connection_made(transport)
        if self.early:
            connection.data_received(bytes(self.early))


def _open_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a context for servers; raises `InputError` for files that cannot be used."""
    check_key_file(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{certificate} and {key} are no certificate with its key, in PEM: {reason}"
        ) from error
    return context


def check_key_file(key: Path) -> None:
    """Raise `InputError` unless only this user, or root, can read the key."""
    try:
        status = key.stat()
    except OSError as error:
        raise InputError(f"{key} cannot be read: {error.strerror or error}") from error
    if not is_private(status.st_uid, status.st_mode, os.geteuid()):
        raise InputError(
            f"{key} holds a private key and other users can read or change it "
            f"(mode {status.st_mode & 0o777:o}); chmod 600 it and own it"
        )


def _no_password() -> str:
    """Called for an encrypted key: a server must not stop and ask its terminal."""
    raise ValueError("the key is encrypted; remove its passphrase with openssl pkey")
