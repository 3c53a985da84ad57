"""A development authority and the papers that it makes for a cluster's processes (headrace.identity)."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from headrace.errors import UserError
from headrace.identity import AUTHORITIES, CHAIN, CLIENT, KEY, PREPROCESSOR, REORDER, TRAINER

AUTHORITY, AUTHORITY_KEY = "ca.crt", "ca.key"
FOLDERS = {"reorder": REORDER, "preprocessor": PREPROCESSOR, "trainer": TRAINER, "client": CLIENT}
"""The folders that are made, and the DNS name in the certificate of each."""
STORE_FOLDER, STORE = "store", "store.headrace"
"""The folder of a Redis server's papers, which is made where its hosts are named, and a DNS name in its certificate."""
SERVERS = (REORDER, PREPROCESSOR, STORE)

AUTHORITY_LIFE = timedelta(days=3650)
USED = 2 / 3  # of a certificate's life: what has used more of it is made anew
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
SKEW = timedelta(hours=1)  # by which certificates are valid before they are made, for machines whose clocks are slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A folder of papers, as `make_papers` leaves it."""

    folder: Path
    until: datetime
    """When its certificate expires, in UTC."""
    is_new: bool
    """Whether the certificate was made now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """A certificate authority: its certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def new(cls, now: datetime, life: timedelta = AUTHORITY_LIFE) -> Self:
        key = ec.generate_private_key(ec.SECP256R1())
        name = _named("Headrace development authority")
        certificate = (
            _certificate(name, name, key.public_key(), now, now + life)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate=certificate, key=key)

    def certify(self, name: str, now: datetime, life: timedelta, hosts: Sequence[str] = ()) -> tuple[bytes, bytes]:
        """Return (certificate, unencrypted key) in PEM for a process of DNS name `name`.

        It is valid for `life`, but no longer than the authority, and for servers as such too. `hosts`: further names and
        addresses, of a server whose clients ask for the host that they connect to.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        until = min(now + life, self.certificate.not_valid_after_utc)
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if name in SERVERS else [])]
        certificate = (
            _certificate(self.certificate.subject, _named(name), key.public_key(), now, until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName([_general_name(one) for one in (name, *hosts)]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key)

    def has_made(self, certificate: x509.Certificate) -> bool:
        """Return whether the certificate bears this authority's signature."""
        try:
            certificate.verify_directly_issued_by(self.certificate)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True


def open_authority(folder: Path, now: datetime) -> tuple[Authority, bool]:
    """Return the authority in `folder`, and whether it was made now, which it is where there is none.

    Raises UserError if the files cannot be read or written, are no authority, or have expired.
    """
    certificate_path, key_path = folder / AUTHORITY, folder / AUTHORITY_KEY
    if not certificate_path.exists() and not key_path.exists():
        made = Authority.new(now)
        with _told(folder):
            _write(key_path, _key_pem(made.key), 0o600, is_new=True)
            _write(certificate_path, made.certificate.public_bytes(serialization.Encoding.PEM), 0o644, is_new=True)
        return made, True
    try:
        certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as err:
        raise UserError(
            f"{folder} has no whole authority ({err}): put its {AUTHORITY} and its unencrypted {AUTHORITY_KEY} back, or move the "
            "folder away for a new one, which no process trusts before it has its certificate"
        ) from err
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise UserError(f"{key_path} is not the elliptic-curve key of {certificate_path}: put two there that were made together")
    if certificate.not_valid_after_utc <= now:
        raise UserError(
            f"the authority in {folder} expired at {certificate.not_valid_after_utc:%Y-%m-%d}: move the folder away for a new "
            "one, and give every process the papers that are made then"
        )
    return Authority(certificate=certificate, key=key), False


def make_papers(
    folder: Path, days: int, *, now: datetime | None = None, renew: bool = False, store_hosts: Sequence[str] = ()
) -> Iterator[Made]:
    """Yield the authority in `folder`/authority, and the papers of each of FOLDERS, made where they are missing or used up.

    Used up are those of another authority, and those that have lived for more than USED of their life; with `renew`, all of them.
    `days`: how long new ones are valid. `now`: None: the clock's. Files are replaced whole, each on its own. `store_hosts`: for
    which the papers of a Redis server are made, too; none: those in its papers, if it has some.

    Raises UserError if a file cannot be read or written, or a host is none, and as `open_authority`.
    """
    for host in store_hosts:
        _general_name(host)
    now = datetime.now(UTC) if now is None else now
    authority, is_new = open_authority(folder / "authority", now)
    yield Made(folder=folder / "authority", until=authority.certificate.not_valid_after_utc, is_new=is_new)
    hosts = [*store_hosts] or _hosts(folder / STORE_FOLDER)
    for name, dns_name in (FOLDERS | ({STORE_FOLDER: STORE} if hosts else {})).items():
        papers, further = folder / name, hosts if name == STORE_FOLDER else []
        until = None if renew else _still_good(papers, {dns_name, *further}, authority, now)
        if until is None:
            chain, key = authority.certify(dns_name, now, timedelta(days=days), further)
            with _told(papers):
                _write(papers / AUTHORITIES, authority.certificate.public_bytes(serialization.Encoding.PEM), 0o644)
                _write(papers / KEY, key, 0o600)
                _write(papers / CHAIN, chain, 0o644)
            made = x509.load_pem_x509_certificate(chain).not_valid_after_utc
            yield Made(folder=papers, until=made, is_new=True)
        else:
            yield Made(folder=papers, until=until, is_new=False)


def _still_good(papers: Path, names: set[str], authority: Authority, now: datetime) -> datetime | None:
    """Return until when papers are valid; None where they must be made anew."""
    if not all((papers / name).is_file() for name in (AUTHORITIES, CHAIN, KEY)):
        return None
    try:
        certificate = x509.load_pem_x509_certificate((papers / CHAIN).read_bytes())
        key = serialization.load_pem_private_key((papers / KEY).read_bytes(), None)
        certified = set(_names(certificate))
    except (OSError, ValueError, TypeError, x509.ExtensionNotFound):
        return None
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    is_whole = key.public_key() == certificate.public_key() and names <= certified
    return end if is_whole and authority.has_made(certificate) and now <= begin + USED * (end - begin) else None


def _hosts(papers: Path) -> list[str]:
    """Return the hosts in a Redis server's papers; none where there are no papers."""
    try:
        certificate = x509.load_pem_x509_certificate((papers / CHAIN).read_bytes())
        return [name for name in _names(certificate) if name != STORE]
    except (OSError, ValueError, x509.ExtensionNotFound):
        return []


def _names(certificate: x509.Certificate) -> list[str]:
    """Return the DNS names and addresses that a certificate is for. Raises ExtensionNotFound where it tells none."""
    return [str(name.value) for name in certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value]


def _general_name(host: str) -> x509.GeneralName:
    """Return what stands for a host in a certificate. Raises UserError if it is neither a name nor an address."""
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    if not _HOST.fullmatch(host):
        raise UserError(f"--store-host must be a host's name or address without a port, such as redis.example.org, got {host!r}")
    return x509.DNSName(host)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _certificate(
    issuer: x509.Name, subject: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), now - SKEW, until)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def _write(path: Path, content: bytes, mode: int, *, is_new: bool = False) -> None:
    """Write a file whole, in place of another or, with `is_new`, only where there is none. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            os.link(made, path)
        else:
            os.replace(made, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made)


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise UserError(f"cannot write {err.filename2 or err.filename or folder}: {err.strerror}; name another folder") from err
