"""A Redis server behind TLS, with a user and a password. TLS ends in front of the server, as the bundled one is built without."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from headrace.errors import UserError
from headrace.identity import AUTHORITIES, CHAIN, KEY
from headrace.reorder_service.store.state import StateStore
from headrace.reorder_service.store.store_url import is_in_the_clear
from tests.papers import make_cluster_papers
from tests.redis_server import RedisServer, make_store_user


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Files of a certificate of 127.0.0.1, which is its own CA, and of its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "store")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "store.crt", folder / "store.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    return paths


@contextlib.asynccontextmanager
async def tls_in_front(port: int, certificate: Path, key: Path, clients: Path | None = None) -> AsyncIterator[int]:
    """A port that speaks TLS, and passes on to another one what it is told. `clients`: their authority, if they are asked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if clients is not None:
        context.load_verify_locations(clients)
        context.verify_mode = ssl.CERT_REQUIRED

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_a_store_is_reached_over_tls_by_a_user_with_a_password(server: RedisServer, tmp_path: Path) -> None:
    with redis.Redis.from_url(server.url) as client:
        make_store_user(server.url, "p%ss")
        client.execute_command("ACL", "SETUSER", "default", "off")
    certificate, key = make_certificate(tmp_path)
    async with tls_in_front(server.port, certificate, key) as port:
        address, ca = f"127.0.0.1:{port}/0", f"ssl_ca_certs={certificate}"
        store = await StateStore.open(f"rediss://headrace:p%25ss@{address}?{ca}")
        await store.database.lead("test")
        await store.create_job("job", "{}")
        assert await store.jobs() == ["job"]
        await store.close()
        user, refuses = "rediss://headrace:p%25ss", "^the Redis server at .* refuses the user or the password .*: write them into"
        for url, reason in (
            (f"{user}@{address}", "^the certificate of .* is not trusted .*: name .* by [?]ssl_ca_certs=FILE"),
            (f"rediss://headrace:mistaken@{address}?{ca}", refuses),
            (f"rediss://{address}?{ca}", refuses),
            (f"{user}@{address}?ssl_ca_certs={tmp_path}/none", "^a file that .*/none names cannot be read .*: correct"),
            (f"redis://headrace:p%25ss@{address}", "^no Redis server answers at .*needs no TLS, for which rediss:// stands"),
            (f"{user}@127.0.0.1:{server.port}/0?{ca}", "^no Redis server answers at .*speaks TLS"),
        ):
            with pytest.raises(UserError, match=reason) as caught:
                await StateStore.open(url)
            assert "\n" not in str(caught.value)
            assert "p%25ss" not in str(caught.value)
            assert "mistaken" not in str(caught.value)


async def test_papers_of_headrace_certs_are_enough_for_a_store_that_asks_for_certificates(
    server: RedisServer, tmp_path: Path
) -> None:
    papers = make_cluster_papers(tmp_path, store_hosts=["127.0.0.1"])
    shown = papers / "store"
    async with tls_in_front(server.port, shown / CHAIN, shown / KEY, shown / AUTHORITIES) as port:
        own = papers / "reorder"
        trusting = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={own / AUTHORITIES}"
        store = await StateStore.open(f"{trusting}&ssl_certfile={own / CHAIN}&ssl_keyfile={own / KEY}")
        assert await store.jobs() == []
        await store.close()
        with pytest.raises(UserError, match=r"asks for no certificate, which [?]ssl_certfile=FILE&ssl_keyfile=FILE"):
            await StateStore.open(trusting)


async def test_a_process_of_the_cluster_is_not_taken_for_the_store(server: RedisServer, tmp_path: Path) -> None:
    papers = make_cluster_papers(tmp_path, store_hosts=["127.0.0.1"])
    shown, own = papers / "preprocessor", papers / "reorder"
    async with tls_in_front(server.port, shown / CHAIN, shown / KEY) as port:
        with pytest.raises(UserError, match=r"^the certificate of .* is not trusted"):
            await StateStore.open(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={own / AUTHORITIES}")


async def test_a_user_who_may_not_read_the_store_is_told_the_rights(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "narrow", "on", ">secret", "~other:*", "+@all")
    with pytest.raises(UserError, match=r"forbids its user what a store needs .*: give the user ~headrace:\* "):
        await StateStore.open(f"redis://narrow:secret@127.0.0.1:{server.port}/0")


@pytest.mark.parametrize(
    ("url", "in_the_clear"),
    [
        ("redis://127.0.0.1:6379/0", False),
        ("redis://localhost", False),
        ("redis://[::1]:6379", False),
        ("redis://[::1]/0", False),
        ("redis://headrace:p%40ss@10.0.0.1:6379/0", True),
        ("redis://store.example.org", True),
        ("rediss://store.example.org:6380/0", False),
        ("sentinel://127.0.0.1:26379,127.0.0.1:26380/name/0", False),
        ("sentinel://:secret@127.0.0.1:26379,10.0.0.2:26379/name/0", True),
        ("embedded:store", False),
    ],
)
def test_what_leaves_the_machine_without_tls_is_known(url: str, in_the_clear: bool) -> None:
    assert is_in_the_clear(url) is in_the_clear


async def test_a_store_beyond_loopback_without_tls_is_warned_of(
    server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def found(host: str, *rest: object, **more: object) -> object:
        return real("127.0.0.1" if host == "store" else host, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    store = await StateStore.open(f"redis://store:{server.port}/0")
    await store.close()
    (line,) = [line for line in caplog.messages if "not encrypted" in line]
    assert f"store=redis://store:{server.port}/0 remedy=" in line
    caplog.clear()
    await (await StateStore.open(server.url)).close()
    assert not [line for line in caplog.messages if "not encrypted" in line]
