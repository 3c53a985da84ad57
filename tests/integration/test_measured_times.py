"""The measured seconds of a live job come back to the reorder service: they correct its costs, and stand beside its forecast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.cli.watch.top_figures import step_times
from headrace.processes import ProcessGroup
from tests.integration.trainers import start, wait

pytestmark = pytest.mark.integration


STEPS = 9  # the first correction holds from step 8 on


def times(cluster: Any, job: str) -> dict[str, float | None]:
    with cluster.client() as client:
        return step_times(client.show(job))


@pytest.mark.slow
def test_a_pipeline_is_forecast_by_what_its_stages_have_measured(calm, spec, tmp_path: Path) -> None:
    topology = {"replicas": 1, "microbatches": 2, "stages": {"encoder": 1, "llm": 1}}
    job = calm.submit(spec("measured-pipeline", steps=STEPS, global_batch=4, topology=topology))
    with ProcessGroup() as group:
        processes = start(group, calm, job, tmp_path, {"encoder": {}, "llm": {}}, 2, 2)
        assert wait(processes) == [0] * 2, processes[0].last_words()
    found = times(calm, job)
    assert found["measured_step_s"]
    assert found["forecast_step_s"]
    assert found["forecast_step_s"] > 0.001, "nominal operations on an accelerator take microseconds"


def test_a_rank_with_all_units_is_forecast_by_what_its_loop_takes(calm, spec) -> None:
    topology = {"replicas": 1, "microbatches": 2}
    job = calm.submit(spec("measured-rank", steps=STEPS, topology=topology, execution={"trainer": "colocated"}))
    calm.consume(job)
    found = times(calm, job)
    assert found["measured_step_s"]
    assert found["forecast_step_s"]
