"""What `headrace scale` takes from the looks at a service's jobs."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.cli.scale.load import load_of
from headrace.rates import Look
from headrace.v1.jobs_pb2 import JOB_STATE_DONE, JOB_STATE_INDEXING, JobStatus, RankStatus
from tests.unit.proto.test_bottleneck import BUSY, IDLE, member, status


def looks(before: JobStatus, now: JobStatus, seconds: float = 10.0) -> list[Look]:
    return [Look(at_s=0.0, status=before), Look(at_s=seconds, status=now)]


def steady(wait: float, **fields: Any) -> list[Look]:
    """Ten steps of a second and 16 samples each, in ten seconds."""
    before = status(wait, committed_samples=160, **fields)
    later = {"committed_steps": 20, "committed_samples": 320, "step_s": 20.0, "data_wait_s": 20 * wait}
    return looks(before, status(wait, **fields | later))


def test_trainers_that_wait_for_busy_preprocessors() -> None:
    load = load_of([steady(0.34, preprocessors=BUSY)])
    assert (load.preprocessors, load.busy, load.helps) == (2, 2.0, True)
    assert (load.wait, load.samples_per_s) == (pytest.approx(0.34), pytest.approx(16.0))
    assert "preprocessors decode as fast as they can" in load.why


def test_preprocessors_that_wait_are_not_busy_and_more_would_not_help() -> None:
    load = load_of([steady(0.0, preprocessors=[*IDLE, member("c", parts=(3, 1, 1))])])
    assert (load.preprocessors, load.busy, load.helps) == (3, pytest.approx(0.5), False)


def test_the_job_whose_trainers_wait_most_counts_and_all_samples() -> None:
    load = load_of([steady(0.0, preprocessors=BUSY), steady(0.5, preprocessors=BUSY), steady(0.1, preprocessors=BUSY)])
    assert (load.wait, load.samples_per_s) == (pytest.approx(0.5), pytest.approx(48.0))


def test_jobs_that_are_over_ask_for_none() -> None:
    load = load_of([steady(0.5, preprocessors=BUSY, state=JOB_STATE_DONE)])
    assert (load.preprocessors, load.busy, load.wait, load.why) == (2, 0.0, 0.0, "every step is committed")


WAITED: dict[str, Any] = {"preprocessors": IDLE, "committed_steps": 20, "step_s": 20.0, "data_wait_s": 10.0}


@pytest.mark.parametrize("ranks", [[], [RankStatus(rank=0, step_s=1.0)]])
def test_nobody_waits_once_the_trainers_have_gone_whatever_they_had_waited(ranks: list[RankStatus]) -> None:
    gone = status(0.5, ranks=ranks, **WAITED)
    load = load_of([looks(gone, gone)])
    assert (load.preprocessors, load.wait, load.busy, load.begins) == (2, 0.0, 0.0, False)


def test_nobody_waits_in_a_job_that_is_paused() -> None:
    paused = status(0.5, ranks=[RankStatus(rank=0, step_s=1.0, connected=True)], paused=True, **WAITED)
    load = load_of([looks(paused, paused)])
    assert (load.wait, load.begins) == (0.0, False)


def test_a_step_that_takes_longer_than_the_looks_is_waited_for_as_before() -> None:
    slow = status(0.5, ranks=[RankStatus(rank=0, step_s=60.0, connected=True)], **WAITED)
    assert load_of([looks(slow, slow)]).wait == pytest.approx(0.5)


@pytest.mark.parametrize(
    "fields",
    [
        {"state": JOB_STATE_INDEXING, "ranks": []},
        {"ranks": [RankStatus(rank=0, connected=True)], "step_s": 0.0, "data_wait_s": 0.0},
    ],
)
def test_a_job_begins_until_a_trainer_has_reported_a_step(fields: dict[str, Any]) -> None:
    begun = status(preprocessors=IDLE, **fields)
    assert load_of([looks(begun, begun)]).begins
