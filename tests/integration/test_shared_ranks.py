"""Units on the LLM's ranks, in real processes of a real job: each process has a place in several units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.processes import ProcessGroup
from tests.integration.trainers import losses, start, wait

pytestmark = pytest.mark.integration

PLANNED = {"replicas": 1, "microbatches": 3, "stages": {"vision": 1, "audio": 1, "llm": 2}}
ON_LLM = {"dp": 2, "on": "llm"}
SHARED: dict[str, Any] = {"vision": ON_LLM, "audio": ON_LLM, "llm": {"pp": 2}}
APART: dict[str, Any] = {"vision": {}, "audio": {}, "llm": {"pp": 2}}


@pytest.mark.parametrize("sharing", ["nested", pytest.param("colocated", marks=pytest.mark.slow)])
def test_two_processes_train_three_units_as_one_process_does(calm, spec, tmp_path: Path, sharing: str) -> None:
    """They take their places from the job, which says who shares ranks."""
    logs = {}
    shared = {"trainer": "pipeline", "sharing": sharing, "units": {"vision": ON_LLM, "audio": ON_LLM}}
    with ProcessGroup() as group:
        for name, execution, world in (("whole", {}, 1), ("shared", shared, 2)):
            job = calm.submit(spec(f"{sharing}-{name}-{tmp_path.name[-1]}", steps=3, topology=PLANNED, execution=execution))
            processes = start(group, calm, job, tmp_path, None, world, world)
            assert wait(processes) == [0] * world, processes[0].last_words()
            logs[name] = [losses(process.log) for process in processes]
    [whole] = logs["whole"]
    assert len(whole) == 3
    for of_rank in logs["shared"]:
        assert of_rank == pytest.approx(whole, rel=1e-4)


@pytest.mark.slow
def test_a_checkpoint_of_shared_ranks_goes_on_where_every_unit_has_its_own(calm, spec, tmp_path: Path) -> None:
    job = calm.submit(spec("moved-apart", steps=3, topology=PLANNED))
    folder = tmp_path / "checkpoints"
    options = ["--checkpoint", str(folder), "--checkpoint-every", "2"]
    runs = []
    for units, world, resume in ((SHARED, 2, []), (APART, 4, ["--resume", str(folder)])):
        with ProcessGroup() as group:
            processes = start(group, calm, job, tmp_path, units, world, world, *options, *resume)
            assert wait(processes) == [0] * world, processes[0].last_words()
            runs.append(losses(processes[0].log))
        (folder / "step-00000003" / f"0-of-{world}.arrow").unlink()
    assert len(runs[0]) == 3
    assert runs[1] == pytest.approx(runs[0][2:], rel=1e-4)


def test_trainers_that_do_not_share_ranks_as_planned_are_told(calm, spec, tmp_path: Path) -> None:
    execution = {"trainer": "pipeline", "units": {"vision": ON_LLM, "audio": ON_LLM}}
    job = calm.submit(spec("planned-together", steps=1, topology=PLANNED, execution=execution))
    with ProcessGroup() as group:
        processes = start(group, calm, job, tmp_path, APART, 4, 1)
        assert wait(processes) == [2]
        assert "the job plans for on units audio (llm), vision (llm)" in processes[0].last_words()
