"""Mutual TLS: the papers by which this process proves what it is, and the authorities whose papers it accepts.

A folder holds a process's papers in three PEM files: AUTHORITIES, CHAIN and KEY, the names that Kubernetes' TLS secrets have. A
server is known by what it is and not by its address: its certificate has the DNS name REORDER or PREPROCESSOR, which its clients
ask for wherever they find it. So no address needs to be in a certificate, and a preprocessor cannot pose as the reorder service.

The folder comes from HEADRACE_TLS, unless a caller names one. The files are looked at for every new connection: renewed papers
need no restart.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from headrace.errors import UserError
from headrace.observability.logs import pairs

if TYPE_CHECKING:
    from cryptography import x509

log = logging.getLogger(__name__)

TLS = "HEADRACE_TLS"
AUTHORITIES, CHAIN, KEY = "ca.crt", "tls.crt", "tls.key"

REORDER, PREPROCESSOR = "reorder.headrace", "preprocessor.headrace"
"""DNS names in the certificates of servers, which their clients check."""
TRAINER, CLIENT = "trainer.headrace", "client.headrace"
"""DNS names in the certificates of processes that only connect."""

_Stamp = tuple[tuple[int, int, int] | None, ...]
"""What changes when one of the files is replaced: (inode, size, modification time in ns) of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Papers:
    """The contents of a folder's files at one time, all in PEM."""

    folder: Path
    authorities: bytes
    chain: bytes
    key: bytes = field(repr=False)
    names: tuple[str, ...]
    """DNS names in the certificate."""
    until: datetime
    """When the certificate expires, in UTC."""

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a gRPC channel that shows this certificate."""
        return grpc.ssl_channel_credentials(self.authorities, self.key, self.chain)

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return the configuration of a gRPC server that shows this certificate."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain)], root_certificates=self.authorities)


def load_papers(folder: Path, now: datetime) -> Papers:
    """Read and check the papers in a folder. `now`: with a time zone.

    Raises UserError if a file cannot be read, the files do not fit together, or the certificate is not valid now.
    """
    from cryptography import x509  # takes a moment, which processes without TLS need not wait for
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    authorities, chain, key = (_read(folder / name) for name in (AUTHORITIES, CHAIN, KEY))
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=authorities.decode("ascii"))
    except (ssl.SSLError, ValueError) as err:
        raise UserError(f"{folder / AUTHORITIES} has no certificate in PEM: put that of the cluster's authority there") from err
    try:  # what was read, not the files, which may be replaced meanwhile
        certificate = x509.load_pem_x509_certificates(chain)[0]
        names = _names(certificate)
        own_key = serialization.load_pem_private_key(key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.DuplicateExtension) as err:
        raise UserError(
            f"{folder / CHAIN} and {folder / KEY} are not a certificate and its unencrypted key in PEM: make them with "
            "`headrace certs`, or have your authority make them"
        ) from err
    if own_key.public_key() != certificate.public_key():
        raise UserError(f"{folder / KEY} is not the key of {folder / CHAIN}: put two there that were made together")
    papers = Papers(
        folder=folder,
        authorities=authorities,
        chain=chain,
        key=key,
        names=names,
        until=certificate.not_valid_after_utc,
    )
    if papers.until <= now:
        raise UserError(
            f"{folder / CHAIN} expired at {papers.until:%Y-%m-%d %H:%M} UTC: renew it, for example with `headrace certs`"
        )
    if (begin := certificate.not_valid_before_utc) > now:
        raise UserError(f"{folder / CHAIN} is not valid before {begin:%Y-%m-%d %H:%M} UTC: set this machine's clock")
    return papers


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Identity:
    """The papers in a folder, which are read again when the files have changed. Thread-safe."""

    def __init__(self, folder: Path, clock: Callable[[], datetime] = _utc_now) -> None:
        """`clock()`: the time, with a time zone. Raises UserError if the papers are not usable."""
        self.folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp = _stamp(folder)
        self._papers = load_papers(folder, clock())

    def present(self) -> Papers:
        """Return the papers of now; those from before where the files hold the same, or cannot be used, which is logged once."""
        with self._lock:
            if (stamp := _stamp(self.folder)) != self._stamp:
                self._stamp = stamp
                try:
                    if (found := load_papers(self.folder, self._clock())) != self._papers:
                        self._papers = found
                        log.info("papers are renewed %s", pairs(folder=self.folder, until=found.until.isoformat()))
                except UserError as err:
                    log.warning("papers are not renewed %s", pairs(reason=err, until=self._papers.until.isoformat()))
            return self._papers

    def check_server(self, name: str) -> None:
        """Raise UserError where a server with these papers would not be taken for `name` by its clients."""
        if name not in (names := self.present().names):
            raise UserError(
                f"{self.folder / CHAIN} is the certificate of {', '.join(names) or 'no DNS name'}, and clients of this service "
                f"ask for {name}: name the folder with its own papers by --tls"
            )

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC server, which shows each new client the papers of that moment and asks for its own."""
        shown = self._papers

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            if (papers := self.present()) is shown:
                return None
            shown = papers
            return papers.server_configuration()

        return grpc.dynamic_ssl_server_credentials(shown.server_configuration(), renewed, require_client_authentication=True)


def identity(tls: str | Path | None = None) -> Identity | None:
    """Return the identity with the papers in folder `tls`; None: in the one that HEADRACE_TLS names, which is read at every call.

    An empty name, or none in the environment, stands for plain text, and the result is None. Raises UserError if the papers are
    not usable.
    """
    named = os.environ.get(TLS, "") if tls is None else os.fspath(tls)
    return _identity(Path(named).absolute()) if named else None


def server_identity(name: str) -> Identity | None:
    """Return the identity of the environment for a server that clients ask for as `name`; None for plain text.

    Raises UserError if the papers are not usable, or are those of another server.
    """
    if (own := identity()) is not None:
        own.check_server(name)
    return own


@cache
def _identity(folder: Path) -> Identity:
    return Identity(folder)


def channel_options(server: str) -> list[tuple[str, Any]]:
    """Return the further options of a gRPC channel over TLS to a server of that name.

    Channels do not share connections: another one in this process may show other papers.
    """
    return [("grpc.ssl_target_name_override", server), ("grpc.use_local_subchannel_pool", 1)]


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(names.get_values_for_type(x509.DNSName))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise UserError(
            f"{path} cannot be read ({err.strerror}): --tls names a folder with {AUTHORITIES}, {CHAIN} and {KEY}, as "
            "`headrace certs` makes them"
        ) from err


def _stamp(folder: Path) -> _Stamp:
    return tuple(_stamp_of(folder / name) for name in (AUTHORITIES, CHAIN, KEY))


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
