"""The connections of a generation: every wait on them ends, wherever the other side was lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from trainer.recovery.mesh import Meeting, Mesh, MeshCutError

pytestmark = pytest.mark.integration

MESSAGE_BYTES = 1 << 26  # more than the system holds of a message on its way


def _is_lost_in_the_middle(address: str) -> None:
    """The other node: it dies when it has begun to send."""
    mesh = Mesh(address, "1", 1, 2, "127.0.0.1")
    mesh.connect()
    mesh.barrier()
    mesh.everybody.send([torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)], 0, 1)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """Of two nodes."""
    meeting = Meeting("127.0.0.1")
    other = multiprocessing.get_context("spawn").Process(target=_is_lost_in_the_middle, args=(meeting.address,))
    other.start()
    one = Mesh(meeting.address, "1", 0, 2, "127.0.0.1")
    one.connect()
    yield one
    one.close()
    other.join()
    assert other.exitcode == -signal.SIGKILL


def test_a_cut_ends_a_wait_for_the_rest_of_a_message(mesh: Mesh) -> None:
    work = mesh.everybody.recv([torch.empty(MESSAGE_BYTES, dtype=torch.uint8)], 1, 1)
    mesh.barrier()
    threading.Timer(0.2, mesh.cut).start()
    with pytest.raises(MeshCutError, match="in the middle of a message"), mesh.interruptible():
        mesh.wait(work)


def test_where_a_node_is_lost_not_all_arrive(mesh: Mesh) -> None:
    mesh.barrier()
    arrival = mesh.arrive()
    threading.Timer(0.2, mesh.cut).start()
    assert not mesh.all_arrive(arrival)
