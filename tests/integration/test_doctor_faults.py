"""`headrace doctor` finds each of ten faults that are seeded for real: in the installation of a process, and in a running stack.

Four are those of a poor installation (test_doctor_command): few open files, a native library that does not load, packages that
are missing, more threads than processors. Here are six of a stack, one after the other as somebody meets them who mends them.
"""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.cluster_token import TOKEN, TOKEN_FILE
from headrace.identity import TLS
from tests.papers import make_cluster_papers
from tests.redis_server import RedisServer
from tests.wire import free_ports

pytestmark = pytest.mark.integration

SECRET = "a-secret-of-the-cluster-that-is-long"


@contextmanager
def web_server() -> Iterator[str]:
    """Something else than a service of Headrace, and where it listens."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def bad(capsys: pytest.CaptureFixture[str]) -> Any:
    """(endpoint) -> what the doctor finds wrong with the stack there, by check; all of it with a remedy."""

    def ask(endpoint: str) -> dict[str, dict[str, Any]]:
        capsys.readouterr()
        code = main(["doctor", "--only", "stack", "--endpoint", endpoint, "--format", "json"])
        checks = json.loads(capsys.readouterr().out)["checks"]
        found = {one["check"]: one for one in checks if one["state"] != "ok"}
        assert code == any(one["state"] == "fault" for one in found.values())
        assert all(one["remedy"] for one in found.values())
        return found

    return ask


def test_a_stack_is_mended_by_what_the_doctor_says(
    cluster: Any, spec: Any, store: RedisServer, bad: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (TLS, TOKEN, TOKEN_FILE):
        monkeypatch.delenv(name, raising=False)

    nowhere = f"127.0.0.1:{free_ports(1)[0]}"
    assert bad(nowhere)[nowhere]["found"] == "nothing listens there: the connection is refused"
    assert f"`headrace reorder --listen {nowhere}`" in bad(nowhere)[nowhere]["remedy"]

    with web_server() as other:
        (one,) = bad(other).values()
        assert one["state"] == "fault"
        assert "is no service of Headrace" in one["found"]

    store.set("appendfsync", "everysec")
    (tmp_path / "token").write_text(SECRET)
    cluster.start_reorder("--cluster-token-file", str(tmp_path / "token"), store=store.url)
    monkeypatch.setenv(TLS, str(make_cluster_papers(tmp_path / "papers") / "client"))
    (one,) = bad(cluster.endpoint).values()
    assert (one["check"], one["state"]) == ("TLS", "fault")
    assert "TLS" in one["remedy"]

    monkeypatch.delenv(TLS)
    (one,) = bad(cluster.endpoint).values()
    assert (one["check"], one["state"]) == ("token", "fault")
    assert one["remedy"] == "give this process the service's by HEADRACE_CLUSTER_TOKEN or HEADRACE_CLUSTER_TOKEN_FILE"

    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "token"))
    job = cluster.submit(spec("waiting"))
    found = bad(cluster.endpoint)
    assert found.keys() == {"store", "preprocessors", f"job {job}"}
    assert found["store"]["remedy"] == "start Redis with --appendfsync always"
    assert found["preprocessors"]["found"] == "none is connected, and jobs wait for one"
    assert found["preprocessors"]["remedy"] == f"start one with `headrace preprocessor --endpoint {cluster.endpoint}`"

    store.set("appendfsync", "always")
    cluster.add_preprocessors(1, "--cluster-token-file", str(tmp_path / "token"))
    cluster.wait_for_preprocessors()
    assert {"store", "preprocessors"}.isdisjoint(bad(cluster.endpoint))
