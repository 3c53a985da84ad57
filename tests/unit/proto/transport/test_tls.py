"""TLS: both ports of a preprocessor, and a sentence for whatever does not fit."""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import logging
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from headrace.cli.main import main
from headrace.cli.run import preprocessor
from headrace.errors import EndpointError, UnavailableError, UserError
from headrace.transport.tls import load_ca, load_certificate, tls_mismatch

MIB = 1 << 20
TODAY = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
Key = ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """A CA that certifies hosts."""

    folder: Path
    name: str
    key: Key
    certificate: x509.Certificate

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.pem"

    def certify(self, host: str = "127.0.0.1") -> tuple[Path, Path]:
        """Files of a certificate for `host`, an address, and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
        certificate = make_certificate(host, key, self.name, self.key, names)
        chain_path, key_path = self.folder / f"{self.name}-{host}.crt", self.folder / f"{self.name}-{host}.key"
        chain_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        write_key(key_path, key, serialization.NoEncryption())
        return chain_path, key_path


def make_certificate(name: str, key: Key, issuer: str, issuer_key: Key, extension: x509.ExtensionType) -> x509.Certificate:
    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    return (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(TODAY - datetime.timedelta(days=1000))
        .not_valid_after(TODAY + datetime.timedelta(days=36500))
        .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        .sign(issuer_key, hashes.SHA256())
    )


def write_key(path: Path, key: Key, encryption: serialization.KeySerializationEncryption) -> Path:
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    return path


@pytest.fixture
def make_ca(tmp_path: Path) -> Callable[[str], Authority]:
    """(name) -> a CA."""

    def make(name: str = "ca") -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = make_certificate(name, key, name, key, x509.BasicConstraints(ca=True, path_length=None))
        made = Authority(folder=tmp_path, name=name, key=key, certificate=certificate)
        made.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return made

    return make


# -- a connection -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shared_memory", "flight"])
def test_parts_come_from_a_preprocessor_that_speaks_tls(
    make_producer: Any, make_client: Any, make_batch: Any, make_ca: Any, transport: str
) -> None:
    ca = make_ca()
    producer = make_producer(certificate=load_certificate(*ca.certify()))
    producer.add("part", make_batch(MIB, 7))
    part = make_client(transport, tls_ca=load_ca(ca.path)).fetch(producer.endpoint, "part")
    assert part.delivery.transport == transport
    assert part.batches[0].equals(make_batch(MIB, 7))


def test_no_payload_is_in_the_clear(make_producer: Any, make_client: Any, make_wire: Any, make_batch: Any, make_ca: Any) -> None:
    ca = make_ca()
    producer = make_producer(certificate=load_certificate(*ca.certify()))
    producer.add("part", make_batch(MIB, 7))
    wire = make_wire(producer, flips=bytes([7]) * 100)
    part = make_client("flight", tls_ca=load_ca(ca.path)).fetch(producer.endpoint, "part")
    assert part.batches[0].equals(make_batch(MIB, 7))
    assert wire.num_bytes > MIB
    assert wire.flips, "what it looked for did not come by"


def test_a_client_without_a_ca_is_told_to_name_one(make_producer: Any, make_client: Any, make_ca: Any) -> None:
    producer = make_producer(certificate=load_certificate(*make_ca().certify()))
    with pytest.raises(
        EndpointError, match=f"^{producer.endpoint} speaks TLS only: name the CA of its certificate with --tls-ca"
    ):
        make_client("flight").fetch(producer.endpoint, "part")


def test_a_client_with_a_ca_is_told_that_the_preprocessor_speaks_no_tls(
    make_producer: Any, make_client: Any, make_ca: Any
) -> None:
    producer = make_producer()
    with pytest.raises(EndpointError, match=f"^{producer.endpoint} speaks no TLS: start it with --tls-cert and --tls-key"):
        make_client("flight", tls_ca=load_ca(make_ca().path)).fetch(producer.endpoint, "part")


def test_a_certificate_of_another_ca_does_not_pass(make_producer: Any, make_client: Any, make_ca: Any) -> None:
    producer = make_producer(certificate=load_certificate(*make_ca("ours").certify()))
    with pytest.raises(EndpointError, match=f"^the certificate of {producer.endpoint} does not pass with the CA"):
        make_client("flight", tls_ca=load_ca(make_ca("theirs").path)).fetch(producer.endpoint, "part")


def test_a_certificate_of_another_host_does_not_pass(make_producer: Any, make_client: Any, make_ca: Any) -> None:
    ca = make_ca()
    producer = make_producer(certificate=load_certificate(*ca.certify("192.0.2.1")))
    with pytest.raises(EndpointError, match=r"does not pass .*: IP address mismatch"):
        make_client("flight", tls_ca=load_ca(ca.path)).fetch(producer.endpoint, "part")


def test_who_does_not_answer_at_all_is_unavailable_with_tls_and_without(make_client: Any, make_ca: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        for ca in (None, load_ca(make_ca().path)):
            with pytest.raises(UnavailableError):
                make_client("flight", tls_ca=ca).fetch(endpoint, "part")
            assert tls_mismatch(endpoint, ca) == ""


def test_who_resets_connections_is_not_taken_for_one_that_speaks_tls(make_ca: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between connecting and the handshake, of which there is none then."""
    trusted = load_ca(make_ca().path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connect = socket.create_connection

        def connect_and_be_reset(*args: Any, **options: Any) -> socket.socket:
            connection = connect(*args, **options)
            with listener.accept()[0] as far:
                far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                far.shutdown(socket.SHUT_WR)
            return connection

        monkeypatch.setattr(socket, "create_connection", connect_and_be_reset)
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        assert tls_mismatch(endpoint, None) == tls_mismatch(endpoint, trusted) == ""


# -- health -----------------------------------------------------------------------------------------------------------


def test_health_is_told_over_tls_to_who_names_the_ca(
    make_producer: Any, make_ca: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ca = make_ca()
    producer = make_producer(certificate=load_certificate(*ca.certify()))
    assert main(["health", producer.endpoint, "--tls-ca", str(ca.path)]) == 0
    producer.stop()
    assert main(["health", producer.endpoint, "--tls-ca", str(ca.path)]) == 1
    assert capsys.readouterr() == ("serving\nnot serving\n", "")


def test_health_that_tls_keeps_back_is_a_sentence_not_an_answer(
    make_producer: Any, make_ca: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = make_ca("ours"), make_ca("theirs")
    secret, plain = make_producer(certificate=load_certificate(*ours.certify())), make_producer()
    for arguments, sentence in [
        ([secret.endpoint], f"{secret.endpoint} speaks TLS only: name the CA of its certificate with --tls-ca"),
        ([secret.endpoint, "--tls-ca", str(theirs.path)], f"the certificate of {secret.endpoint} does not pass with the CA"),
        ([plain.endpoint, "--tls-ca", str(ours.path)], f"{plain.endpoint} speaks no TLS: start it with --tls-cert and --tls-key"),
        ([plain.endpoint, "--tls-ca", str(tmp_path / "missing")], f"--tls-ca {tmp_path / 'missing'} cannot be read"),
    ]:
        assert main(["health", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"headrace health: {sentence}")
        assert err.count("\n") == 1


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_key_stays_out_of_logs(make_ca: Any, caplog: pytest.LogCaptureFixture) -> None:
    certificate = load_certificate(*make_ca().certify())
    with caplog.at_level(logging.DEBUG):
        logging.getLogger(__name__).info("%s", certificate)
    assert "PRIVATE" not in caplog.text


def test_files_that_do_not_fit_are_told_in_a_sentence(make_ca: Any, tmp_path: Path) -> None:
    ca, other, missing = make_ca(), make_ca("other"), tmp_path / "missing"
    chain, key = ca.certify()
    _, other_key = other.certify()
    locked = write_key(tmp_path / "locked", ca.key, serialization.BestAvailableEncryption(b"secret"))
    words = tmp_path / "words"
    words.write_text("no certificate")
    for arguments, sentence in [
        ((missing, key), f"--tls-cert {missing} cannot be read"),
        ((chain, missing), f"--tls-key {missing} cannot be read"),
        ((chain, tmp_path), f"--tls-key {tmp_path} cannot be read"),
        ((chain, other_key), f"--tls-key {other_key} is not the key of --tls-cert {chain}"),
        ((key, chain), "are not a certificate and its unencrypted key in PEM"),
        ((words, key), "are not a certificate and its unencrypted key in PEM"),
        ((chain, locked), "are not a certificate and its unencrypted key in PEM"),
    ]:
        with pytest.raises(UserError, match=f"^(?=.*{sentence})[^\n]*$"):
            load_certificate(*arguments)
    for path, sentence in [(missing, "cannot be read"), (words, "has no certificate in PEM"), (key, "has no certificate in PEM")]:
        with pytest.raises(UserError, match=f"^--tls-ca {path} {sentence}"):
            load_ca(path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tls-cert", "/missing"], "--tls-cert and --tls-key go together"),
        (["--tls-key", "/missing"], "--tls-cert and --tls-key go together"),
        (["--tls-cert", "/missing", "--tls-key", "/missing"], "--tls-cert /missing cannot be read"),
        (["--flight-port", "70000"], "--flight-port must be a port, 0 to 65535, got 70000"),
    ],
)
def test_the_command_checks_its_options_before_it_waits_for_anybody(arguments: list[str], sentence: str) -> None:
    parser = argparse.ArgumentParser()
    preprocessor.add_arguments(parser)
    with pytest.raises(UserError, match=sentence):
        preprocessor.run(parser.parse_args(arguments))
