"""Services that move to other addresses and whose names follow, as pods do: who runs already goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from headrace import rpc, trainer
from headrace.cli.example import example_data
from headrace.cli.main import main
from headrace.ledger import ledger_sha256
from headrace.processes import Process
from tests.wire import free_ports

pytestmark = pytest.mark.integration

STEPS = 8
RESOLVER = '''
"""Finds names that end with .test in a file, which may change: loaded by every Python process of the test."""
import json, os, socket

real = socket.getaddrinfo

def getaddrinfo(host, port, *args, **options):
    if str(host).endswith(".test"):
        with open(os.environ["HEADRACE_TEST_NAMES"]) as file:
            address = json.load(file).get(host)
        if address is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        host = address
    return real(host, port, *args, **options)

socket.getaddrinfo = getaddrinfo
'''


class Names:
    """A resolver of the names a.test and b.test, for this process and those that it starts."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def lead_to(self, **addresses: str) -> None:
        """a: the address of a.test."""
        growing = self._file.with_suffix(".new")
        growing.write_text(json.dumps({f"{name}.test": address for name, address in addresses.items()}))
        growing.rename(self._file)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Names:
    (tmp_path / "sitecustomize.py").write_text(RESOLVER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ['PYTHONPATH']}" if "PYTHONPATH" in os.environ else str(tmp_path))
    monkeypatch.setenv("HEADRACE_TEST_NAMES", str(tmp_path / "names.json"))
    monkeypatch.setattr(socket, "getaddrinfo", socket.getaddrinfo)  # put back at the end
    exec(RESOLVER, {})
    return Names(tmp_path / "names.json")


def start_services(cluster: Any, store: Any, port: int, *hosts: str) -> list[Process]:
    services = []
    for host in hosts:
        arguments = ["reorder", "--listen", f"{host}:{port}", "--store", store.url]
        services.append(cluster.group.add(Process("reorder", arguments, cluster.folder / f"reorder-{host}.log")))
        services[-1].endpoint()
    return services


@pytest.mark.slow
@pytest.mark.parametrize("both", [True, False], ids=["both-move", "one-moves-and-the-other-is-gone"])
def test_running_trainers_and_preprocessors_follow_names_that_move(
    cluster: Any, store: Any, spec: Any, undisturbed: Any, names: Names, both: bool
) -> None:
    (port,) = free_ports(1)
    names.lead_to(a="127.0.0.2", b="127.0.0.3")
    former = start_services(cluster, store, port, "127.0.0.2", "127.0.0.3")
    cluster.endpoint = f"a.test:{port},b.test:{port}"
    cluster.add_preprocessors(1, "--data-root", str(example_data()))

    def move(step: trainer.Step) -> None:
        if step.index == 2:
            for service in former:
                os.kill(service.pid, signal.SIGKILL)
            start_services(cluster, store, port, "127.0.0.4", *(["127.0.0.5"] if both else []))
            names.lead_to(b="127.0.0.4", **({"a": "127.0.0.5"} if both else {}))

    job = cluster.submit(spec("moving", steps=STEPS))
    assert cluster.consume(job, move) == list(range(STEPS))
    assert ledger_sha256(cluster.ledger(job)) == undisturbed(STEPS)


@pytest.mark.slow
def test_one_unknown_name_of_several_keeps_nobody_from_starting(
    cluster: Any, store: Any, spec: Any, names: Names, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = free_ports(1)
    names.lead_to(b="127.0.0.3")
    start_services(cluster, store, port, "127.0.0.3")
    cluster.endpoint = f"a.test:{port},b.test:{port}"
    rpc.await_reorder_service(cluster.endpoint)
    cluster.add_preprocessors(1, "--data-root", str(example_data()))
    job = cluster.submit(spec("unknown-name", steps=2))
    assert cluster.consume(job) == [0, 1]
    assert main(["job", "list", "--endpoint", cluster.endpoint]) == 0
    assert "unknown-name" in capsys.readouterr().out
