"""TLS of a preprocessor: the certificate that it shows, the CA that a trainer trusts, and what does not fit, in a sentence.

One certificate serves the gRPC port and the Flight port. Trainers are not asked for one: tickets are signed.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from headrace.errors import UserError

PROBE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A server's identity, both in PEM."""

    chain: bytes
    key: bytes = field(repr=False)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server."""
        return grpc.ssl_server_credentials([(self.key, self.chain)])


def load_certificate(chain: Path, key: Path) -> Certificate:
    """Raises UserError where a file cannot be read, is no PEM, or the key is not the certificate's."""
    loaded = Certificate(chain=_read(chain, "--tls-cert"), key=_read(key, "--tls-key"))
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key, password="")
    except ssl.SSLError as err:
        if err.reason == "KEY_VALUES_MISMATCH":
            raise UserError(
                f"--tls-key {key} is not the key of --tls-cert {chain}: name the two that were made together"
            ) from err
        raise UserError(
            f"--tls-cert {chain} and --tls-key {key} are not a certificate and its unencrypted key in PEM ({_reason(err)})"
        ) from err
    return loaded


def load_ca(path: Path) -> bytes:
    """The PEM of a CA. Raises UserError where the file cannot be read or has no certificate."""
    pem = _read(path, "--tls-ca")
    try:
        _trusting(pem)
    except (ssl.SSLError, ValueError) as err:
        raise UserError(
            f"--tls-ca {path} has no certificate in PEM: name the file of the CA that signed the preprocessors'"
        ) from err
    return pem


def mismatch(endpoint: str, ca: bytes | None) -> str:
    """Why a client that trusts `ca`, or speaks no TLS where that is None, cannot talk to a server that listens there.

    Empty where TLS is not the reason. Connects to find out, for at most PROBE_TIMEOUT_S.
    """
    if ca is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # to learn whether TLS is spoken; nothing is said over it
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context = _trusting(ca)
    context.set_alpn_protocols(["h2"])
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    try:
        with (
            socket.create_connection((host, int(port)), timeout=PROBE_TIMEOUT_S) as connection,
            context.wrap_socket(connection, server_hostname=host) as secured,
        ):
            if ca is not None or secured.version() is None:  # no handshake: the connection was reset before it began
                return ""
            return f"{endpoint} speaks TLS only: name the CA of its certificate with --tls-ca (tls_ca=)"
    except ssl.SSLCertVerificationError as err:
        return f"the certificate of {endpoint} does not pass with the CA of --tls-ca (tls_ca=): {err.verify_message}"
    except ssl.SSLEOFError:
        return ""
    except ssl.SSLError:
        return (
            ""
            if ca is None
            else f"{endpoint} speaks no TLS: start it with --tls-cert and --tls-key, or leave out --tls-ca (tls_ca=)"
        )
    except OSError:
        return ""


def _trusting(ca: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=ca.decode("ascii"))
    return context


def _read(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise UserError(f"{option} {path} cannot be read ({err.strerror}): name a file in PEM") from err


def _reason(err: ssl.SSLError) -> str:
    return (err.reason or str(err)).lower().replace("_", " ")
