"""What `headrace job` prints of jobs for people."""

from __future__ import annotations

import pytest

from headrace.cli.watch.job import _print, _row
from headrace.jobs import JobStatus
from headrace.v1 import jobs_pb2


def test_any_number_of_jobs_is_one_table_with_sentences_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    listed = [jobs_pb2.JobStatus(job=f"job-{number}", state="JOB_STATE_DONE") for number in range(2_500)]
    listed[1] = jobs_pb2.JobStatus(
        job="job-1",
        state="JOB_STATE_FAILED",
        message="its disk broke",
        committed_steps=1_000,
        num_steps=2_000,
        committed_samples=64_000,
    )
    _print([_row(JobStatus.of(status)) for status in listed], "table")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "job       state            steps  samples  quarantined  shards",
        "job-0     done                 0        0            0       0",
        "job-1     failed  1,000 of 2,000   64,000            0       0",
    ]
    assert [line.split()[0] for line in lines[1:-1]] == [f"job-{number}" for number in range(2_500)]
    assert lines[-1] == "job-1: its disk broke"


def test_without_figures_a_table_has_names_and_states(capsys: pytest.CaptureFixture[str]) -> None:
    _print([{"job": "a", "state": "deleted"}, {"job": "longer", "state": "deleted"}], "table")
    assert capsys.readouterr().out.splitlines() == ["job     state", "a       deleted", "longer  deleted"]


def test_no_jobs_are_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    _print([], "table")
    assert capsys.readouterr().out == "no jobs\n"
