"""Jobs of many steps that strategy `auto` plans for pipelines with several replicas of every unit: they run to their end."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.run.processes import ProcessGroup
from headrace.trainer.pipeline.routes import Routes
from tests.integration.trainers import losses, start, wait

STEPS = 500
LIMIT_S = 3600.0

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 100)]


@pytest.mark.parametrize(("vision", "llm"), [(2, 2), (4, 4), (3, 2), (4, 2)])
def test_a_job_of_500_steps_runs_to_its_end_whatever_auto_chooses(calm, spec, tmp_path: Path, vision: int, llm: int) -> None:
    name, world = f"auto-{vision}-{llm}", vision + llm
    planned = {"replicas": llm, "microbatches": 2, "stages": {"vision": 1, "llm": 1}}
    job = calm.submit(spec(name, global_batch=32, steps=STEPS, epochs=STEPS, topology=planned, execution={"trainer": "pipeline"}))
    with ProcessGroup() as group:
        units = {"vision": {"dp": vision}, "llm": {"dp": llm}}
        processes = start(group, calm, job, tmp_path, units, world, world)
        assert wait(processes, LIMIT_S) == [0] * world, processes[0].last_words()
        assert len(losses(processes[0].log)) == STEPS
    assert len(calm.ledger(job)) == STEPS
    with calm.client() as client:
        plans = [client.show_plan(job, step)[1] for step in range(STEPS - 40, STEPS)]
    assert any(Routes(plan, dict.fromkeys(plan.topology.stages, llm)).crosses for plan in plans)
