"""Nodes of a recoverable job that are killed, hang, come back and leave, under services that are killed and hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from headrace import trainer
from headrace.errors import ConflictError, HeadraceError, SupersededError, UserError
from headrace.trainer.loading.loader_state import LoaderState
from headrace.trainer.loading.session import SessionClient
from headrace.trainer.recovery.membership_client import MembershipClient
from headrace.trainer.recovery.node import Node
from headrace.v1.membership_pb2 import Formation, NodeHello, NodesSpec, Snapshot
from tests.integration.node import SPEC, membership

pytestmark = pytest.mark.integration

TIMEOUT_S = 30.0
LEAVES_AFTER_S = 0.5

Join = Callable[..., MembershipClient]
Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def join() -> Iterator[Join]:
    """(endpoint, job, name) -> the membership of a node in this process, which is closed at the end."""
    with ExitStack() as stack:

        def open_membership(endpoint: str, job: str, name: str) -> MembershipClient:
            member = membership(endpoint, job, name)
            member.open()
            stack.callback(member.close)
            return member

        yield open_membership


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """(endpoint, job, name) -> a process that is a node."""
    nodes: list[subprocess.Popen[str]] = []

    def start(endpoint: str, job: str, name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.integration.node", endpoint, job, name]
        nodes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return nodes[-1]

    yield start
    for node in nodes:
        node.kill()
        node.communicate()


def names(snapshot: Snapshot) -> str:
    return "".join(sorted(node.name for node in snapshot.nodes))


@pytest.mark.slow
def test_nodes_are_killed_hang_come_back_and_leave(calm, spec, join: Join, spawn: Spawn) -> None:
    job = calm.submit(spec("nodes", steps=1))
    killed, hung = (spawn(calm.endpoint, job, name) for name in "cd")
    first, second = (join(calm.endpoint, job, name) for name in "ab")
    assert names(first.wait(0, TIMEOUT_S)) == "abcd"
    assert killed.stdout is not None
    killed.stdout.readline()
    killed.kill()
    lost = first.wait(1, TIMEOUT_S)
    assert (names(lost), lost.at_step_end, first.urgent) == ("abd", False, 2)
    assert second.wait(1, TIMEOUT_S) == lost
    first.recovered(Formation(generation=2), 7, {"detect": 0.02, "rebuild": 0.25})
    with calm.client() as client:
        while not (recoveries := client.show(job).recoveries):
            time.sleep(0.02)  # polls a real service
        assert client.show(job).snapshot == lost
    assert (recoveries[0].step, recoveries[0].change) == (7, lost.change)
    assert [phase.name for phase in recoveries[0].phases] == ["detect", "rebuild"]
    os.kill(hung.pid, signal.SIGSTOP)
    silent = first.wait(2, TIMEOUT_S)
    assert (names(silent), first.urgent) == ("ab", 3)
    assert "silent" in silent.change
    os.kill(hung.pid, signal.SIGCONT)
    back = first.wait(3, TIMEOUT_S)
    assert (names(back), back.at_step_end, first.urgent) == ("abd", True, 3)
    third = join(calm.endpoint, job, "e")
    assert names(third.wait(4, TIMEOUT_S)) == "abde"
    third.leave()
    assert names(first.wait(5, TIMEOUT_S)) == "abd"
    third.close(done=True)
    second.close()  # without a word
    after = first.wait(6, TIMEOUT_S)
    assert (names(after), after.generation, after.change) == ("ad", 7, "b was lost (its stream ended)")
    hung.kill()
    end = first.wait(7, TIMEOUT_S)
    assert (names(end), list(end.pipelines)) == ("a", []), "who is left may have something to save"
    assert "1 nodes are left" in end.error
    assert "add 1 or more" in end.error
    first.close(done=True)
    anew = [join(calm.endpoint, job, name) for name in "wxyz"]
    assert names(anew[0].wait(0, TIMEOUT_S)) == "wxyz"


def test_a_node_of_two_processes_is_there_when_both_are_and_lost_with_one(calm, spec) -> None:
    job, pair = calm.submit(spec("pairs", steps=1)), NodesSpec()
    pair.CopyFrom(SPEC)
    pair.num_nodes, pair.gpus_per_node = 3, 2
    with ExitStack() as stack:

        def start(node: str, process: int) -> MembershipClient:
            hello = NodeHello(job=job, node=node, process=process, address=f"{node}:{process}", spec=pair)
            member = MembershipClient(calm.endpoint, hello)
            member.open()
            stack.callback(member.close)
            return member

        members = {(node, process): start(node, process) for process in (1, 0) for node in "abc" if (node, process) != ("c", 0)}
        with pytest.raises(TimeoutError):
            members["a", 0].wait(0, 0.5)
        members["c", 0] = start("c", 0)
        snapshot = members["a", 0].wait(0, TIMEOUT_S)
        assert {node.name: node.address for node in snapshot.nodes} == {"a": "a:0", "b": "b:0", "c": "c:0"}
        assert {member.wait(0, TIMEOUT_S).generation for member in members.values()} == {1}
        members["b", 1].close()  # without a word
        with pytest.raises(HeadraceError, match=r"node 'b' was lost \(process 1: its stream ended\): all of its processes end"):
            members["b", 0].wait(1, TIMEOUT_S)
        lost = members["a", 1].wait(1, TIMEOUT_S)
        assert (names(lost), lost.change, lost.urgent) == ("ac", "b was lost (process 1: its stream ended)", 2)
        again = [start("b", process) for process in (0, 1)]
        assert names(members["c", 0].wait(2, TIMEOUT_S)) == "abc"
        again[0].leave()
        assert names(members["c", 0].wait(3, TIMEOUT_S)) == "ac"
        again[0].close(done=True)
        assert again[1].wait(3, TIMEOUT_S).generation == 4, "the other process has its own say"


@pytest.mark.slow
def test_no_node_is_lost_to_a_leading_service_that_hangs(cluster, spec, store, join: Join) -> None:
    services = cluster.start_reorders(store.url)
    job = cluster.submit(spec("nodes", steps=1))
    members = [join(cluster.endpoint, job, name) for name in "abcd"]
    for member in members:
        assert member.wait(0, TIMEOUT_S).generation == 1
    os.kill(services[0].pid, signal.SIGSTOP)
    fifth = join(services[1].endpoint(), job, "e")
    snapshot = fifth.wait(1, TIMEOUT_S)
    assert (names(snapshot), snapshot.generation, snapshot.change) == ("abcde", 2, "e joined")
    assert all(member.wait(1, TIMEOUT_S) == snapshot for member in members)
    os.kill(services[0].pid, signal.SIGKILL)
    os.kill(services[1].pid, signal.SIGSTOP)
    with redis.Redis(port=store.port) as client:
        while client.exists("headrace:leader"):  # for longer than its lease, with none to stand by
            time.sleep(0.02)  # polls a real server
    os.kill(services[1].pid, signal.SIGCONT)
    join(services[1].endpoint(), job, "f")
    snapshot = fifth.wait(2, TIMEOUT_S)
    assert (names(snapshot), snapshot.generation, snapshot.change) == ("abcdef", 3, "f joined")


@pytest.mark.slow
def test_with_a_leading_service_that_is_killed_only_the_nodes_are_lost_that_die_with_it(
    cluster, spec, store, join: Join, spawn: Spawn
) -> None:
    services = cluster.start_reorders(store.url)
    job = cluster.submit(spec("nodes", steps=1))
    killed = spawn(cluster.endpoint, job, "d")
    members = [join(cluster.endpoint, job, name) for name in "abc"]
    assert {member.wait(0, TIMEOUT_S).generation for member in members} == {1}
    os.kill(services[0].pid, signal.SIGKILL)
    killed.kill()
    for member in members:
        snapshot = member.wait(1, TIMEOUT_S)
        assert (names(snapshot), snapshot.generation, snapshot.urgent) == ("abc", 2, 2)


def test_a_node_of_the_same_name_takes_the_place_of_the_former(calm, spec, join: Join) -> None:
    job = calm.submit(spec("twins", steps=1))
    members = [join(calm.endpoint, job, name) for name in "abcd"]
    assert {member.wait(0, TIMEOUT_S).generation for member in members} == {1}
    join(calm.endpoint, job, "b")
    back = members[0].wait(2, TIMEOUT_S)
    assert (names(back), back.urgent, back.generation) == ("abcd", 2, 3)
    with pytest.raises(SupersededError, match="joined again from elsewhere"):
        members[1].wait(3, TIMEOUT_S)


def test_a_node_without_a_place_ends_when_it_is_to_leave(calm, spec) -> None:
    job = calm.submit(spec("left-alone", steps=1))
    waiting = SimpleNamespace(is_over=False, close=lambda: None)  # a training that never begins
    member = membership(calm.endpoint, job, "a")
    with Node(member, waiting, "a", "127.0.0.1") as node:  # type: ignore[arg-type]
        began_s = time.monotonic()
        threading.Timer(LEAVES_AFTER_S, os.kill, (os.getpid(), signal.SIGTERM)).start()
        node.run()
    assert LEAVES_AFTER_S <= time.monotonic() - began_s < TIMEOUT_S
    assert member.newest is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"spec": NodesSpec(num_nodes=5)}, "another specification than the first node"),
        ({"generation": 99}, "follows generation 99 of job .* start the node again"),
        ({"address": ""}, "needs a name and HOST:PORT"),
        ({"job": "nobody's"}, 'no job "nobody\'s" here'),
        ({"process": 1}, "process 1 of node 'e', of which each has 1"),
    ],
)
def test_a_node_that_does_not_fit_is_told_why(calm, spec, join: Join, fields: dict[str, Any], words: str) -> None:
    job = calm.submit(spec("misfits", steps=1))
    members = [join(calm.endpoint, job, name) for name in "abcd"]
    members[0].wait(0, TIMEOUT_S)
    member = MembershipClient(calm.endpoint, NodeHello(**({"job": job, "node": "e", "address": "x:1", "spec": SPEC} | fields)))
    member.open()
    with pytest.raises(UserError, match=words):
        member.wait(0, TIMEOUT_S)
    member.close()


def test_a_job_that_is_reset_or_cancelled_lets_its_nodes_go(calm, spec, join: Join) -> None:
    job = calm.submit(spec("nodes-let-go", steps=3))
    with trainer.connect(calm.endpoint, job=job) as loader:
        step = next(iter(loader))
        list(step)
        loader.commit(step)
    with calm.client() as client:
        members = [join(calm.endpoint, job, name) for name in "abcd"]
        assert {member.wait(0, TIMEOUT_S).generation for member in members} == {1}
        client.reset(job, 0)
        assert "goes on from step 0 in generation 2: start its nodes again" in members[0].wait(1, TIMEOUT_S).error
        members = [join(calm.endpoint, job, name) for name in "abcd"]
        assert (again := members[0].wait(0, TIMEOUT_S)).generation == 3
        assert names(again) == "abcd"
        client.cancel(job)
        assert members[1].wait(3, TIMEOUT_S).error.startswith(f"job {job!r} was cancelled: ")
    with pytest.raises(ConflictError, match="is over"):
        join(calm.endpoint, job, "a").wait(0, TIMEOUT_S)


def test_nodes_that_commit_together_all_hear_of_a_step_and_one_commits_it(calm, spec) -> None:
    job = calm.submit(spec("together", steps=2))
    clients = [SessionClient(calm.endpoint, job, rank, 0, shared_commit=True) for rank in (0, 7)]
    for client in clients:
        client.open([LoaderState(job=job)])
    heard = []
    for client in clients:
        tickets: set[str] = set()
        placed: set[str] = set()
        for event in client.events():
            if event.HasField("plan") and event.plan.step == 0:
                tickets = {ticket for microbatch in event.plan.microbatches for ticket in microbatch.tickets}
                assert event.plan.HasField("whole")
            placed |= {event.location.ticket} - {""}
            if tickets and tickets <= placed:
                break
        heard.append(tickets)
    assert heard[0] == heard[1]
    assert clients[1].commit(0, [], 1.0, 0.1, 0.0)
    assert clients[0].commit(0, [], 1.0, 0.1, 0.0)  # no second time
    clients[1].close()  # nobody waits for one that went
    assert clients[0].commit(1, [], 1.0, 0.1, 0.0)
    clients[0].close()
    assert [entry.step for entry in calm.ledger(job)] == [0, 1]
