"""`headrace.trainer.local`: a job with services of its own in one process, and `headrace.jobs`, which shows and changes jobs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import trainer
from headrace.cli.example import example_data
from headrace.errors import ConflictError, HeadraceError, NotFoundError, SpecError, UserError
from headrace.jobs import Jobs, JobState
from headrace.spec import parse_spec

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def job() -> Iterator[trainer.LocalJob]:
    with trainer.local(example_data(), global_batch=16, steps=2) as job:
        yield job


def test_a_data_path_alone_is_enough(job: trainer.LocalJob) -> None:
    samples = []
    with job.connect() as loader:
        for step in loader:
            samples += [sample for microbatch in step for sample in microbatch.data.sample_ids.tolist()]
            loader.commit(step, loss=1.5)
    assert sorted(samples) == list(range(32))
    with Jobs(job.endpoint) as jobs:
        status = jobs.show(job.job)
        assert (status.state, status.committed_steps, status.samples, status.last_loss) == (JobState.DONE, 2, 32, 1.5)


def test_jobs_are_submitted_watched_and_ended_from_python(job: trainer.LocalJob, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"name: other\nsources: [{{path: {example_data()}}}]\nsteps: 3\n")
    with Jobs(job.endpoint) as jobs:
        assert jobs.submit(tmp_path / "job.yaml").job == "other"
        assert jobs.submit({"name": "other", "sources": [{"path": str(example_data())}], "steps": 3}).job == "other"
        assert [status.job for status in jobs.list()] == ["local", "other"]
        assert jobs.pause("other").state == JobState.PAUSED
        with pytest.raises(ConflictError, match="not over: end it with"):
            jobs.delete("other")
        watched = jobs.watch("other", every_s=0.01)
        assert not next(watched).is_over
        jobs.cancel("other")
        assert list(watched)[-1].state == JobState.CANCELLED
        jobs.delete("other")
        with pytest.raises(NotFoundError, match="no job 'other'"):
            jobs.show("other")
        with pytest.raises(SpecError, match="global_batch"):
            jobs.submit({"name": "x", "sources": [{"path": "x"}], "global_batch": 0})
        with pytest.raises(ConflictError, match="exists with another spec"):
            jobs.submit(parse_spec({"name": "local", "sources": [{"path": "elsewhere"}]}))


def test_a_killed_preprocessor_is_started_again_and_told_with_its_log(
    job: trainer.LocalJob, caplog: pytest.LogCaptureFixture
) -> None:
    os.kill(job.pids[1], signal.SIGKILL)
    deadline_s = time.monotonic() + 30
    while not caplog.messages:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)  # polls a real process
    [told] = caplog.messages
    assert re.fullmatch(r"preprocessor 0 was ended by SIGKILL: .* \(log: (.*)\); it was started again", told)
    assert Path(told.partition("(log: ")[2].partition(")")[0]).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_services_end_with_the_process_that_started_them_however_it_ends(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import sys, time, headrace.trainer\n"
        f"job = headrace.trainer.local({str(example_data())!r}, logs={str(tmp_path)!r})\n"
        "print(job.endpoint, flush=True)\n"
        "time.sleep(100)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip(), "it has started"
    children = _children(process.pid)
    assert len(children) == 2
    process.send_signal(number)
    process.wait()
    process.stdout.close()
    deadline_s = time.monotonic() + 30
    while any(map(_lives, children)) and time.monotonic() < deadline_s:
        time.sleep(0.01)  # polls real processes
    assert not any(map(_lives, children))


def test_a_service_that_does_not_start_is_named_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CLUSTER_TOKEN", "short")
    with pytest.raises(HeadraceError, match=r"the reorder service did not start: headrace reorder: .* at least 16"):
        trainer.local(example_data(), logs=tmp_path)


def test_bad_input_is_refused_before_anything_starts() -> None:
    with pytest.raises(UserError, match="preprocessors=0: there must be at least 1"):
        trainer.local(example_data(), preprocessors=0)
    with pytest.raises(SpecError, match="globalbatch: there is no such field"):
        trainer.local(example_data(), globalbatch=3)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
