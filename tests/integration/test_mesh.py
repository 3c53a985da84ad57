"""The connections of a generation: every wait on them ends, wherever the other side was lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.process import BaseProcess

import pytest
import torch

from headrace.trainer.recovery.layer_transfer import Transfer, move
from headrace.trainer.recovery.mesh import Meeting, Mesh, MeshCutError

pytestmark = pytest.mark.integration

MESSAGE_BYTES = 1 << 26  # more than the system holds of a message on its way
LIVES_ON_S = 2.0
IN_THE_MIDDLE_S = 0.01  # of a sum
CLOSES_WITHIN_S = 10.0  # far less than gloo's patience
CUT_S = 2.0  # after the other node has begun to send
PATIENCE = timedelta(seconds=100)  # with a process that imports torch


def _is_lost_in_the_middle(address: str) -> None:
    """The other node: it dies when it has begun to send, if it comes to that before the first one cuts it off."""
    mesh = Mesh(address, "1", 1, 2, "127.0.0.1", PATIENCE)
    mesh.connect()
    mesh.barrier()
    with suppress(MeshCutError), mesh.interruptible():
        mesh.everybody.send([torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)], 0, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _hangs_in_a_sum(address: str) -> None:
    """The other node: it hangs when it has begun to send its part of a sum."""
    mesh = Mesh(address, "1", 1, 2, "127.0.0.1", PATIENCE)
    mesh.connect()
    mesh.barrier()
    mesh.everybody.allreduce([torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)])
    time.sleep(IN_THE_MIDDLE_S)
    os.kill(os.getpid(), signal.SIGSTOP)


def _hangs_in_a_parameter(address: str) -> None:
    """The other node: it hangs when it has sent a part of the state."""
    mesh = Mesh(address, "1", 1, 2, "127.0.0.1", PATIENCE)
    mesh.connect()
    with mesh.streams([0], []) as streams:
        streams.to[0].send(bytes(8))
        os.kill(os.getpid(), signal.SIGSTOP)


@contextmanager
def _beside(other: Callable[[str], None]) -> Iterator[tuple[Mesh, BaseProcess]]:
    """The first of two nodes; the other one runs in a process of its own, which is told where they meet."""
    meeting = Meeting("127.0.0.1")
    process = multiprocessing.get_context("forkserver").Process(target=other, args=(meeting.address,))
    process.start()
    one = Mesh(meeting.address, "1", 0, 2, "127.0.0.1", PATIENCE)
    one.connect()
    yield one, process
    one.close()
    process.join()


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """Of two nodes, one of which is lost."""
    with _beside(_is_lost_in_the_middle) as (one, process):
        yield one
    assert process.exitcode == -signal.SIGKILL


def _loses_its_connections(address: str) -> None:
    """The other node: it lives on, and never arrives."""
    mesh = Mesh(address, "1", 1, 2, "127.0.0.1", PATIENCE)
    mesh.connect()
    mesh.barrier()
    mesh.cut()
    time.sleep(LIVES_ON_S)


def test_a_cut_ends_a_wait_for_the_rest_of_a_message(mesh: Mesh) -> None:
    work = mesh.everybody.recv([torch.empty(MESSAGE_BYTES, dtype=torch.uint8)], 1, 1)
    mesh.barrier()
    threading.Timer(CUT_S, mesh.cut).start()
    with pytest.raises(MeshCutError, match="in the middle of a message"), mesh.interruptible():
        mesh.wait_for_message(work)


def test_a_cut_ends_a_wait_for_the_rest_of_a_parameter() -> None:
    with _beside(_hangs_in_a_parameter) as (mesh, other):
        threading.Timer(CUT_S, mesh.cut).start()
        with pytest.raises(MeshCutError, match="a connection to"):
            move(mesh, PARAMETERS, TRANSFERS[:1], lambda _: [])
        other.kill()


@pytest.mark.slow
@pytest.mark.parametrize("gives_up", [False, True])
def test_a_sum_that_stays_unfinished_holds_nobody_up(*, gives_up: bool) -> None:
    with _beside(_hangs_in_a_sum) as (mesh, other):
        mesh.barrier()
        work = mesh.everybody.allreduce([torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)])
        threading.Timer(CUT_S, _interrupt if gives_up else mesh.cut).start()
        with pytest.raises(KeyboardInterrupt if gives_up else MeshCutError), mesh.interruptible():
            mesh.wait(work)
        del work
        began_s = time.monotonic()
        other.kill()
    assert time.monotonic() - began_s < CLOSES_WITHIN_S


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_where_a_node_is_lost_not_all_arrive(mesh: Mesh) -> None:
    mesh.barrier()
    arrival = mesh.arrive()
    threading.Timer(0.2, mesh.cut).start()
    assert not mesh.all_arrive(arrival)


@pytest.mark.slow
def test_whoever_has_arrived_hears_that_others_cannot() -> None:
    with _beside(_loses_its_connections) as (mesh, other):

        def look() -> None:
            while other.is_alive():
                mesh.check()

        mesh.barrier()
        mesh.arrive()
        with pytest.raises(MeshCutError, match="a connection to one of them ended"):
            look()


PARAMETERS = {"frozen": (5,), "learning": (3, 3, 3, 1)}
TRANSFERS = [Transfer(name="learning", source=1, target=0), Transfer(name="frozen", source=0, target=1)]


def _state_of(rank: int, name: str) -> list[torch.Tensor]:
    return [torch.arange(float(length)) + 100 * rank + 10 * number for number, length in enumerate(PARAMETERS[name])]


def _exchanges_state(address: str) -> None:
    mesh = Mesh(address, "1", 1, 2, "127.0.0.1", PATIENCE)
    mesh.connect()
    received = move(mesh, PARAMETERS, TRANSFERS, lambda name: _state_of(1, name))
    assert all(map(torch.equal, received["frozen"], _state_of(0, "frozen")))
    mesh.barrier()
    os._exit(0)  # the waiter's thread may still be in gloo, which aborts an interpreter that ends meanwhile


def test_nodes_exchange_what_each_lacks_at_the_same_time() -> None:
    with _beside(_exchanges_state) as (one, process):
        received = move(one, PARAMETERS, TRANSFERS, lambda name: _state_of(0, name))
        assert received.keys() == {"learning"}
        assert all(map(torch.equal, received["learning"], _state_of(1, "learning")))
        one.barrier()
    assert process.exitcode == 0
