"""Addresses that no job should have a process connect to: loopback, those of its link, and clouds' metadata services.

What listens on loopback trusts whoever is on the machine, and by link-local addresses clouds tell a machine its own secrets.
"""

from __future__ import annotations

import ipaddress
import socket

_METADATA = frozenset(
    map(
        ipaddress.ip_address,
        ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "192.0.0.192"),  # AWS and Google by IPv6, Alibaba, Oracle
    )
)
"""Addresses of clouds' metadata services that are not link-local, as 169.254.169.254 is."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_local_address(address: str) -> bool:
    """Whether an IP address is a loopback, link-local or unspecified one, or that of a metadata service; also if it is an IPv4
    address in the form of an IPv6 one. Raises ValueError for what is no IP address."""
    found: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found in _NAT64:
            found = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        else:
            found = found.ipv4_mapped or found.sixtofour or found
    return found.is_loopback or found.is_link_local or found.is_unspecified or found in _METADATA


def local_address_of(host: str, *, look_up: bool) -> str | None:
    """Return the address of a host that is a local one; None where it has none.

    `look_up`: ask for the addresses of a name; else only an address, also one that is written in fewer numbers (127.1), and the
    name localhost have any.
    """
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return name
    try:
        flags = 0 if look_up else socket.AI_NUMERICHOST
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError):  # a name, or one that nobody knows: whoever connects to it says so
        return None
    return next((str(address[0]) for *_, address in found if is_local_address(str(address[0]))), None)
