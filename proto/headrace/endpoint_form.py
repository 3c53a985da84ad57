"""The form of an endpoint, HOST:PORT."""

from __future__ import annotations

from headrace.errors import EndpointError


def check_endpoint(endpoint: str) -> str:
    """Return `endpoint` unchanged if it has the form HOST:PORT. Raises EndpointError otherwise."""
    host, _, port = endpoint.rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise EndpointError(f"endpoint {endpoint!r} is not HOST:PORT, for example 127.0.0.1:7070{_why(endpoint, host, port)}")
    return endpoint


def _why(endpoint: str, host: str, port: str) -> str:
    """Return what is wrong with an endpoint, where that can be told."""
    if "://" in endpoint:
        return f": leave out {endpoint.partition('://')[0]}:// and what follows the port"
    if port.isdigit() and host:
        return ": ports are 0 to 65535"
    return ": it has no port" if endpoint and not host and port == endpoint else ""
