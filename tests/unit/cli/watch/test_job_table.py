"""What `headrace job` prints of jobs for people."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.cli.watch.job import _print, _print_list
from headrace.v1.jobs_pb2 import JobStatus


class Client:
    """Lists 2,500 jobs, of which one has failed."""

    def jobs(self, _most_finished: int) -> Iterator[JobStatus]:
        for number in range(2_500):
            failed = JobStatus(
                state="JOB_STATE_FAILED",
                message="its disk broke",
                committed_steps=1_000,
                num_steps=2_000,
                committed_samples=64_000,
            )
            status = failed if number == 1 else JobStatus(state="JOB_STATE_DONE")
            status.job = f"job-{number}"
            yield status


def test_any_number_of_jobs_is_one_table_with_sentences_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    client: Any = Client()
    _print_list(client, Namespace(all=True, format="table"))
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
