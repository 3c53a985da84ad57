"""submit JOB [FIELD=VALUE ...]: submit a job; a FIELD of a section is written with a dot, as in topology.replicas=2.

Without other values it has one source, `d`, steps of four samples, two of them planned ahead, and two replicas of a microbatch.
Values are YAML. The commands that follow mean this job, unless they name another one.
"""

from __future__ import annotations

from typing import Any

import yaml

from headrace.spec import parse_spec
from headrace.v1 import jobs_pb2
from tests.golden.world import Call, World


async def run(world: World, job: str, **fields: str) -> None:
    document: dict[str, Any] = {
        "name": job,
        "sources": [{"path": "/d"}],
        "global_batch": 4,
        "window": 2,
        "topology": {"replicas": 2, "microbatches": 1},
    }
    for field, value in fields.items():
        section, _, name = field.rpartition(".")
        (document.setdefault(section, {}) if section else document)[name] = yaml.safe_load(value)
    world.job = job

    async def submit() -> str:
        await world.jobs.Submit(jobs_pb2.SubmitRequest(spec_json=parse_spec(document).to_json()), Call())
        return ""

    await world.call(f"job {job}", submit())
