"""What the URL of a store tells: its password, which nobody is shown, and whether it goes over the network as it is."""

from __future__ import annotations

from urllib.parse import urlsplit

from headrace.cluster_token import is_loopback

_PLAIN = ("redis", "sentinel")


def without_password(url: str) -> str:
    """Return the URL with its password masked, for logs and errors."""
    parts = urlsplit(url)
    return url.replace(f":{parts.password}@", ":***@") if parts.password else url


def is_in_the_clear(url: str) -> bool:
    """Whether what is said to the store of a URL that can be used leaves this machine without TLS."""
    parts = urlsplit(url)
    hosts = [urlsplit(f"//{address}").hostname for address in parts.netloc.rpartition("@")[2].split(",")]
    return parts.scheme in _PLAIN and not all(is_loopback(f"{host}:") for host in hosts)
