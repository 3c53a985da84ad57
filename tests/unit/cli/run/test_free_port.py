"""A port for a process that is yet to start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from headrace.errors import HeadraceError
from headrace.processes import free_port


def test_no_connection_is_given_the_port_before_its_server_listens() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not any(first <= free_port() <= last for _ in range(20))


def test_the_port_is_free_at_every_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.2", free_port("127.0.0.2"))) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("headrace.processes._PORTS", [port, other := free_port("127.0.0.1", "127.0.0.2")])
        assert {free_port("127.0.0.1", "127.0.0.2") for _ in range(20)} == {other}
        monkeypatch.setattr("headrace.processes._PORTS", range(port, port + 1))
        with pytest.raises(HeadraceError, match=f"no port of {port} to {port} is free"):
            free_port("127.0.0.1", "127.0.0.2")
