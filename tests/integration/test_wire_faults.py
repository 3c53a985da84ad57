"""Payload over real wires that break, between real processes: every sample comes all the same, and once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from headrace import trainer
from headrace.ledger import ledger_sha256
from headrace.processes import Process
from headrace.sample import LABEL_IGNORED
from tests.wire import NEAR, Wire, free_ports

pytestmark = pytest.mark.integration


def start_preprocessor(cluster: Any, *arguments: str) -> Process:
    log = cluster.folder / f"preprocessor-{len(cluster.preprocessors)}.log"
    common = ["preprocessor", "--reorder", cluster.endpoint, "--threads", "1", "--budget-mib", "64"]
    process = cluster.group.add(Process("preprocessor", [*common, *arguments], log))
    cluster.preprocessors.append(process)
    return process


@pytest.fixture
def add_preprocessor_behind_wire(cluster: Any) -> Iterator[Callable[..., Any]]:
    """(**faults) -> a Wire in front of the Flight server of a new preprocessor of the cluster."""
    with ExitStack() as stack:

        def add(**faults: Any) -> Any:
            grpc_port, flight_port = free_ports(2)
            wires = [
                Wire(f"127.0.0.1:{grpc_port}", listen=(NEAR, grpc_port)),
                Wire(f"127.0.0.1:{flight_port}", listen=(NEAR, flight_port), **faults),
            ]
            for wire in wires:
                stack.callback(wire.stop)
            listen = ["--listen", f"127.0.0.1:{grpc_port}", "--flight-port", str(flight_port)]
            start_preprocessor(cluster, *listen, "--advertise", f"{NEAR}:{grpc_port}", "--checksum").endpoint()
            return wires[1]

        yield add


def test_wires_that_are_cut_and_damage_parts_lose_nothing(
    cluster: Any, spec: Any, undisturbed: Callable[[int], str], add_preprocessor_behind_wire: Callable[..., Any]
) -> None:
    """Each connection of one brings a few parts and breaks in the middle of the next; the other one damages a label."""
    cluster.start_reorder()
    wires = [
        add_preprocessor_behind_wire(cut_after_bytes=800_000),
        add_preprocessor_behind_wire(flips=np.full(2, LABEL_IGNORED, np.int32).tobytes()),
    ]
    cluster.wait_for_preprocessors()
    job = cluster.submit(spec("disturbed", steps=8))
    assert cluster.consume(job, transports=("flight",)) == list(range(8))
    assert ledger_sha256(cluster.ledger(job)) == undisturbed(8)
    assert all(wire.num_faults > 0 for wire in wires)


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [pytest.param(False, id="silent", marks=pytest.mark.slow), pytest.param(True, id="killed")])
def test_a_wire_that_goes_silent_in_the_middle_of_a_part_loses_nothing(
    cluster: Any, spec: Any, undisturbed: Callable[[int], str], add_preprocessor_behind_wire: Callable[..., Any], is_killed: bool
) -> None:
    """All parts are at the only preprocessor until its wire stands still; then another comes, and it may be killed as well."""
    cluster.start_reorder()
    silent = add_preprocessor_behind_wire(stall_after_bytes=1_500_000)
    job = cluster.submit(spec("disturbed", steps=8))

    def disturb(step: trainer.Step) -> None:
        if step.index == 0:
            start_preprocessor(cluster).endpoint()
            while not silent.num_faults:  # it is in the middle of one now, and no byte of it comes any more
                time.sleep(0.01)  # polls a real connection
            if is_killed:
                os.kill(cluster.preprocessors[0].pid, signal.SIGKILL)

    assert cluster.consume(job, disturb, transports=("flight",), hedge_s=1.0) == list(range(8))
    assert ledger_sha256(cluster.ledger(job)) == undisturbed(8)
