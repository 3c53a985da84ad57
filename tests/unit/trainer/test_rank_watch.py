"""When one rank of several processes does not come to the end, all others end too, and every log says why."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from headrace.processes import torchrun_environments
from tests.endless_backend import ABORTED, STUCK
from tests.unit.trainer.watched_rank import FAULTY_RANK, HELD_AT_ITS_END, run_rank

NUM_RANKS = 6
END_S = 90.0
SHORT_S = 3.0
"""A timeout that only the ranks of a fault wait for which nothing else shows."""
LONG_S = 600.0


FORKING = multiprocessing.get_context("forkserver")


class Job:
    """The processes of a job."""

    def __init__(
        self,
        folder: Path,
        fault: str,
        faulty_rank: int,
        hang_s: float,
        agent: Mapping[str, str],
        backend: str,
        num_ranks: int,
    ):
        self.logs = [folder / f"{rank}.log" for rank in range(num_ranks)]
        self.processes = [
            FORKING.Process(target=run_rank, args=({**environment, **agent}, fault, faulty_rank, hang_s, log, backend))
            for environment, log in zip(torchrun_environments(num_ranks), self.logs, strict=True)
        ]
        for process in self.processes:
            process.start()

    def wait(self, *, leave_out: int | None = None) -> Mapping[int, int | None]:
        """Exit codes by rank; None of those that do not end."""
        deadline = time.monotonic() + END_S
        ranks = [rank for rank in range(len(self.processes)) if rank != leave_out]
        for rank in ranks:
            self.processes[rank].join(max(0.0, deadline - time.monotonic()))
        return {rank: self.processes[rank].exitcode for rank in ranks}

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def run(tmp_path: Path) -> Iterator:
    jobs = []

    def start(
        fault: str,
        *,
        faulty_rank: int = FAULTY_RANK,
        hang_s: float = LONG_S,
        agent: Mapping[str, str] | None = None,
        backend: str = "gloo",
        num_ranks: int = NUM_RANKS,
    ) -> Job:
        jobs.append(Job(tmp_path, fault, faulty_rank, hang_s, agent or {}, backend, num_ranks))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def check_logs(job: Job, codes: Mapping[int, int | None], words: str) -> None:
    logs = {rank: job.logs[rank].read_text() for rank in codes}
    assert all(codes.values()), logs  # neither None nor 0
    for rank, log in logs.items():
        assert words in log, (rank, log)


@pytest.mark.slow
def test_without_a_fault_all_ranks_end_well(run) -> None:
    assert set(run("none").wait().values()) == {0}


@pytest.mark.slow
@pytest.mark.parametrize("faulty_rank", [pytest.param(0, marks=pytest.mark.slow), FAULTY_RANK])
def test_an_error_of_the_user_s_ends_all_with_its_sentence(run, faulty_rank: int) -> None:
    job = run("user error", faulty_rank=faulty_rank)
    codes = job.wait()
    check_logs(job, codes, f"rank {faulty_rank} (llm stage {faulty_rank}): step 2: the batch has no samples: take a larger one")
    assert codes[faulty_rank] == 2


@pytest.mark.slow
def test_a_rank_that_is_held_up_at_the_end_of_a_finished_job_ends_well_too(run) -> None:
    """Rank 0 holds the store, and leaves while the rank is held."""
    job = run(HELD_AT_ITS_END)
    assert set(job.wait(leave_out=FAULTY_RANK).values()) == {0}
    with suppress(ProcessLookupError):  # it came to its end before it could be held
        os.kill(job.processes[FAULTY_RANK].pid, signal.SIGCONT)
    assert job.wait()[FAULTY_RANK] == 0, job.logs[FAULTY_RANK].read_text()


def test_ranks_that_torchrun_starts_again_after_a_failure_train_to_the_end(run) -> None:
    """Its agent's store outlives them, and still says why they ended."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    job = run("user error", agent={**agent, "TORCHELASTIC_RESTART_COUNT": "0"})
    check_logs(job, job.wait(), "the batch has no samples")
    assert set(run("none", agent={**agent, "TORCHELASTIC_RESTART_COUNT": "1"}).wait().values()) == {0}


@pytest.mark.parametrize("faulty_rank", [0, FAULTY_RANK])
@pytest.mark.slow
def test_an_unexpected_error_ends_all_with_its_name(run, faulty_rank: int) -> None:
    job = run("unexpected", faulty_rank=faulty_rank)
    check_logs(job, job.wait(), f"rank {faulty_rank} (llm stage {faulty_rank}): step 2: ZeroDivisionError('division by zero')")
    assert "Traceback" in job.logs[faulty_rank].read_text()


@pytest.mark.parametrize("faulty_rank", [pytest.param(0, marks=pytest.mark.slow), FAULTY_RANK])
def test_a_rank_that_hangs_while_the_others_wait_ends_all(run, faulty_rank: int) -> None:
    job = run("hang", faulty_rank=faulty_rank, hang_s=SHORT_S)
    codes = job.wait()
    check_logs(job, codes, f"no rank has got on for 3 s (--hang-timeout): rank {faulty_rank} (llm stage {faulty_rank}) at step 2")
    assert "the others wait" in job.logs[1].read_text()


@pytest.mark.parametrize("faulty_rank", [pytest.param(0, marks=pytest.mark.slow), FAULTY_RANK])
def test_a_rank_that_is_stopped_ends_all_others(run, faulty_rank: int) -> None:
    """Rank 0 holds the store, which then answers nobody."""
    job = run("stop", faulty_rank=faulty_rank, hang_s=SHORT_S)
    codes = job.wait(leave_out=faulty_rank)
    check_logs(job, codes, f"rank {faulty_rank} (llm stage {faulty_rank}) has said nothing" if faulty_rank else "that of rank 0")
    os.kill(job.processes[faulty_rank].pid, signal.SIGCONT)
    assert job.wait()[faulty_rank]


@pytest.mark.parametrize("faulty_rank", [0, FAULTY_RANK])
@pytest.mark.slow
def test_a_rank_that_is_killed_ends_all_others_soon_and_by_its_name(run, faulty_rank: int) -> None:
    job = run("kill", faulty_rank=faulty_rank)
    words = f"rank {faulty_rank} (llm stage {faulty_rank}) has said nothing" if faulty_rank else "that of rank 0"
    check_logs(job, job.wait(leave_out=faulty_rank), words)


@pytest.mark.parametrize(
    ("signal_name", "words"), [("terminate", "was told to end by SIGTERM"), ("interrupt", "was interrupted")]
)
@pytest.mark.slow
def test_a_rank_that_is_told_to_end_ends_all(run, signal_name: str, words: str) -> None:
    job = run(signal_name)
    codes = job.wait()
    check_logs(job, codes, f"rank {FAULTY_RANK} (llm stage {FAULTY_RANK}): step 2: {words}")
    assert codes[FAULTY_RANK] == 130


@pytest.mark.slow
def test_a_job_that_gets_sigterm_while_a_rank_hangs_ends(run) -> None:
    """The main threads are in waits of gloo's, in which Python runs no signal handler."""
    job = run("hang")
    time.sleep(5.0)  # real processes, of which nothing shows that they wait
    for process in job.processes:
        os.kill(process.pid, signal.SIGTERM)
    assert set(job.wait().values()) == {130}


@pytest.mark.parametrize(
    ("fault", "words", "hang_s"),
    [
        ("user error", "step 2: the batch has no samples: take a larger one", LONG_S),
        pytest.param("unexpected", "step 2: ZeroDivisionError('division by zero')", LONG_S, marks=pytest.mark.slow),
        ("hang", "at step 2", SHORT_S),
        pytest.param("kill", "has said nothing", SHORT_S, marks=pytest.mark.slow),
        pytest.param("terminate", "step 2: was told to end by SIGTERM", LONG_S, marks=pytest.mark.slow),
    ],
)
def test_waits_that_never_end_are_aborted_on_all_ranks(run, fault: str, words: str, hang_s: float) -> None:
    """On a backend that EMULATES NCCL's waits, which do not notice either that a process is gone."""
    job = run(fault, hang_s=hang_s, backend="endless")
    killed = FAULTY_RANK if fault == "kill" else None
    codes = job.wait(leave_out=killed)
    check_logs(job, codes, f"rank {FAULTY_RANK} (llm stage {FAULTY_RANK})")
    check_logs(job, codes, words)
    check_logs(job, codes, ABORTED)


@pytest.mark.parametrize(("fault", "hang_s"), [("user error", LONG_S), pytest.param("hang", SHORT_S, marks=pytest.mark.slow)])
def test_waits_that_not_even_an_abort_ends_end_with_the_processes(run, fault: str, hang_s: float) -> None:
    job = run(fault, hang_s=hang_s, backend="endless, abort too")
    codes = job.wait()
    check_logs(job, codes, f"rank {FAULTY_RANK} (llm stage {FAULTY_RANK})")
    check_logs(job, codes, STUCK)


@pytest.mark.parametrize(
    ("backend", "line"), [("endless", ABORTED), pytest.param("endless, abort too", STUCK, marks=pytest.mark.slow)]
)
def test_a_single_rank_that_fails_aborts_its_own(run, backend: str, line: str) -> None:
    job = run("user error", faulty_rank=0, backend=backend, num_ranks=1)
    codes = job.wait()
    check_logs(job, codes, line)
    assert codes == {0: 2}
