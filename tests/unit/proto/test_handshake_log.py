"""What docs/security.md says that gRPC prints of connections that a server refuses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.papers import make_cluster_papers

SERVER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import grpc
from headrace.identity import Identity
server = grpc.server(ThreadPoolExecutor(1))
print(server.add_secure_port("127.0.0.1:0", Identity(Path(sys.argv[1])).server_credentials()), flush=True)
server.start()
sys.stdin.read()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """One that speaks TLS only; the first line on its stdout is its port."""
    papers = make_cluster_papers(tmp_path) / "reorder"
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = {**os.environ, "GRPC_VERBOSITY": "INFO"}
    with subprocess.Popen([sys.executable, "-c", SERVER, str(papers)], text=True, env=environment, **pipes) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("says", "word"), [(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "WRONG_VERSION_NUMBER"), (b"GET / HTTP/1.1\r\n\r\n", "HTTP_REQUEST")]
)
def test_a_connection_in_plain_text_is_a_line(server: subprocess.Popen[str], says: bytes, word: str) -> None:
    assert server.stdout is not None
    assert server.stderr is not None
    with socket.create_connection(("127.0.0.1", int(server.stdout.readline())), timeout=60.0) as caller:
        caller.sendall(says)
        line = next(line for line in server.stderr if "Handshake failed" in line)
    assert "Handshake failed with error SSL_ERROR_SSL: " in line
    assert word in line
