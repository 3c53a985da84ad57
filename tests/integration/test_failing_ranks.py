"""A job of six trainers, of which one does not come to the end of a step: all end, and every log says which one and why."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from headrace.cli.run.processes import torchrun_environments
from tests.integration.trainers import END_S

pytestmark = [pytest.mark.integration, pytest.mark.slow]

NUM_RANKS = 6
UNITS = {"vision": {}, "audio": {}, "llm": {"dp": 2, "pp": 2}}
PLANNED = {"replicas": 2, "microbatches": 2, "stages": {"vision": 1, "audio": 1, "llm": 2}}
FAULTY_RANK = 3
WHERE = "rank 3 (llm replica 0, stage 1, slice 0)"


@pytest.mark.parametrize(
    ("fault", "words", "hang_timeout_s"),
    [
        ("user error", f"{WHERE}: step 1: the batch has no samples: take a larger one", 600),
        ("unexpected", f"{WHERE}: step 1: ZeroDivisionError('division by zero')", 600),
        ("hang", f"no rank has got on for 5 s (--hang-timeout): {WHERE} at step 1", 5),
        ("stop", f"{WHERE} has said nothing for", 5),
        ("kill", f"{WHERE} has said nothing for", 600),
    ],
)
def test_one_rank_ends_all(calm, spec, tmp_path: Path, fault: str, words: str, hang_timeout_s: int) -> None:
    job = calm.submit(spec(f"failing-{fault.replace(' ', '-')}", topology=PLANNED))
    (tmp_path / "topology.yaml").write_text(yaml.safe_dump({"units": UNITS}))
    options = ["--topology", str(tmp_path / "topology.yaml"), "--hang-timeout", str(hang_timeout_s), "--threads", "1"]
    command = [
        sys.executable,
        "-m",
        "tests.integration.faulty_trainer",
        "train",
        "--endpoint",
        calm.endpoint,
        "--job",
        job,
        *options,
    ]
    logs = [tmp_path / f"{rank}.log" for rank in range(NUM_RANKS)]
    processes = []
    try:
        for log, environment in zip(logs, torchrun_environments(NUM_RANKS), strict=True):
            fault_of_rank = {"FAULT": fault, "FAULTY_RANK": str(FAULTY_RANK)}
            with log.open("wb") as out:
                processes.append(
                    subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **environment, **fault_of_rank})
                )
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
