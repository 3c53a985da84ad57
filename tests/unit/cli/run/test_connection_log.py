"""Connections that TLS turns away are lines of the service's log, with peer and reason."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from headrace.cli.run.authority import open_authority
from headrace.cli.run.connection_log import LOG_CONNECTIONS, Trace, connections_logged
from headrace.identity import CHAIN, CLIENT, KEY
from headrace.refusals import EVERY_S
from headrace.refused_connections import ConnectionLog
from tests.papers import expire, make_cluster_papers

PATIENCE_S = 60.0
SERVER = """
import os, sys
import headrace.cli.main  # has gRPC trace handshakes, by the command line's first word
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import grpc
from pyarrow import flight
from headrace.cli.run.connection_log import connections_logged
from headrace.identity import Identity
from headrace.observability.logs import configure_logging
from headrace.transport.flight_server import _secured
identity = Identity(Path(sys.argv[2]))
with connections_logged():
    configure_logging("reorder")
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", identity.server_credentials())
    server.start()
    payload = flight.FlightServerBase("grpc+tls://127.0.0.1:0", **_secured(identity.present()))
    print(port, payload.port, flush=True)
    os.write(2, b"of native code\\n")
    sys.stdin.read()
os.write(2, b"of the end\\n")
"""


class Server:
    """A process with a gRPC and a Flight server that speak TLS, and what it writes to standard error."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.ports = tuple(map(int, process.stdout.readline().split()))
        self.lines: list[str] = []
        self._process = process
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line)

    def refusals(self, reason: str) -> dict[int, str]:
        """The lines with this reason, by the caller's port."""
        of_reason = [line for line in self.lines if "WARNING refused a connection" in line and f"reason={reason}" in line]
        return {int(line.partition("peer=ipv4:127.0.0.1:")[2].split()[0]): line for line in of_reason}

    def end(self) -> list[str]:
        """End it in order, and return all that it wrote."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._reading.join(PATIENCE_S)
        return self.lines


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all kinds of processes, and of clients that have expired or are of another authority."""
    folder = make_cluster_papers(tmp_path_factory.mktemp("papers"))
    authority, _ = open_authority(folder / "authority", datetime.now(UTC))
    (folder / "expired").mkdir()
    expire(folder / "expired", authority, CLIENT)
    make_cluster_papers(folder / "theirs")
    return folder


@pytest.fixture(scope="module")
def server(papers: Path) -> Iterator[Server]:
    environment = {**os.environ, LOG_CONNECTIONS: "1"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", SERVER, "reorder", str(papers / "reorder")]
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        yield Server(process)
        process.kill()


def call(port: int, shown: Path | None, says: bytes) -> int:
    """Say something, or shake hands with the papers of a folder if it exists. The port that it came from."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as caller:
        own = int(caller.getsockname()[1])
        with contextlib.suppress(OSError):  # which ssl.SSLError is, and a connection that is reset
            if shown is None:
                caller.sendall(says)
                caller.recv(1)
                return own
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            if shown.exists():
                context.load_cert_chain(shown / CHAIN, shown / KEY)
            with context.wrap_socket(caller) as secured:
                secured.recv(1)
        return own


CASES = [
    ("plain text", None, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    ("no certificate", "nothing", b""),
    ("expired certificate", "expired", b""),
    ("foreign certificate", "theirs/client", b""),
]


@pytest.mark.parametrize("port", [0, 1], ids=["grpc", "flight"])
@pytest.mark.parametrize(("reason", "shown", "says"), CASES, ids=[case[0] for case in CASES])
def test_who_is_turned_away_is_a_line(
    server: Server, papers: Path, port: int, reason: str, shown: str | None, says: bytes
) -> None:
    came: set[int] = set()
    folder, deadline = papers / shown if shown else None, time.monotonic() + PATIENCE_S
    while not came & server.refusals(f'"{reason}"').keys():  # of each reason a line a second at most
        assert time.monotonic() < deadline, server.lines
        came.add(call(server.ports[port], folder, says))
        time.sleep(EVERY_S / 4)  # polls a real process


def test_who_is_let_in_is_none_and_what_others_write_is_passed_on(papers: Path, server: Server) -> None:
    own = set()
    for port in server.ports:
        context = ssl.create_default_context(cafile=str(papers / "client" / "ca.crt"))
        context.check_hostname = False
        context.set_alpn_protocols(["h2"])
        context.load_cert_chain(papers / "client" / CHAIN, papers / "client" / KEY)
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as caller, context.wrap_socket(caller) as secured:
            assert secured.recv(9), "settings of HTTP/2"
            own.add(f"peer=ipv4:127.0.0.1:{secured.getsockname()[1]} ")
    lines = server.end()
    assert [line for line in lines if "refused a connection" not in line] == ["of native code\n", "of the end\n"]
    assert not [line for line in lines if any(peer in line for peer in own)]


def test_handshakes_of_clients_and_those_that_go_on_are_dropped_and_what_others_write_is_not() -> None:
    begin, trace = "I1128 23:00:37.743548    1165 handshaker.cc:155] CallNextHandshakerLocked: error=", Trace()
    of_client = "args={grpc.default_authority=reorder.headrace, grpc.internal.endpoint_peer_address=ipv4:10.0.0.1:7070}"
    of_server = "args={grpc.internal.endpoint_peer_address=ipv6:%5B::1%5D:5, grpc.internal.server_credentials=0x5}, exit_early=0}"
    lines = [
        f"{begin}OK shutdown=false index=1, {of_server}",
        f"{begin}UNAVAILABLE: Handshake read failed (Socket closed)",
        "=== Source Location Trace: ===",
        "src/core/util/status_helper.cc:124",
        f" shutdown=false index=2, {of_client}",
        "",
        f"{begin}UNKNOWN: something new shutdown=false index=2, {of_server}",
    ]
    assert [trace.take(line) for line in lines] == [(True, None)] * 6 + [(True, ("ipv6:[::1]:5", "UNKNOWN: something new"))]
    for line in (
        "15:04:05.678 reorder INFO committed job=j",
        "",
        "src/core/util/status_helper.cc:124",
        "F1128 23:00:37.743548 1 x",
    ):
        assert trace.take(line) == (False, None)


@pytest.mark.parametrize("asked", ["", "0"])
def test_who_asks_for_none_keeps_standard_error(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv(LOG_CONNECTIONS, asked)
    before = os.fstat(2).st_ino
    with connections_logged():
        assert os.fstat(2).st_ino == before


def test_of_each_reason_a_line_a_second_at_most_and_all_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    connections = ConnectionLog(["plain text"], lambda: now_s)
    for number in range(5):
        connections.note(f"ipv4:10.0.0.7:{number}", "plain text")
        connections.note(f"ipv4:10.0.0.7:{number}", f"of gRPC {number}")
    now_s = EVERY_S
    connections.note("ipv4:10.0.0.8:1", "plain text")
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        'refused a connection peer=ipv4:10.0.0.7:0 reason="plain text"',
        'refused a connection peer=ipv4:10.0.0.7:0 reason="of gRPC 0"',
        'refused a connection peer=ipv4:10.0.0.8:1 reason="plain text" left_out=4',
    ]
