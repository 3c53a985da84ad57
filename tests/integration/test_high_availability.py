"""Several reorder services on one store: one leads, and its end is no one's loss."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import redis

from headrace import rpc, trainer
from headrace.cli.main import main
from headrace.errors import ConflictError, EndpointError, SupersededError, UnavailableError, UserError
from headrace.ledger import ledger_sha256
from headrace.processes import Process
from headrace.v1 import jobs_pb2, jobs_pb2_grpc, sessions_pb2, sessions_pb2_grpc

pytestmark = pytest.mark.integration

STEPS = 8


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)],
)
def test_who_stands_by_goes_on_for_a_leader_that_is_killed_ends_or_hangs(cluster, spec, store, undisturbed, number) -> None:
    services = cluster.start_reorders(store.url)
    cluster.add_preprocessors(1)

    def disturb(step: trainer.Step) -> None:
        if step.index == 2:
            os.kill(services[0].pid, number)
        if step.index == 5 and number == signal.SIGSTOP:  # it comes back, and finds itself replaced
            os.kill(services[0].pid, signal.SIGCONT)

    job = cluster.submit(spec("disturbed", steps=STEPS))
    assert cluster.consume(job, disturb) == list(range(STEPS))
    assert ledger_sha256(cluster.ledger(job)) == undisturbed(STEPS)
    with cluster.client() as client:
        assert client.show(job).leader == services[1].endpoint()


@pytest.mark.slow
def test_both_may_be_killed_and_the_store_too(cluster, spec, store, undisturbed) -> None:
    services = cluster.start_reorders(store.url)
    cluster.add_preprocessors(1)
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
    assert ledger_sha256(cluster.ledger(job)) == undisturbed(STEPS)


@pytest.mark.slow
def test_who_stands_by_says_who_leads(cluster, store) -> None:
    services = cluster.start_reorders(store.url)
    standby = services[1].endpoint()
    assert rpc.is_serving(standby)
    assert not rpc.is_serving(standby, "headrace.v1.Jobs")
    leads = pytest.raises(UnavailableError, match=f"{services[0].endpoint()} leads")
    with grpc.insecure_channel(standby) as channel, leads, rpc.translated(standby):
        list(jobs_pb2_grpc.JobsStub(channel).List(jobs_pb2.ListRequest(), timeout=5))
    leader = services[0].endpoint()
    with pytest.raises(EndpointError, match=f"{standby} says: this reorder service stands by; {leader} leads"):
        rpc.await_reorder_service(standby, timeout_s=0.1)


@pytest.mark.slow
def test_one_that_stands_by_is_well_but_not_ready(cluster, store, capsys) -> None:
    leader, standby = (service.endpoint() for service in cluster.start_reorders(store.url))
    assert [main(["health", endpoint]) for endpoint in (leader, standby)] == [0, 0]
    assert [main(["health", endpoint, "--ready"]) for endpoint in (leader, standby)] == [0, 1]
    assert capsys.readouterr().out.split("\n") == ["serving", "standing by"] * 2 + [""]


@pytest.mark.slow
def test_one_whose_store_is_away_says_so(cluster, store) -> None:
    cluster.start_reorders(store.url, count=1)
    store.kill()
    wait_until(lambda: rpc.stands_by(cluster.endpoint))
    with pytest.raises(EndpointError, match="the state store refuses or does not answer"):
        rpc.await_reorder_service(cluster.endpoint, timeout_s=0.1)


@pytest.mark.slow
def test_of_two_leaders_of_one_term_of_a_store_that_was_put_back_one_serves(cluster, store, tmp_path) -> None:
    first, second = cluster.start_reorders(store.url)
    store.keep(tmp_path / "a second ago")
    os.kill(first.pid, signal.SIGTERM)
    wait_until(lambda: rpc.is_serving(second.endpoint(), "headrace.v1.Jobs"))
    os.kill(second.pid, signal.SIGSTOP)
    store.put_back(tmp_path / "a second ago")
    cluster.start_reorder(store=store.url)  # it leads in the term in which the second one believes to lead
    rpc.await_reorder_service(cluster.endpoint)
    os.kill(second.pid, signal.SIGCONT)
    wait_until(lambda: not rpc.is_serving(second.endpoint(), "headrace.v1.Jobs"))
    assert rpc.is_serving(cluster.endpoint, "headrace.v1.Jobs")
    with redis.Redis(port=store.port, decode_responses=True) as client:
        assert client.get("headrace:leader").startswith(cluster.endpoint)


def test_a_new_topology_plans_the_same_global_batches_and_refuses_the_ranks_of_the_old_one(calm, spec, undisturbed) -> None:
    job = calm.submit(spec("elastic", steps=STEPS))
    done = consume_until(calm, job, 3, replan(calm, job, replicas=3, speeds=[1, 1, 0.5]))
    done += consume_until(calm, job, 3, replan(calm, job, replicas=1, microbatches=4))
    done += calm.consume(job)
    assert done == list(range(STEPS))
    assert ledger_sha256(calm.ledger(job)) == undisturbed(STEPS)
    with calm.client() as client:
        status = client.show(job)
        assert status.generation == 3
    with pytest.raises(ConflictError, match="topology cannot change"):
        trainer.replan(calm.endpoint, job=job, replicas=2)


def replan(cluster: Any, job: str, **fields: Any) -> Callable[[], None]:
    def change() -> None:
        trainer.replan(cluster.endpoint, job=job, **fields)
        with pytest.raises(ConflictError, match="generation"):
            trainer.replan(cluster.endpoint, job=job, replicas=7, generation=1)

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


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)  # polls a real service


def test_a_paused_job_plans_no_further_step_until_it_is_resumed(calm, spec) -> None:
    job = calm.submit(spec("paused", steps=STEPS, window=2))
    with trainer.connect(calm.endpoint, job=job) as loader, calm.client() as client:
        steps = iter(loader)
        step = next(steps)
        wait_until(lambda: client.show(job).planned_steps == 2)  # nothing is on its way to be planned
        client.pause(job, True)
        calm.wait_for_state(job, "paused")
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


def test_a_reset_job_gives_its_steps_once_more(calm, spec, undisturbed) -> None:
    job = calm.submit(spec("reset", steps=STEPS))
    calm.consume(job)
    with calm.client() as client:
        assert client.reset(job, 3).committed_steps == 3
    assert calm.consume(job) == list(range(3, STEPS))
    assert ledger_sha256(calm.ledger(job)) == undisturbed(STEPS)


def test_steps_below_0_are_refused(calm, spec) -> None:
    job = calm.submit(spec("signs", steps=2))
    calm.consume(job)
    resumed = sessions_pb2.OpenRequest(job=job, num_ranks=1, resume_step=-1)
    with calm.client() as client, grpc.insecure_channel(calm.endpoint) as channel:
        for refused in (
            lambda: client.reset(job, -1),
            lambda: rpc.call(sessions_pb2_grpc.SessionsStub(channel).Open, resumed, calm.endpoint),
            lambda: list(read_ledger(channel, jobs_pb2.LedgerRequest(job=job, start=-1))),
        ):
            with pytest.raises(UserError, match="count from 0"):
                refused()
        assert client.show(job).committed_steps == len(calm.ledger(job)) == 2


def read_ledger(channel: grpc.Channel, request: jobs_pb2.LedgerRequest) -> Iterator[jobs_pb2.LedgerEntry]:
    with rpc.translated("it"):
        yield from jobs_pb2_grpc.JobsStub(channel).Ledger(request)


@pytest.mark.slow
def test_fleet_and_replicas_change_in_mid_epoch_and_no_batch_changes(cluster, spec, undisturbed) -> None:
    """Preprocessors 1 -> 4 -> 2, replicas 4 -> 3 -> 4, a rank for each replica."""
    cluster.start_reorder()
    cluster.add_preprocessors(1)
    job = cluster.submit(spec("elastic", steps=STEPS, topology={"replicas": 4, "microbatches": 2}))
    consume_together(cluster, job, ranks=4, stop=3)
    cluster.add_preprocessors(3)
    trainer.replan(cluster.endpoint, job=job, replicas=3)
    consume_together(cluster, job, ranks=3, stop=6)
    for process in cluster.preprocessors[:2]:
        os.kill(process.pid, signal.SIGKILL)
    trainer.replan(cluster.endpoint, job=job, replicas=4)
    consume_together(cluster, job, ranks=4, stop=STEPS)
    assert ledger_sha256(cluster.ledger(job)) == undisturbed(STEPS)


def consume_together(cluster: Any, job: str, *, ranks: int, stop: int) -> None:
    """Every rank consumes and commits the steps before `stop`."""

    def consume(rank: int) -> None:
        with trainer.connect(cluster.endpoint, job=job, rank=rank, num_ranks=ranks) as loader:
            for step in loader:
                list(step)
                loader.commit(step)
                if step.index == stop - 1:
                    return

    with ThreadPoolExecutor(ranks) as pool:
        for done in [pool.submit(consume, rank) for rank in range(ranks)]:
            done.result()


@pytest.mark.slow
def test_a_store_that_is_full_holds_commits_up_until_it_has_room(cluster, spec, store, undisturbed) -> None:
    cluster.start_reorders(store.url, count=1)
    cluster.add_preprocessors(1)
    held: list[bool] = []

    def disturb(step: trainer.Step) -> None:
        if step.index == 2:
            with redis.Redis(port=store.port) as client:
                client.config_set("maxmemory", 1)
            threading.Timer(1.5, make_room).start()

    def make_room() -> None:
        with redis.Redis(port=store.port) as client:
            held.append(int(client.hget("headrace:{disturbed}:job", "cursor")) == 2)
            client.config_set("maxmemory", 0)

    job = cluster.submit(spec("disturbed", steps=STEPS))
    assert cluster.consume(job, disturb) == list(range(STEPS))
    assert held == [True]
    assert ledger_sha256(cluster.ledger(job)) == undisturbed(STEPS)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"replicas": 0}, "topology: replicas: .*greater than or equal to 1"),
        ({"stages": {"llm": 0, "encoder": 1}}, "topology: stages.llm"),
        ({"stages": {"nose": 1}}, "must name 'llm' and either 'encoder'"),
        ({"stages": {"encoder": 1, "llm": 1, "generator": 1}}, "model 'tiny' has none"),
        ({"speeds": [1.0]}, "speeds must be one for each of 2 replicas"),
    ],
)
def test_a_topology_that_is_none_changes_nothing(calm, spec, fields, words) -> None:
    job = calm.submit(spec("same-topology", steps=1))
    with pytest.raises(UserError, match=words) as caught:
        trainer.replan(calm.endpoint, job=job, **fields)
    assert "\n" not in str(caught.value)
    with calm.client() as client:
        assert client.show(job).generation == 1
