"""A job of six trainers, of which one does not come to the end of a step: all end, and every log says which one and why."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integration.faulty_trainer import FAULTY_RANK, NUM_RANKS, PLANNED, REASONS, start_ranks, start_replicas
from tests.integration.trainers import END_S

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.mark.parametrize(
    ("fault", "hang_timeout_s"), [("user error", 600), ("unexpected", 600), ("hang", 5), ("stop", 5), ("kill", 600)]
)
def test_one_rank_ends_all(calm, spec, tmp_path: Path, fault: str, hang_timeout_s: int) -> None:
    words = REASONS[fault]
    job = calm.submit(spec(f"failing-{fault.replace(' ', '-')}", topology=PLANNED))
    processes = start_ranks(calm.endpoint, job, tmp_path, fault, hang_timeout_s)
    logs = [tmp_path / f"{rank}.log" for rank in range(NUM_RANKS)]
    try:
        deadline = time.monotonic() + END_S
        others = {rank: process for rank, process in enumerate(processes) if rank != FAULTY_RANK}
        for process in others.values():
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, process in others.items():
        assert process.returncode, logs[rank].read_text()
        assert words in logs[rank].read_text()
    assert processes[FAULTY_RANK].returncode
    if fault in ("user error", "unexpected"):
        assert words in logs[FAULTY_RANK].read_text()


def test_replicas_that_drift_apart_end_with_the_first_weight_that_differs(calm, spec, tmp_path: Path) -> None:
    job = calm.submit(spec("drifting", steps=4))
    processes = start_replicas(calm.endpoint, job, tmp_path)
    try:
        codes = [process.wait(timeout=END_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank in range(2):
        log = (tmp_path / f"{rank}.log").read_text()
        assert "after step 1 replicas 1 of the model have other weights than replica 0, first in decoder.embed.weight" in log
    assert codes == [1, 1]
    assert [entry.step for entry in calm.ledger(job)] == [0]
