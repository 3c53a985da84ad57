"""Design section 3: the content of every global batch is fixed, and every sample is consumed once, whatever happens."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter

import pytest

from headrace import trainer
from headrace.errors import ConflictError
from headrace.ledger import ledger_sha256
from headrace.spec import STRATEGIES
from headrace.transport.base import TRANSPORTS

pytestmark = pytest.mark.integration


def names(ledger) -> list[str]:
    return [name for entry in ledger for name in entry.samples]


@pytest.mark.slow
def test_an_epoch_has_every_sample_once_however_many_preprocessors(cluster, calm, spec) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(1)
    job = cluster.submit(spec("epoch"))
    cluster.consume(job)
    status = cluster.wait_for_state(job, "done")
    consumed = Counter(names(cluster.ledger(job)))
    assert set(consumed.values()) == {1}
    with cluster.client() as client:
        assert status.committed_samples == len(consumed)
        assert not client.quarantine(job)

    calm.consume(calm.submit(spec("epoch")))
    assert ledger_sha256(calm.ledger("epoch")) == ledger_sha256(cluster.ledger(job))
    calm.consume(calm.submit(spec("another-seed", seed=1)))
    assert ledger_sha256(calm.ledger("another-seed")) != ledger_sha256(cluster.ledger(job))
    assert Counter(names(calm.ledger("another-seed"))) == consumed


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_strategy_changes_a_global_batch(calm, spec, undisturbed, strategy) -> None:
    job = calm.submit(spec(f"by-{strategy}", strategy=strategy, steps=8))
    calm.consume(job)
    assert ledger_sha256(calm.ledger(job)) == undisturbed(8)


def test_neither_packing_nor_stages_change_a_global_batch(calm, spec, undisturbed) -> None:
    apart = {"replicas": 2, "microbatches": 3, "stages": {"vision": 1, "audio": 1, "llm": 2}}
    job = calm.submit(spec("packed", topology=apart, text={"max_tokens": 4096}, pack_tokens=4096, steps=8))
    num_packs = num_samples = 0
    with trainer.connect(calm.endpoint, job=job) as loader:
        for step in loader:
            for data in (microbatch.data for microbatch in step):
                assert all(data.pack_offsets.diff() <= 4096)
                num_packs, num_samples = num_packs + len(data.pack_offsets) - 1, num_samples + len(data.sample_ids)
            loader.commit(step)
    assert num_packs < num_samples
    assert ledger_sha256(calm.ledger(job)) == undisturbed(8)


def test_losing_preprocessors_in_mid_run_changes_nothing(cluster, spec, undisturbed) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(2)
    cluster.wait_for_preprocessors()

    def disturb(step: trainer.Step) -> None:
        if step.index == 1:
            os.kill(cluster.preprocessors[0].pid, signal.SIGKILL)
        if step.index == 4:  # now nobody is left, until another comes
            os.kill(cluster.preprocessors[1].pid, signal.SIGTERM)
            cluster.add_preprocessors(1)

    disturbed = cluster.submit(spec("disturbed", steps=8))
    assert cluster.consume(disturbed, disturb) == list(range(8))
    assert ledger_sha256(cluster.ledger(disturbed)) == undisturbed(8)


def test_the_reorder_service_goes_on_where_it_was_killed(cluster, spec, undisturbed) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(1)

    def disturb(step: trainer.Step) -> None:
        if step.index == 3:
            os.kill(cluster.reorder.pid, signal.SIGKILL)
            cluster.reorder.wait(5.0)
            cluster.start_reorder(listen=cluster.endpoint)

    disturbed = cluster.submit(spec("disturbed", steps=8))
    assert cluster.consume(disturbed, disturb) == list(range(8))
    assert ledger_sha256(cluster.ledger(disturbed)) == undisturbed(8)


def test_a_trainer_that_died_before_its_commit_gets_the_same_step_again(calm, spec) -> None:
    job = calm.submit(spec("interrupted", steps=4))

    def sample_ids(step: trainer.Step) -> list[int]:
        return sorted(i for microbatch in step for i in microbatch.data.sample_ids.tolist())

    with trainer.connect(calm.endpoint, job=job) as loader:
        steps = iter(loader)
        first = next(steps)
        with pytest.raises(ConflictError, match="consumed"):
            loader.commit(first)
        sample_ids(first)
        loader.commit(first)
        lost = sample_ids(next(steps))
    with trainer.connect(calm.endpoint, job=job) as loader:
        step = next(iter(loader))
        assert step.index == 1
        assert sample_ids(step) == lost


def test_a_restored_state_undoes_later_commits(calm, spec, undisturbed) -> None:
    job = calm.submit(spec("restored", steps=8))
    with trainer.connect(calm.endpoint, job=job) as loader:
        for step in loader:
            list(step)
            loader.commit(step)
            if step.index == 1:
                state = loader.state_dict()
            if step.index == 4:
                break
    assert (state["job"], state["step"]) == (job, 2)
    restored = trainer.connect(calm.endpoint, job=job)
    restored.load_state_dict(state)
    resumed = []
    with restored as loader:
        for step in loader:
            list(step)
            loader.commit(step)
            resumed.append(step.index)
    assert resumed == [2, 3, 4, 5, 6, 7]
    assert ledger_sha256(calm.ledger(job)) == undisturbed(8)

    with pytest.raises(ConflictError, match="is of job"):
        trainer.connect(calm.endpoint, job="another").load_state_dict(state)


def test_two_ranks_share_the_replicas_and_commit_together(calm, spec) -> None:
    job = calm.submit(spec("shared", steps=5))
    seen: dict[int, list[int]] = {0: [], 1: []}

    def consume(rank: int) -> None:
        with trainer.connect(calm.endpoint, job=job, rank=rank, num_ranks=2) as loader:
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
    assert len(calm.ledger(job)) == 5


@pytest.mark.slow
def test_a_store_smaller_than_a_step_slows_down_but_never_stands_still(cluster, spec) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(2, budget_mib=1)
    job = cluster.submit(spec("tight", image={"max_pixels": 896 * 896}, steps=3))
    assert cluster.consume(job) == [0, 1, 2]


def test_microbatches_hold_what_the_plan_says(calm, spec) -> None:
    job = calm.submit(spec("ordered", steps=2, part_samples=2))
    with trainer.connect(calm.endpoint, job=job) as loader:
        for step in loader:
            got = {(m.replica, m.index): sorted(m.data.sample_ids.tolist()) for m in step}
            loader.commit(step)
            with calm.client() as client:
                _, plan, _, _ = client.show_plan(job, step.index)
            assert got == {
                (r, k): sorted(microbatch.sample_ids)
                for r, replica in enumerate(plan.replicas)
                for k, microbatch in enumerate(replica)
            }


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_brings_the_same_samples(calm, spec, undisturbed, transport) -> None:
    job = calm.submit(spec(f"through-{transport}", steps=8))
    assert calm.consume(job, transports=(transport,)) == list(range(8))
    assert ledger_sha256(calm.ledger(job)) == undisturbed(8)


@pytest.mark.slow
def test_services_on_different_addresses_work_together(cluster, spec) -> None:
    cluster.start_reorder(listen="127.0.0.2:0")
    cluster.add_preprocessors(1, listen="127.0.0.3:0")
    job = cluster.submit(spec("spread", steps=4))
    assert cluster.consume(job) == list(range(4))
    with cluster.client() as client:
        hosts = {member.endpoint.rpartition(":")[0] for member in client.show(job).preprocessors}
    assert hosts == {"127.0.0.3"}


@pytest.mark.slow
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
