"""Several reorder services on one store: one leads, and its end is no one's loss."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest

import trainer
from cli.processes import Process
from headrace import rpc
from headrace.errors import ConflictError, SupersededError, UnavailableError
from headrace.ledger import ledger_sha256
from headrace.spec import TopologySpec
from headrace.v1 import jobs_pb2, jobs_pb2_grpc

pytestmark = pytest.mark.integration

STEPS = 8


def undisturbed(cluster: Any, spec: Any) -> str:
    job = cluster.submit(spec("undisturbed", steps=STEPS))
    cluster.consume(job)
    return ledger_sha256(cluster.ledger(job))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_who_stands_by_goes_on_for_a_leader_that_is_killed_ends_or_hangs(cluster, spec, store, number) -> None:
    services = cluster.start_reorders(store.url)
    cluster.add_preprocessors(1)
    expected = undisturbed(cluster, spec)

    def disturb(step: trainer.Step) -> None:
        if step.index == 2:
            os.kill(services[0].pid, number)
        if step.index == 5 and number == signal.SIGSTOP:  # it comes back, and finds itself replaced
            os.kill(services[0].pid, signal.SIGCONT)

    job = cluster.submit(spec("disturbed", steps=STEPS))
    assert cluster.consume(job, disturb) == list(range(STEPS))
    assert ledger_sha256(cluster.ledger(job)) == expected
    with cluster.client() as client:
        assert client.show(job).leader == services[1].endpoint()


def test_both_may_be_killed_and_the_store_too(cluster, spec, store) -> None:
    services = cluster.start_reorders(store.url)
    cluster.add_preprocessors(1)
    expected = undisturbed(cluster, spec)
    endpoints = cluster.endpoint

    def disturb(step: trainer.Step) -> None:
        if step.index == 2:
            for service in services:
                os.kill(service.pid, signal.SIGKILL)
                service.wait(5.0)
            store.kill()
            store.start()
            for number, endpoint in enumerate(endpoints.split(",")):
                arguments = ["reorder", "--listen", endpoint, "--store", store.url]
                cluster.group.add(Process("reorder", arguments, cluster.folder / f"again-{number}.log")).endpoint()
        if step.index == 5:  # the leader goes on when its store is back
            store.kill()
            threading.Timer(2.0, store.start).start()

    job = cluster.submit(spec("disturbed", steps=STEPS))
    assert cluster.consume(job, disturb) == list(range(STEPS))
    assert ledger_sha256(cluster.ledger(job)) == expected


def test_who_stands_by_says_who_leads(cluster, store) -> None:
    services = cluster.start_reorders(store.url)
    standby = services[1].endpoint()
    assert rpc.is_serving(standby)
    assert not rpc.is_serving(standby, "headrace.v1.Jobs")
    with grpc.insecure_channel(standby) as channel, pytest.raises(UnavailableError, match=f"{services[0].endpoint()} leads"):
        rpc.call(jobs_pb2_grpc.JobsStub(channel).List, jobs_pb2.ListRequest(), standby)


def test_a_new_topology_plans_the_same_global_batches_and_refuses_the_ranks_of_the_old_one(cluster, spec) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(1)
    expected = undisturbed(cluster, spec)
    job = cluster.submit(spec("elastic", steps=STEPS))
    done = consume_until(cluster, job, 3, replan(cluster, job, replicas=3))
    done += consume_until(cluster, job, 3, replan(cluster, job, replicas=1, microbatches=4))
    done += cluster.consume(job)
    assert done == list(range(STEPS))
    assert ledger_sha256(cluster.ledger(job)) == expected
    with cluster.client() as client:
        status = client.show(job)
        assert status.generation == 3
        with pytest.raises(ConflictError, match="topology cannot change"):
            client.set_topology(job, TopologySpec(replicas=2))


def replan(cluster: Any, job: str, **fields: int) -> Callable[[], None]:
    def change() -> None:
        with cluster.client() as client:
            client.set_topology(job, TopologySpec(**fields))
            with pytest.raises(ConflictError, match="generation"):
                client.set_topology(job, TopologySpec(replicas=7), generation=1)

    return change


def consume_until(cluster: Any, job: str, count: int, change: Callable[[], None]) -> list[int]:
    """Commit `count` steps, have the job changed, and find that this rank's next commit or step is refused."""
    done = []
    with trainer.connect(cluster.endpoint, job=job) as loader:
        steps = iter(loader)
        for _ in range(count):
            step = next(steps)
            list(step)
            loader.commit(step)
            done.append(step.index)
        held = next(steps)
        list(held)
        change()
        with pytest.raises(SupersededError, match="connect again"):
            loader.commit(held)
    return done


def test_a_paused_job_plans_no_further_step_until_it_is_resumed(cluster, spec) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(1)
    job = cluster.submit(spec("paused", steps=STEPS, window=2))
    with trainer.connect(cluster.endpoint, job=job) as loader, cluster.client() as client:
        steps = iter(loader)
        step = next(steps)
        client.pause(job, True)
        cluster.wait_for_state(job, "paused")
        planned = [step.index]
        while planned[-1] < client.show(job).committed_steps + client.show(job).planned_steps - 1:
            list(step)
            loader.commit(step)
            step = next(steps)
            planned.append(step.index)
        list(step)
        loader.commit(step)
        assert client.show(job).planned_steps == 0
        assert client.show(job).committed_steps == planned[-1] + 1 < STEPS
        client.pause(job, False)
        rest = []
        for step in steps:
            list(step)
            loader.commit(step)
            rest.append(step.index)
    assert [*planned, *rest] == list(range(STEPS))


def test_a_reset_job_gives_its_steps_once_more(cluster, spec) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(1)
    expected = undisturbed(cluster, spec)
    job = cluster.submit(spec("reset", steps=STEPS))
    cluster.consume(job)
    with cluster.client() as client:
        assert client.reset(job, 3).committed_steps == 3
    assert cluster.consume(job) == list(range(3, STEPS))
    assert ledger_sha256(cluster.ledger(job)) == expected
