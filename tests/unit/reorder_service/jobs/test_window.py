"""How far ahead is planned: so many steps, so many bytes, and never less than the next step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.jobs.window import LEAST_STEPS, bytes_ahead, has_room
from headrace.sample import Probe, decoded_bytes
from tests.unit.reorder_service.job_world import Preprocessor, Start, commit, submit, until

sizes = st.lists(st.one_of(st.none(), st.integers(0, 100)), max_size=9)


def test_the_steps_are_bounded_and_so_are_their_bytes() -> None:
    assert has_room([10, 10], window=3, window_bytes=30)
    assert not has_room([10, 10], window=3, window_bytes=29)
    assert not has_room([10, 10], window=2, window_bytes=1000)


def test_a_step_that_is_not_probed_yet_is_taken_to_be_as_large_as_the_largest() -> None:
    assert has_room([5, 10, None], window=9, window_bytes=35)
    assert not has_room([5, 10, None], window=9, window_bytes=34)
    assert not has_room([None, None], window=9, window_bytes=1 << 60), "nothing is known of any"


@given(sizes, st.integers(1, 9), st.integers(1, 1000))
def test_the_step_that_is_needed_and_the_one_behind_it_are_always_planned(
    num_bytes: list[int | None], window: int, window_bytes: int
) -> None:
    room = has_room(num_bytes, window=window, window_bytes=window_bytes)
    if len(num_bytes) < min(window, LEAST_STEPS):
        assert room
    elif room:
        assert len(num_bytes) < window
        assert sum(size or 0 for size in num_bytes) <= window_bytes


def test_a_sample_takes_what_its_tokens_patches_and_frames_take() -> None:
    probe = Probe(name="s/a/0", num_tokens=10, num_targets=3, image_patches=(4, 16), mel_frames=(100,))
    assert decoded_bytes(probe, patch=14, mel_bins=128) == 10 * 8 + 20 * 588 + 100 * 256
    assert decoded_bytes(replace(probe, target_weight=0.5), patch=14, mel_bins=128) == 10 * 12 + 20 * 588 + 100 * 256


def test_without_a_number_the_stores_of_the_fleet_are_the_limit() -> None:
    assert bytes_ahead(None, 1000) == 750
    assert bytes_ahead(None, 0) == 0, "the fleet has not said what it holds"
    assert bytes_ahead(10, 1000) == 10
    assert has_room([10, 10], window=3, window_bytes=0), "no limit"


@pytest.mark.parametrize(("window_bytes", "planned"), [(1, 2), (3 * 4 * 4 * 8, 3), (1 << 30, 4)])
async def test_a_job_plans_as_far_as_its_bytes_allow(start: Start, window_bytes: int, planned: int) -> None:
    """Global batches of 4 samples of 4 tokens."""
    run = await submit(await start(), window=4, window_bytes=window_bytes)
    session = run.open_session(0, 1)
    for committed in range(2):
        await until(lambda: num_planned(run) == planned)
        assert run.cursor.next_step == committed + planned
        await run.commit(session, committed, commit())


async def test_a_job_without_a_number_plans_as_far_as_the_stores_have_room(start: Start) -> None:
    """Three global batches of 4 samples of 4 tokens, and another one when a second preprocessor has joined."""
    service = await start()
    stores_bytes = 3 * 4 * 4 * 8 * 4 // 3
    Preprocessor(service=service).join().store_budget_bytes = stores_bytes
    run = await submit(service, join=False, window=4)
    await run.wait_ready()
    session = run.open_session(0, 1)
    await until(lambda: num_planned(run) == 3)
    assert run.cursor.next_step == 3
    Preprocessor(service=service, name="q").join().store_budget_bytes = stores_bytes
    await run.commit(session, 0, commit())
    await until(lambda: num_planned(run) == 4)


def num_planned(run: JobRun) -> int:
    return sum(step.plan is not None for step in run.cursor.steps.values())
