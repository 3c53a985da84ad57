"""A job that goes back to an earlier step, or is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from headrace.errors import ConflictError, UserError
from tests.unit.reorder_service.job_world import Start, commit, consume, names, submit, told_by


async def test_going_back_undoes_later_commits_and_the_same_samples_come_again(start: Start) -> None:
    run = await submit(await start())
    await consume(run, run.open_session(0, 1))
    whole = await names(run)
    await run.rewind(2)
    assert (run.cursor.state, run.cursor.committed, run.cursor.progress.samples) == ("RUNNING", 2, 8)
    assert await consume(run, run.open_session(0, 1)) == [2, 3, 4, 5]
    assert (run.cursor.state, await names(run)) == ("DONE", whole)


async def test_ranks_may_all_ask_to_go_back_at_once(start: Start) -> None:
    run = await submit(await start())
    await consume(run, run.open_session(0, 1), stop=4)
    await asyncio.gather(*(run.rewind(1) for _ in range(4)))
    assert (run.cursor.committed, run.cursor.progress.samples, len(await names(run))) == (1, 4, 1)
    assert await consume(run, run.open_session(0, 1)) == [1, 2, 3, 4, 5]


async def test_a_commit_that_meets_a_rewind_does_not_tear_the_ledger(start: Start) -> None:
    run = await submit(await start())
    session = run.open_session(0, 1)
    await consume(run, session, stop=3)
    committing = asyncio.create_task(run.commit(session, 3, commit()))
    await asyncio.sleep(0)
    await run.rewind(1)
    await asyncio.gather(committing, return_exceptions=True)
    assert (run.cursor.committed, len(await names(run))) == (1, 1)
    assert await consume(run, run.open_session(0, 1)) == [1, 2, 3, 4, 5]


async def test_going_back_further_than_the_commits_reach_is_refused(start: Start) -> None:
    run = await submit(await start())
    with pytest.raises(ConflictError, match="committed only 0"):
        await run.rewind(1)


@pytest.mark.parametrize("step", [-1, -(2**63)])
async def test_going_back_before_the_first_step_is_refused_and_changes_nothing(start: Start, step: int) -> None:
    run = await submit(await start())
    await consume(run, run.open_session(0, 1), stop=3)
    with pytest.raises(UserError, match=f"step {step}: steps count from 0"):
        await run.rewind(step)
    assert (run.cursor.committed, run.generation, len(await names(run))) == (3, 1, 3)


async def test_a_job_that_was_cancelled_stays_so(start: Start) -> None:
    service = await start()
    run = await submit(service)
    session = run.open_session(0, 1)
    await consume(run, session, stop=2)
    await run.cancel()
    with pytest.raises(ConflictError, match="cancelled"):
        await run.commit(session, 2, commit())
    await run.rewind(1)
    assert (run.cursor.state, run.cursor.committed) == ("CANCELLED", 2)
    assert not run._fleet.members["p"].leases
    assert not run.cursor.steps
    again = await (await start()).load("job")
    assert again.cursor.state == "CANCELLED"
    await again.wait_ready()
    events = [event async for event in told_by(again.open_session(0, 1))]
    assert [getattr(event, "message", "") for event in events] == [again.cursor.message]
    assert again.cursor.message.startswith("job 'job' was cancelled: submit it by another name, or again after ")


async def test_what_a_process_committed_before_it_was_lost_is_not_its_successor_s(start: Start) -> None:
    """It goes back to a model without the step: that is not to be in the ledger before it has applied it."""
    run = await submit(await start())
    ranks = [run.open_session(rank, 2) for rank in range(2)]
    assert not await run.commit(ranks[1], 0, commit())
    again = run.open_session(1, 2)
    assert not await run.commit(ranks[0], 0, commit())
    assert await run.commit(again, 0, commit())
    assert not await run.commit(ranks[0], 1, commit())
    run.open_session(0, 2, run.generation)  # the same process, after a break
    assert await run.commit(again, 1, commit())
