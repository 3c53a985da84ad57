"""What a user changes of a job that runs: topology, weights, pause."""

from __future__ import annotations

from collections import Counter

import pytest

from headrace.errors import ConflictError, SpecError, SupersededError, UserError
from headrace.execution_spec import ExecutionSpec, UnitExecution
from headrace.topology_spec import TopologySpec
from tests.unit.reorder_service.job_world import Preprocessor, Start, commit, consume, names, submit, told_step, until


async def test_a_new_topology_plans_the_uncommitted_steps_anew(start: Start) -> None:
    run = await submit(await start(), replicas=2)
    stale = run.open_session(0, 1)
    before = await told_step(stale, 1)
    await run.set_topology(TopologySpec(replicas=1, microbatches=4))
    after = await told_step(run.open_session(0, 1), 1)
    assert after.plan is not None
    assert before.plan is not None
    assert (len(before.plan.replicas), len(after.plan.replicas)) == (2, 1)
    assert after.refs == before.refs
    assert not after.parts.keys() & before.parts.keys()
    assert after.plan.generation == run.generation == 2
    with pytest.raises(SupersededError, match="generation 2 now; connect again"):
        await run.commit(stale, 0, commit())
    with pytest.raises(SupersededError, match="connect again"):
        run.open_session(0, 1, generation=1)


async def test_the_same_topology_again_changes_nothing(start: Start) -> None:
    run = await submit(await start(), replicas=2)
    await run.set_topology(run.planned_spec.topology)
    assert run.generation == 1


async def test_a_topology_outlives_the_service(start: Start) -> None:
    run = await submit(await start(), replicas=2)
    await run.set_topology(TopologySpec(replicas=3))
    again = (await start()).find("job")
    assert (again.planned_spec.topology.replicas, again.generation) == (3, 2)


async def test_trainers_that_run_something_else_are_planned_for_also_by_whoever_takes_over(start: Start) -> None:
    run = await submit(await start(), replicas=2)
    frozen = ExecutionSpec(units={"encoder": UnitExecution(frozen=True)})
    await run.set_topology(run.planned_spec.topology, execution=frozen)
    again = (await start()).find("job")
    assert [(job.planned_spec.execution, job.generation) for job in (run, again)] == [(frozen, 2)] * 2
    assert again.spec.execution == ExecutionSpec(), "it is still the job that was submitted"
    await again.set_topology(TopologySpec(replicas=3))
    assert again.planned_spec.execution == frozen
    with pytest.raises(SpecError, match=r"execution\.units names 'audio', but topology\.stages has encoder, llm"):
        await again.set_topology(TopologySpec(), execution=ExecutionSpec(units={"audio": UnitExecution(frozen=True)}))
    assert again.generation == 3


async def test_other_weights_hold_from_their_step_on_and_again_after_a_reset(start: Start) -> None:
    sources = [{"path": "/d", "name": "a", "weight": 1}, {"path": "/d", "name": "b", "weight": 1}]
    run = await submit(await start(), sources=sources, steps=8)
    await consume(run, run.open_session(0, 1), stop=1)
    await until(lambda: run.cursor.next_step == 3)
    with pytest.raises(ConflictError, match="steps before 3 of job 'job' are planned already"):
        await run.set_weights(2, {"a": 0, "b": 1})
    with pytest.raises(UserError, match="every source once: a, b; got a"):
        await run.set_weights(4, {"a": 1})
    with pytest.raises(UserError, match="weights must be numbers"):
        await run.set_weights(4, {"a": 0, "b": 0})
    await run.set_weights(4, {"a": 0, "b": 1})
    await consume(run, run.open_session(0, 1))
    whole = await names(run)
    per_step = [Counter(name.split("/")[0] for name in step) for step in whole]
    assert per_step[:4] == [Counter(a=2, b=2)] * 4
    assert per_step[4:] == [Counter(b=4)] * 4
    assert run.cursor.progress.delivered["b"][0] == 4 * 2 + 4 * 4
    await run.rewind(2)
    await consume(run, run.open_session(0, 1))
    assert await names(run) == whole


async def test_a_paused_job_plans_no_further_step(start: Start) -> None:
    run = await submit(await start())
    session = run.open_session(0, 1)
    await told_step(session, 1)
    await run.pause(True)
    assert await consume(run, run.open_session(0, 1), stop=2) == [0, 1]
    assert not run.cursor.steps
    service = await start()
    again = service.find("job")
    Preprocessor(service=service).join()
    assert again.paused
    await again.wait_ready()
    await again.pause(False)
    assert await consume(again, again.open_session(0, 1), stop=3) == [2]


async def test_a_replica_of_three_times_the_speed_gets_three_times_the_samples(start: Start) -> None:
    run = await submit(await start(), replicas=2)
    await run.set_topology(TopologySpec(replicas=2, microbatches=1, speeds=(1.0, 3.0)))
    step = await told_step(run.open_session(0, 1), 0)
    assert step.plan is not None
    assert [len(replica[0].sample_ids) for replica in step.plan.replicas] == [1, 3]
