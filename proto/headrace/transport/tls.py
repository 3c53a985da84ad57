"""TLS between trainers and preprocessors: the preprocessor's certificate, the CA that trainers trust, and why the two do not fit.

One certificate serves the gRPC port and the Flight port. Trainers need none of their own, because tickets are signed.
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
    """A server's certificate chain and its private key, both in PEM."""

    chain: bytes
    key: bytes = field(repr=False)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials for a gRPC server with this certificate."""
        return grpc.ssl_server_credentials([(self.key, self.chain)])


def load_certificate(chain: Path, key: Path) -> Certificate:
    """Read and check a certificate chain and its unencrypted key from PEM files.

    Raises UserError if a file cannot be read or is no PEM, or the key does not belong to the certificate.
    """
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
    """Return the content of a CA's PEM file. Raises UserError if the file cannot be read or has no certificate."""
    pem = _read(path, "--tls-ca")
    try:
        _trusting(pem)
    except (ssl.SSLError, ValueError) as err:
        raise UserError(
            f"--tls-ca {path} has no certificate in PEM: name the file of the CA that signed the preprocessors'"
        ) from err
    return pem


def tls_mismatch(endpoint: str, ca: bytes | None) -> str:
    """Return why TLS keeps a client that trusts `ca`, or speaks no TLS if it is None, from talking to the server at `endpoint`.

    The result is empty if TLS is not the reason. Connects to find out, with a timeout of PROBE_TIMEOUT_S.
    """
    if ca is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # only to learn whether the server speaks TLS; nothing is sent over it
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
