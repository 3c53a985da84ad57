"""From which step ranks go on: states that are older, newer or of another job, and states of different steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConflictError, UserError
from headrace.reorder_service.jobs.batches import content_of
from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.jobs.resuming import OFFER_S, ResumeState, Resuming, newest_common
from headrace.reorder_service.jobs.sessions import LOADING_S
from headrace.sample import SampleRef
from tests.unit.reorder_service.job_world import Start, consume, submit

STEPS = 6  # of the job of `submit`: 24 samples, 4 a step


def state(run: JobRun, step: int) -> ResumeState:
    """As a trainer's checkpoint has it that has trained the job's own samples."""
    return ResumeState(step=step, content=run.batches.content(step - 1))


async def job_at(start: Start, step: int) -> JobRun:
    run = await submit(await start())
    await consume(run, run.open_session(0, 1), stop=step)
    run.sessions.by_rank.clear()
    return run


@pytest.mark.parametrize("step", [1, 2, 3, STEPS])
async def test_a_state_of_the_job_s_samples_is_taken_however_far_it_is_ahead_of_the_store(start: Start, step: int) -> None:
    run = await job_at(start, 2)
    assert run.resuming.begin(0, 1, [state(run, step)]) == (step, "")


async def test_a_job_that_is_done_goes_back_to_a_state_also_under_a_new_leader(start: Start) -> None:
    run = await submit(await start())
    await consume(run, run.open_session(0, 1))
    saved = state(run, 4)
    again = await (await start()).load("job")
    assert again.cursor.state == "DONE"
    assert again.resuming.begin(0, 1, [saved]) == (4, "")
    assert again.resuming.state_at(4) == saved
    with pytest.raises(ConflictError, match="has trained other samples in step 3"):
        again.resuming.begin(0, 1, [ResumeState(step=4, content=1)])


async def test_without_a_state_a_rank_goes_on_behind_the_last_commit(start: Start) -> None:
    run = await job_at(start, 2)
    assert run.resuming.begin(0, 1, []) == (2, "")


@pytest.mark.parametrize("step", [1, 2, 4])
async def test_a_state_of_other_samples_is_refused(start: Start, step: int) -> None:
    run = await job_at(start, 2)
    with pytest.raises(ConflictError, match=f"has trained other samples in step {step - 1} than job 'job' .* of step 2 or of an"):
        run.resuming.begin(0, 1, [ResumeState(step=step, content=1)])


async def test_a_state_that_does_not_say_its_samples_may_be_one_step_ahead(start: Start) -> None:
    run = await job_at(start, 2)
    assert run.resuming.begin(0, 1, [ResumeState(step=3)]) == (3, "")
    with pytest.raises(ConflictError, match=r"of step 4, but job 'job' has committed only 2 steps, .* checkpoint of step 2"):
        run.resuming.begin(0, 1, [ResumeState(step=4)])


async def test_a_state_beyond_the_job_s_end_and_one_before_its_begin_are_refused(start: Start) -> None:
    run = await job_at(start, 2)
    with pytest.raises(ConflictError, match=f"of step 7, but job 'job' has only {STEPS} steps"):
        run.resuming.begin(0, 1, [ResumeState(step=STEPS + 1, content=5)])
    with pytest.raises(UserError, match="count from 0"):
        run.resuming.begin(0, 1, [ResumeState(step=-1)])
    with pytest.raises(UserError, match="offers 65 states"):
        run.resuming.begin(0, 1, [ResumeState(step=0)] * 65)


async def test_ranks_that_begin_at_different_steps_are_told_the_older_one(start: Start) -> None:
    run = await job_at(start, 3)
    run.sessions.note_begun(run.open_session(0, 2), 3)
    with pytest.raises(ConflictError, match="rank 1 goes on from step 2, and rank 0 from step 3: load that of step 2"):
        run.resuming.begin(1, 2, [state(run, 2)])
    assert run.resuming.begin(1, 2, []) == (3, ""), "also where it has no state, as long as it begins there"


async def test_a_rank_waits_for_one_that_has_opened_a_session_and_may_yet_load_its_state(start: Start) -> None:
    """As in `with connect(...) as loader: loader.load_state_dict(...)`, which ranks do not do at the same moment."""
    run = await job_at(start, 3)
    session = run.open_session(0, 2)
    run.sessions.note_begun(session, 3, gave_state=False)
    awaited = "the state of rank 0, which has opened a session at step 3 without one a moment ago"
    assert run.resuming.begin(1, 2, [state(run, 2)])[1] == awaited
    assert run.resuming.begin(0, 2, [state(run, 2)]) == (2, ""), "rank 1 has no session yet"
    run.sessions.note_begun(run.open_session(0, 2), 2)
    assert run.resuming.begin(1, 2, [state(run, 2)]) == (2, "")


async def test_several_states_await_the_rank_that_may_yet_load_its_own(start: Start) -> None:
    run = await job_at(start, 3)
    run.sessions.note_begun(run.open_session(0, 2), 3, gave_state=False)
    both = [state(run, 1), state(run, 2)]
    assert run.resuming.begin(1, 2, both)[1] == "the states of rank 0, to go on from the newest step that all have"
    assert run.resuming.begin(0, 2, both) == (2, "")


async def test_a_rank_that_never_loads_a_state_is_awaited_for_a_while_only(start: Start) -> None:
    run = await job_at(start, 3)
    session = run.open_session(0, 2)
    run.sessions.note_begun(session, 3, gave_state=False)
    session.begin_streaming()
    session.opened_s -= LOADING_S
    with pytest.raises(ConflictError, match="rank 1 goes on from step 2, and rank 0 from step 3"):
        run.resuming.begin(1, 2, [state(run, 2)])


async def test_a_rank_that_comes_back_alone_takes_those_back_with_it_that_have_gone_on(start: Start) -> None:
    run = await job_at(start, 3)
    session = run.open_session(0, 2)
    run.sessions.note_begun(session, 2)
    session.next_step = 4
    assert run.resuming.begin(1, 2, [state(run, 2)]) == (2, "")


async def test_ranks_with_several_states_go_on_from_the_newest_that_all_have(start: Start) -> None:
    run = await job_at(start, 3)
    first, second = [state(run, 2), state(run, 3)], [state(run, 1), state(run, 2)]
    step, awaited = run.resuming.begin(0, 2, first)
    assert (step, awaited) == (0, "the states of rank 1, to go on from the newest step that all have")
    assert run.resuming.begin(1, 2, second) == (2, "")
    assert run.resuming.begin(0, 2, first) == (2, "")


async def test_a_rank_with_several_states_follows_one_that_has_begun(start: Start) -> None:
    run = await job_at(start, 2)
    run.sessions.note_begun(run.open_session(0, 2), 2)
    assert run.resuming.begin(1, 2, [state(run, 2), state(run, 3)]) == (2, "")


async def test_of_several_states_those_of_other_samples_are_left_out(start: Start) -> None:
    """As where a change of weights was lost with the store: the job goes back to where both agree."""
    run = await job_at(start, 3)
    assert run.resuming.begin(0, 1, [state(run, 2), ResumeState(step=3, content=1)]) == (2, "")
    with pytest.raises(ConflictError, match="other samples in step 1"):
        run.resuming.begin(0, 1, [ResumeState(step=2, content=1), ResumeState(step=3, content=1)])


async def test_an_offer_counts_as_long_as_its_rank_repeats_it(start: Start) -> None:
    run = await job_at(start, 3)
    now_s = [0.0]
    resuming = Resuming("job", run.cursor, run.sessions, run.batches, lambda: None, lambda: now_s[0])
    both = [state(run, 2), state(run, 3)]
    assert resuming.begin(0, 2, both)[1]
    now_s[0] = OFFER_S + 1
    assert resuming.begin(1, 2, both)[1], "rank 0 may have died since"
    assert resuming.begin(0, 2, both) == (3, "")


async def test_ranks_that_offer_other_states_than_before_agree_anew(start: Start) -> None:
    run = await job_at(start, 3)
    old, new = [state(run, 1), state(run, 2)], [state(run, 2), state(run, 3)]
    for rank, agreed in ((0, 0), (1, 2), (0, 2)):
        assert run.resuming.begin(rank, 2, old)[0] == agreed
    assert run.resuming.begin(0, 2, new) == (2, ""), "of which rank 1 has a state, too"
    assert run.resuming.begin(1, 2, new) == (3, "")
    assert run.resuming.begin(0, 2, new) == (3, "")


async def test_what_ranks_have_agreed_on_holds_no_more_once_one_has_begun_elsewhere(start: Start) -> None:
    run = await job_at(start, 3)
    both = [state(run, 2), state(run, 3)]
    run.resuming.begin(0, 2, both)
    assert run.resuming.begin(1, 2, both) == (3, "")
    session = run.open_session(0, 2)
    session.next_step = 2
    run.sessions.note_begun(session, 2)
    assert run.resuming.begin(1, 2, both) == (2, "")


async def test_the_shards_that_a_newer_state_ends_in_are_counted_first(start: Start) -> None:
    run = await job_at(start, 2)
    known = run.batches.knows
    run.batches.knows = lambda step: step < 4 and known(step)  # type: ignore[method-assign]
    run.batches.num_steps = 0
    assert "count the shards up to step 5" in run.resuming.begin(0, 1, [ResumeState(step=6, content=1)])[1]
    assert run.cursor.awaited_step == 5


def test_ranks_without_a_common_step_are_told_who_has_what() -> None:
    with pytest.raises(ConflictError, match="rank 1 has that of step 4, rank 0 those of steps 5, 6: begin with older"):
        newest_common({0: (5, 6), 1: (4,)})


@given(st.dictionaries(st.integers(0, 5), st.sets(st.integers(0, 5), min_size=1), min_size=1))
def test_the_newest_common_step_is_one_of_each_rank_and_no_newer_one_is(offers: dict[int, set[int]]) -> None:
    common = [step for step in range(6) if all(step in steps for steps in offers.values())]
    if common:
        assert newest_common(offers) == common[-1]
    else:
        with pytest.raises(ConflictError, match="no step has a state in every rank"):
            newest_common(offers)


def test_contents_differ_with_each_sample_and_its_place() -> None:
    def content(*triples: tuple[int, int, int]) -> int:
        return content_of([SampleRef(sample_id=i, shard=shard, row=row) for i, shard, row in triples])

    same = content((0, 0, 0), (1, 0, 1))
    others = [content((0, 0, 0), (1, 0, 2)), content((0, 0, 1), (1, 0, 0)), content((4, 0, 0), (5, 0, 1)), content((0, 0, 0))]
    assert same == content((0, 0, 0), (1, 0, 1))
    assert 0 < same < 2**63
    assert same not in others
