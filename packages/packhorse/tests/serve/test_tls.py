"""HTTPS by flag: real clients, protocol versions, endless handshakes, another certificate."""

from __future__ import annotations

import datetime
import ipaddress
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import packhorse
from packhorse.errors import InputError
from packhorse.serve import tls
from packhorse.serve.settings import ServeSettings
from packhorse.serve.tls import Certificate

from .processes.test_processes import wait_for
from .test_metrics_port import free_port

grpc = pytest.importorskip("grpc")
x509 = pytest.importorskip("cryptography.x509")
TEXTS = ["w1 w2 w3", "w4"]


def write_certificate(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    """A self-signed certificate of this name, and its key."""
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "cert.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].touch(0o600)
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths


def encrypt(key: Path, target: Path) -> Path:
    """The same key with a passphrase."""
    from cryptography.hazmat.primitives import serialization

    plain = serialization.load_pem_private_key(key.read_bytes(), None)
    target.touch(0o600)
    target.write_bytes(
        plain.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"sesame"),
        )
    )
    return target


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    return write_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module", params=["one", pytest.param("fronts", marks=pytest.mark.slow)])
def server(request, start, files) -> Iterator[Any]:
    fronts = [] if request.param == "one" else ["--fronts", "2"]
    if fronts and not hasattr(os, "memfd_create"):
        pytest.skip("fronts share memory by memfd, which is Linux's")
    certificate, key = map(str, files)
    words = ["--tls-cert", certificate, "--tls-key", key, "--device", "cpu"]
    words += ["--receive-seconds", "2", "--max-connections", "60"]
    grpc_port = free_port()
    process = start(*words, *fronts, "--grpc-port", str(grpc_port)).wait_until_ready()
    process.grpc_port = grpc_port
    return process


def trusting(files: tuple[Path, Path]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=files[0])


def test_clients_are_answered(server, files, checkpoint_folder) -> None:
    url = f"https://localhost:{server.port}"
    with httpx.Client(base_url=url, verify=trusting(files), timeout=60) as client:
        vectors = client.post("/embed", json={"inputs": TEXTS}).json()
        expected = packhorse.load(checkpoint_folder, device="cpu").embed(TEXTS)
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
        long = client.post("/embed_all", json={"inputs": TEXTS * 500})  # many TLS records
        assert long.status_code == 200 and len(long.json()) == 1000
        assert client.get("/health", headers={"x": "y" * 9000}).status_code == 431
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):  # the control
        httpx.get(url, timeout=60, verify=ssl.create_default_context())
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    words = [curl, "-sS", "--cacert", str(files[0]), f"{url}/health"]
    assert '"ok"' in subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_grpc_has_it_too(server, files) -> None:
    address = f"localhost:{server.grpc_port}"
    credentials = grpc.ssl_channel_credentials(files[0].read_bytes())
    with (
        grpc.secure_channel(address, credentials) as secured,
        grpc.insecure_channel(address) as plain,
    ):
        check = secured.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=60, wait_for_ready=True) == b"\x08\x01"  # SERVING
        with pytest.raises(grpc.RpcError):
            plain.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_old_protocols_and_plain_http_are_refused(server, files) -> None:
    context = trusting(files)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # else this client would refuse old ones itself
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    for version in (ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context.maximum_version = version
        with socket.create_connection(("127.0.0.1", server.port), 60) as plain:
            if version < ssl.TLSVersion.TLSv1_2:
                with pytest.raises(ssl.SSLError):
                    context.wrap_socket(plain, server_hostname="localhost")
                continue
            with context.wrap_socket(plain, server_hostname="localhost") as secured:
                assert secured.version() == version.name.replace("_", ".")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{server.port}/health", timeout=60)


def closed(connection: socket.socket) -> bool:
    """Whether the server closes the connection, within a minute."""
    connection.settimeout(60)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_handshakes_that_never_end_are_bounded_in_time_and_number(server, files) -> None:
    # The first bytes of a handshake message of 512 bytes, and then nothing.
    begun = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    address = ("127.0.0.1", server.port)
    held = [socket.create_connection(address, 60) for _ in range(150)]
    try:
        for connection in held[::2]:
            with suppress(OSError):  # closed already
                connection.sendall(begun)
        assert all(map(closed, held))
    finally:
        for connection in held:
            connection.close()
    url = f"https://localhost:{server.port}/health"

    def answers() -> bool:
        try:
            return httpx.get(url, verify=trusting(files), timeout=60).status_code == 200
        except httpx.TransportError:
            return False

    wait_for(answers)


def test_requests_sent_with_the_end_of_the_handshake_are_answered(server, files) -> None:
    """A client may send its request in the packet that ends the handshake."""
    incoming = ssl.MemoryBIO()
    outgoing = ssl.MemoryBIO()
    secured = trusting(files).wrap_bio(incoming, outgoing, server_hostname="localhost")
    with socket.create_connection(("127.0.0.1", server.port), 60) as plain:
        while True:
            try:
                secured.do_handshake()
                break
            except ssl.SSLWantReadError:
                plain.sendall(outgoing.read())
                incoming.write(plain.recv(65536))
        secured.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        plain.sendall(outgoing.read())  # `Finished` and the request
        answer = b""
        until = time.monotonic() + 60
        while b'"ok"' not in answer and time.monotonic() < until:
            incoming.write(plain.recv(65536))
            with suppress(ssl.SSLWantReadError):
                while part := secured.read(65536):  # one record at most
                    answer += part
    assert answer.startswith(b"HTTP/1.1 200")


def test_files_that_cannot_be_used(files, tmp_path) -> None:
    certificate, key = files
    _, other_key = write_certificate(tmp_path)
    Certificate(certificate, key)
    with pytest.raises(InputError, match="no certificate with its key"):
        Certificate(certificate, other_key)
    with pytest.raises(InputError, match="is encrypted"):
        Certificate(certificate, encrypt(key, tmp_path / "encrypted.pem"))
    with pytest.raises(InputError, match="cannot be read"):
        Certificate(certificate, tmp_path / "none.pem")
    with pytest.raises(InputError, match="no certificate with its key"):
        Certificate(tmp_path / "none.pem", key)
    other_key.chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        Certificate(tmp_path / "cert.pem", other_key)
    with pytest.raises(InputError, match="belong together"):
        ServeSettings(tls_cert=str(certificate))


def test_a_new_certificate_is_taken_and_a_broken_one_is_not(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tls, "LOOK_SECONDS", 0.0)
    certificate, key = write_certificate(tmp_path, "first.example")
    current = Certificate(certificate, key)
    first = current.context()
    assert current.context() is first
    certificate.write_text("nothing")
    assert current.context() is first
    certificate.unlink()
    assert current.context() is first
    write_certificate(tmp_path, "second.example")
    second = current.context()
    assert second is not first and current.context() is second
