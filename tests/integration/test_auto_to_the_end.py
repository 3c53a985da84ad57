"""Jobs of many steps that strategy `auto` plans for pipelines with several replicas of every unit: they run to their end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headrace.cli.example import example_data
from headrace.processes import Process, ProcessGroup
from headrace.trainer.pipeline.routes import Routes
from tests.integration.trainers import losses, start

STEPS = 500
LIMIT_S = 1800.0

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(LIMIT_S)]


@pytest.mark.parametrize(("vision", "llm"), [(2, 2), (4, 4), (3, 2), (4, 2)])
def test_a_job_of_500_steps_runs_to_its_end_whatever_auto_chooses(calm, spec, tmp_path: Path, vision: int, llm: int) -> None:
    world, execution = vision + llm, {"trainer": "pipeline", "units": {"vision": {"dp": vision}}}
    planned = {"replicas": llm, "microbatches": 2, "stages": {"vision": 1, "llm": 1}}
    short = [{"path": str(example_data() / shards), "name": shards[:5]} for shards in ("charts-*.tar", "pictures-*.tar")]
    name = f"auto-{vision}-{llm}"
    job = calm.submit(spec(name, sources=short, steps=STEPS, epochs=STEPS, topology=planned, execution=execution))
    with ProcessGroup() as group:
        processes = start(group, calm, job, tmp_path, None, world, world)
        moved = steps_with_moved_samples(calm, job, processes)
        assert [process.exit_code() for process in processes] == [0] * world, processes[0].last_words()
        assert len(losses(processes[0].log)) == STEPS
    assert len(calm.ledger(job)) == STEPS
    assert moved, "auto chose no plan whose samples change replicas: the job shows nothing"


def steps_with_moved_samples(cluster, job: str, processes: list[Process]) -> set[int]:
    """Until all processes have ended: those of the steps seen on the way whose samples change replicas."""
    moved = set()
    with cluster.client() as client:
        while any(process.exit_code() is None for process in processes):
            if losses(processes[0].log):
                step, plan, *_ = client.show_plan(job)
                replicas = {unit: len(plan.unit_replicas.get(unit, plan.replicas)) for unit in plan.topology.stages}
                if Routes(plan, replicas).crosses:
                    moved.add(step)
            time.sleep(0.5)  # polls real processes
    return moved
