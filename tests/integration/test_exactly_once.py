"""Design section 3: the content of every global batch is fixed, and every sample is consumed once, whatever happens."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter

import pytest

import trainer
from headrace.errors import ConflictError, SupersededError, UserError
from headrace.ledger import ledger_sha256
from headrace.spec import STRATEGIES
from headrace.transport.base import TRANSPORTS

pytestmark = pytest.mark.integration


def names(ledger) -> list[str]:
    return [name for entry in ledger for name in entry.samples]


def test_an_epoch_has_every_sample_once_however_many_preprocessors_and_whatever_the_strategy(cluster, spec) -> None:
    cluster.start_reorder()
    hashes = {}
    for count, added in [(1, 1), (2, 1), (4, 2)]:
        cluster.add_preprocessors(added)
        job = cluster.submit(spec(f"with-{count}", strategy="disttrain"))
        cluster.consume(job)
        hashes[count] = ledger_sha256(cluster.ledger(job))
    for strategy in STRATEGIES:
        job = cluster.submit(spec(f"by-{strategy}", strategy=strategy))
        cluster.consume(job)
        hashes[strategy] = ledger_sha256(cluster.ledger(job))
    apart = {"replicas": 2, "microbatches": 3, "stages": {"vision": 1, "audio": 1, "llm": 2}}
    job = cluster.submit(spec("packed", topology=apart, text={"max_tokens": 4096}, pack_tokens=4096))
    cluster.consume(job)
    hashes["packed"] = ledger_sha256(cluster.ledger(job))
    assert len(set(hashes.values())) == 1

    status = cluster.wait_for_state(job, "done")
    consumed = Counter(names(cluster.ledger(job)))
    assert set(consumed.values()) == {1}
    with cluster.client() as client:
        assert status.committed_samples == len(consumed)
        assert not client.quarantine(job)

    other = cluster.submit(spec("another-seed", seed=1))
    cluster.consume(other)
    assert ledger_sha256(cluster.ledger(other)) != hashes[1]
    assert Counter(names(cluster.ledger(other))) == consumed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_losing_preprocessors_in_mid_run_changes_nothing(cluster, spec, number) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(2)
    undisturbed = cluster.submit(spec("undisturbed", steps=8))
    cluster.consume(undisturbed)

    def disturb(step: trainer.Step) -> None:
        if step.index == 1:
            os.kill(cluster.preprocessors[0].pid, number)
        if step.index == 4:  # now nobody is left, until another comes
            os.kill(cluster.preprocessors[1].pid, number)
            cluster.add_preprocessors(1)

    disturbed = cluster.submit(spec("disturbed", steps=8))
    assert cluster.consume(disturbed, disturb) == list(range(8))
    assert ledger_sha256(cluster.ledger(disturbed)) == ledger_sha256(cluster.ledger(undisturbed))


def test_the_reorder_service_goes_on_where_it_was_killed(cluster, spec) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(1)
    undisturbed = cluster.submit(spec("undisturbed", steps=8))
    cluster.consume(undisturbed)
    expected = ledger_sha256(cluster.ledger(undisturbed))

    def disturb(step: trainer.Step) -> None:
        if step.index == 3:
            os.kill(cluster.reorder.pid, signal.SIGKILL)
            cluster.reorder.wait(5.0)
            cluster.start_reorder(listen=cluster.endpoint)

    disturbed = cluster.submit(spec("disturbed", steps=8))
    assert cluster.consume(disturbed, disturb) == list(range(8))
    assert ledger_sha256(cluster.ledger(disturbed)) == expected


def test_a_trainer_that_died_before_its_commit_gets_the_same_step_again(cluster, spec) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(1)
    job = cluster.submit(spec("interrupted", steps=4))

    def sample_ids(step: trainer.Step) -> list[int]:
        return sorted(i for microbatch in step for i in microbatch.data.sample_ids.tolist())

    with trainer.connect(cluster.endpoint, job=job) as loader:
        steps = iter(loader)
        first = next(steps)
        with pytest.raises(ConflictError, match="consumed"):
            loader.commit(first)
        sample_ids(first)
        loader.commit(first)
        lost = sample_ids(next(steps))
    with trainer.connect(cluster.endpoint, job=job) as loader:
        step = next(iter(loader))
        assert step.index == 1
        assert sample_ids(step) == lost


def test_a_restored_state_undoes_later_commits(cluster, spec) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(1)
    undisturbed = cluster.submit(spec("undisturbed", steps=6))
    cluster.consume(undisturbed)

    job = cluster.submit(spec("restored", steps=6))
    with trainer.connect(cluster.endpoint, job=job) as loader:
        for step in loader:
            list(step)
            loader.commit(step)
            if step.index == 1:
                state = loader.state_dict()
            if step.index == 4:
                break
    assert (state["job"], state["step"]) == (job, 2)
    restored = trainer.connect(cluster.endpoint, job=job)
    restored.load_state_dict(state)
    resumed = []
    with restored as loader:
        for step in loader:
            list(step)
            loader.commit(step)
            resumed.append(step.index)
    assert resumed == [2, 3, 4, 5]
    assert ledger_sha256(cluster.ledger(job)) == ledger_sha256(cluster.ledger(undisturbed))

    with pytest.raises(ConflictError, match="is of job"):
        trainer.connect(cluster.endpoint, job=undisturbed).load_state_dict(state)


def test_two_ranks_share_the_replicas_and_commit_together(cluster, spec) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(1)
    job = cluster.submit(spec("shared", steps=5))
    seen: dict[int, list[int]] = {0: [], 1: []}

    def consume(rank: int) -> None:
        with trainer.connect(cluster.endpoint, job=job, rank=rank, num_ranks=2) as loader:
            for step in loader:
                for microbatch in step:
                    assert microbatch.replica == rank
                    seen[rank] += microbatch.data.sample_ids.tolist()
                loader.commit(step)

    threads = [threading.Thread(target=consume, args=(rank,)) for rank in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert sorted(seen[0] + seen[1]) == list(range(5 * 16))
    assert len(cluster.ledger(job)) == 5


def test_a_second_process_for_a_rank_takes_over(cluster, spec) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(1)
    job = cluster.submit(spec("twice"))
    with trainer.connect(cluster.endpoint, job=job) as former:
        first = next(iter(former))
        list(first)
        with trainer.connect(cluster.endpoint, job=job) as latter:
            assert next(iter(latter)).index == first.index
            with pytest.raises(SupersededError):
                former.commit(first)
    with pytest.raises(UserError, match="at most 2"):
        trainer.connect(cluster.endpoint, job=job, rank=2, num_ranks=3).open()


def test_a_store_smaller_than_a_step_slows_down_but_never_stands_still(cluster, spec) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(2, budget_mib=1)
    job = cluster.submit(spec("tight", global_batch=64, image={"max_pixels": 896 * 896}, steps=3))
    assert cluster.consume(job) == [0, 1, 2]


def test_microbatches_hold_what_the_plan_says(cluster, spec) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(2)
    job = cluster.submit(spec("ordered", steps=2, part_samples=2))
    with trainer.connect(cluster.endpoint, job=job) as loader:
        for step in loader:
            got = {(m.replica, m.index): sorted(m.data.sample_ids.tolist()) for m in step}
            loader.commit(step)
            with cluster.client() as client:
                _, plan, _, _ = client.show_plan(job, step.index)
            assert got == {
                (r, k): sorted(microbatch.sample_ids)
                for r, replica in enumerate(plan.replicas)
                for k, microbatch in enumerate(replica)
            }


def test_every_transport_brings_the_same_samples(cluster, spec) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(2, "--ucx")
    samples = {}
    for transport in TRANSPORTS:
        job = cluster.submit(spec(f"by-{transport}", steps=3))
        assert cluster.consume(job, transports=(transport,)) == [0, 1, 2]
        samples[transport] = [entry.samples for entry in cluster.ledger(job)]
    assert samples["shared_memory"] == samples["ucx"] == samples["flight"]


def test_services_on_different_addresses_work_together(cluster, spec) -> None:
    cluster.start_reorder(listen="127.0.0.2:0")
    cluster.add_preprocessors(1, listen="127.0.0.3:0")
    cluster.add_preprocessors(1, listen="127.0.0.4:0")
    job = cluster.submit(spec("spread", steps=4))
    assert cluster.consume(job) == list(range(4))
    with cluster.client() as client:
        hosts = {member.endpoint.rpartition(":")[0] for member in client.show(job).preprocessors}
    assert hosts == {"127.0.0.3", "127.0.0.4"}


def test_a_name_used_again_after_the_store_was_lost_gets_its_own_samples(cluster, spec) -> None:
    """A preprocessor that outlives the store may still hold parts of a former job of that name."""
    cluster.start_reorder()
    cluster.add_preprocessors(1)
    former = cluster.submit(spec("same-name", steps=4))
    with trainer.connect(cluster.endpoint, job=former) as loader:
        list(next(iter(loader)))
    cluster.reorder.terminate()
    cluster.reorder.wait(5.0)
    cluster.start_reorder(listen=cluster.endpoint, store=f"embedded:{cluster.folder / 'another-store'}")
    latter = cluster.submit(spec("same-name", steps=4, seed=9))
    names = {}
    with trainer.connect(cluster.endpoint, job=latter) as loader:
        for step in loader:
            tokens = sorted(microbatch.data.input_ids.tolist() for microbatch in step)
            loader.commit(step)
            names[step.index] = tokens
    again = cluster.submit(spec("another-name", steps=4, seed=9))
    with trainer.connect(cluster.endpoint, job=again) as loader:
        for step in loader:
            assert sorted(microbatch.data.input_ids.tolist() for microbatch in step) == names[step.index]
            loader.commit(step)
