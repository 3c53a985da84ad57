"""A job between its store, its fleet and its trainers: its steps, their commits, and a service that starts anew."""

from __future__ import annotations

import asyncio
import json

import pytest

from headrace.errors import ConflictError, SpecError, SupersededError
from headrace.spec import load_spec_json, parse_spec
from tests.unit.reorder_service.job_world import ROWS, Preprocessor, Start, commit, consume, names, submit, told_step, until


async def test_a_job_runs_to_its_end_and_every_sample_is_in_the_ledger_once(start: Start) -> None:
    run = await submit(await start())
    assert await consume(run, run.open_session(0, 1)) == list(range(6))
    assert run.cursor.state == "DONE"
    ledger = [name for step in await names(run) for name in step]
    assert sorted(ledger) == sorted(f"d/a/{row}" for row in range(ROWS))
    assert (run.cursor.progress.samples, run.cursor.progress.first_loss, run.cursor.progress.last_loss) == (ROWS, 0.0, 5.0)
    assert not run._fleet.members["p"].kept


async def test_the_window_bounds_what_is_planned_ahead(start: Start) -> None:
    run = await submit(await start())
    session = run.open_session(0, 1)
    await told_step(session, 1)
    assert sorted(run.cursor.steps) == [0, 1]
    with pytest.raises(ConflictError, match="step 2 of job 'job' is not planned"):
        await run.commit(session, 2, commit())


async def test_a_step_is_committed_when_every_rank_has_and_repeating_is_harmless(start: Start) -> None:
    run = await submit(await start())
    ranks = [run.open_session(rank, 2) for rank in range(2)]
    assert not await run.commit(ranks[0], 0, commit())
    assert not await run.commit(ranks[0], 0, commit())
    assert not await run.commit(ranks[0], 1, commit())
    assert await run.commit(ranks[1], 0, commit())
    assert await run.commit(ranks[0], 0, commit())
    assert (run.cursor.committed, len(await names(run))) == (1, 1)


async def test_ranks_that_come_back_in_another_number_commit_anew(start: Start) -> None:
    """What rank 1 of 3 had committed must not count as rank 1 of 2's."""
    run = await submit(await start(), replicas=3)
    three = [run.open_session(rank, 3) for rank in range(3)]
    for session in three[1:]:
        assert not await run.commit(session, 0, commit())
    two = [run.open_session(rank, 2) for rank in range(2)]
    assert not await run.commit(two[0], 0, commit())
    with pytest.raises(SupersededError):
        await run.commit(three[0], 0, commit())
    assert await run.commit(two[1], 0, commit())


async def test_a_commit_after_a_restart_waits_until_its_step_is_planned_again(start: Start) -> None:
    run = await submit(await start())
    first = await told_step(run.open_session(0, 1), 0)
    service = await start()
    run = service.find("job")
    await run.wait_ready()
    committing = asyncio.create_task(run.commit(run.open_session(0, 1), 0, commit()))
    await asyncio.sleep(0)
    assert not committing.done(), "no preprocessor has come back yet"
    Preprocessor(service=service).join()
    assert await committing
    assert await names(run) == [tuple(sorted(probe.name for probe in first.probes.values()))]


async def test_a_restarted_service_tells_the_same_steps_with_the_same_tickets(start: Start) -> None:
    run = await submit(await start())
    before = await told_step(run.open_session(0, 1), 1)
    service = await start()
    run = service.find("job")
    Preprocessor(service=service).join()
    after = await told_step(run.open_session(0, 1), 1)
    assert before is not after
    assert (before.refs, before.plan, list(before.parts)) == (after.refs, after.plan, list(after.parts))


async def test_a_job_whose_longest_sample_fits_no_microbatch_is_refused_unless_it_was_taken_before(start: Start) -> None:
    service = await start()
    document = {"name": "job", "sources": [{"path": "/d"}], "execution": {"trainer": "colocated", "max_tokens": 100}}
    with pytest.raises(SpecError, match=r"text.max_tokens \(32768\) is above execution.max_tokens \(100\)"):
        await service.submit(json.dumps(document))
    assert await service.store.create_job("job", load_spec_json(json.dumps(document)).to_json())
    service = await start()
    assert await service.submit(json.dumps(document)) is service.find("job")


async def test_a_commit_whose_caller_goes_away_is_whole(start: Start) -> None:
    run = await submit(await start())
    session = run.open_session(0, 1)
    await told_step(session, 0)
    committing = asyncio.create_task(run.commit(session, 0, commit()))
    await until(run.cursor.moving.locked)
    committing.cancel()
    await asyncio.gather(committing, return_exceptions=True)
    again = run.open_session(0, 1)
    await told_step(again, 2)  # the window has moved
    assert (run.cursor.committed, len(await names(run))) == (1, 1)


async def test_submitting_the_same_spec_again_and_at_once_gives_one_job(start: Start) -> None:
    service = await start()
    runs = await asyncio.gather(*(submit(service, join=False) for _ in range(3)))
    assert runs[0] is runs[1] is runs[2]
    with pytest.raises(ConflictError, match="another spec"):
        await submit(service, join=False, seed=1)
    assert await service.store.jobs() == ["job"]


async def test_a_job_with_the_costs_of_another_model_is_not_taken(start: Start) -> None:
    service = await start()
    coefficients = {"units": {"llm": {"layers": 28, "linear_s": 1.0}}}
    with pytest.raises(SpecError, match="have 28 layers of llm, but model 'tiny' has 4"):
        await submit(service, join=False, execution={"coefficients": coefficients})
    assert await service.store.jobs() == []


async def test_a_submission_that_was_cut_off_is_taken_up_by_the_next(start: Start) -> None:
    service = await start()
    spec = parse_spec({"name": "cut", "sources": [{"path": "/d"}]})
    await service.store.create_job("cut", spec.to_json())
    assert (await service.submit(spec.to_json())).name == "cut"
