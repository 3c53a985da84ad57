"""What a job's execution says once it is planned for FSDP ranks, and back for a pipeline."""

from __future__ import annotations

import pytest

from headrace.errors import SpecError
from headrace.spec import JobSpec, parse_spec
from headrace.trainer.orchestrated.fsdp_ranks import check_planned, planned_for_ranks
from headrace.trainer.pipeline.topology import PipelineTopology


def job(stages: dict[str, int], **execution: object) -> JobSpec:
    topology = {"replicas": 2, "microbatches": 3, "stages": stages}
    return parse_spec({"name": "j", "sources": [{"path": "/d"}], "topology": topology, "execution": execution})


def test_what_is_frozen_or_checkpointed_stays_so_and_what_is_of_pipelines_goes() -> None:
    units = {"vision": {"dp": 1, "frozen": True}, "llm": {"tp": 2, "checkpointing": "auto"}}
    pipeline = job({"vision": 1, "audio": 1, "llm": 2}, trainer="pipeline", schedule="gpipe", memory_gib=4, units=units)
    spec = planned_for_ranks(pipeline, 4)
    check_planned(spec, 4)
    assert (spec.topology.microbatches, spec.topology.stages) == (3, {"vision": 1, "audio": 1, "llm": 1})
    assert {unit: size.model_dump(exclude_defaults=True) for unit, size in spec.execution.units.items()} == {
        "vision": {"frozen": True},
        "llm": {"checkpointing": True},
    }
    back = PipelineTopology.model_validate({"units": {"vision": {"frozen": True}, "audio": {}, "llm": {"dp": 2, "pp": 2}}})
    again = back.planned_for(spec, 2)
    assert (again.execution.trainer, again.topology.stages["llm"]) == ("pipeline", 2)


def test_units_that_fsdp_ranks_do_not_have_are_refused() -> None:
    with pytest.raises(SpecError, match=r"`trainer: fsdp` has vision, audio or both, and the llm, of one stage each"):
        planned_for_ranks(job({"encoder": 1, "llm": 1}, trainer="pipeline"), 4)
