"""The measured seconds of a live job come back to the reorder service: they correct its costs, and stand beside its forecast."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.run.processes import ProcessGroup
from headrace.cli.watch.top_figures import step_times
from tests.integration.trainers import start, wait

pytestmark = pytest.mark.integration


def test_a_pipeline_and_a_rank_with_all_units_are_forecast_by_what_they_measured(calm, spec, tmp_path: Path) -> None:
    pipeline = {"replicas": 1, "microbatches": 2, "stages": {"encoder": 1, "llm": 1}}
    colocated = {"replicas": 1, "microbatches": 2}
    jobs = {
        "measured-pipeline": ({"encoder": {}, "llm": {}}, 2, pipeline, {}),
        "measured-rank": (None, 1, colocated, {"trainer": "colocated"}),
    }
    for name, (units, world, topology, execution) in jobs.items():
        job = calm.submit(spec(name, steps=10, topology=topology, execution=execution))
        with ProcessGroup() as group:
            processes = start(group, calm, job, tmp_path, units, world, world)
            assert wait(processes) == [0] * world, processes[0].last_words()
        with calm.client() as client:
            times = step_times(client.show(job))
        assert times["measured_step_s"], name
        assert times["forecast_step_s"], name
        assert times["forecast_step_s"] > 0.001, "nominal operations on an accelerator would take microseconds"
