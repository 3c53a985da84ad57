"""UCX connections come and go, and so do processes: nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from headrace.transport.ucx_buffers import ReceiveBuffers
from headrace.transport.ucx_library import UcxError
from headrace.transport.ucx_loop import UcxLoop
from headrace.transport.ucx_server import UcxServer
from tests.unit.proto.transport.ucx_world import PART, connect, on_loop, payload


def resources(ucx: UcxLoop) -> tuple[int, int, int, int]:
    """(file descriptors, threads, operations, connections)"""
    open_ones = on_loop(ucx, lambda: (len(ucx._attempts), len(ucx.at_close)))
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), *open_ones


def test_connections_that_come_and_go_leave_nothing_behind(ucx: UcxLoop, server: UcxServer) -> None:
    buffers = ReceiveBuffers()
    held = connect(ucx, server, buffers)

    def come_and_go() -> None:
        receiver = connect(ucx, server, buffers)
        receiver.fetch("part", 20).release()
        receiver.close()
        held.fetch("part", 20).release()  # the server has dealt with the other one's end by then, or does so before the next

    for _ in range(3):
        come_and_go()
    before = resources(ucx)
    for _ in range(30):
        come_and_go()
    after = resources(ucx)
    assert after[2:] == before[2:]
    assert after[0] <= before[0] + 4, "a connection of either side may still be ending"
    assert after[1] <= before[1] + 2
    assert buffers.idle_bytes == PART.size


def test_loops_that_come_and_go_leave_nothing_behind(server: UcxServer) -> None:
    def come_and_go() -> tuple[int, int]:
        loop = UcxLoop("ucx-short")
        connect(loop, server).fetch("part", 20)
        loop.close()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    first = [come_and_go() for _ in range(3)][-1]
    last = [come_and_go() for _ in range(10)][-1]
    assert last[0] <= first[0] + 4, "one of the ten would leave more"
    assert last[1] <= first[1] + 2


@pytest.mark.filterwarnings("ignore:lance is not fork-safe")  # another test may have loaded it
def test_a_forked_child_is_told_and_its_parent_goes_on(ucx: UcxLoop, server: UcxServer) -> None:
    receiver = connect(ucx, server)
    child = os.fork()
    if child == 0:
        try:
            receiver.fetch("part", 5)
        except UcxError as err:
            ucx.close()
            os._exit(42 if "forked" in str(err) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert payload(receiver.fetch("part", 20)).equals(PART)


PROGRAM = """
    import sys, threading
    from headrace.transport.ucx import UcxClient, UcxReceiver
    from headrace.transport.ucx_buffers import ReceiveBuffers
    from headrace.transport.ucx_loop import UcxLoop
    receiver = UcxReceiver(UcxLoop("ucx"), "127.0.0.1", int(sys.argv[1]), bytes.fromhex(sys.argv[2]), ReceiveBuffers())
    receiver.fetch("part", 20)
    print("fetched", flush=True)
    if sys.argv[3] == "stuck":
        receiver.fetch("stuck", 100)
"""


@pytest.mark.parametrize("ticket", ["part", "stuck"])
def test_a_program_ends_when_it_wants_to_and_quietly(server: UcxServer, ticket: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(server.port), server.token.hex(), ticket]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "fetched\n"
        if ticket == "stuck":
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert out == ""
    if ticket == "stuck":
        assert process.returncode == -signal.SIGINT
        assert err.rstrip().endswith("KeyboardInterrupt")
    else:
        assert (process.returncode, err) == (0, "")
