"""Two data-parallel ranks of two processes each, on a real cluster: every sample once in the ledger, twice in the processes."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PROCESS = """
import json, sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from headrace import trainer

rank, store, endpoint, job, out = int(sys.argv[1]), *sys.argv[2:]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4, timeout=timedelta(seconds=90))
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
steps = []
with trainer.connect(endpoint, job=job, mesh=mesh, equal_microbatches=True) as loader:
    for step in loader:
        entry = {"num_targets": step.num_targets, "counted": 0, "longest": 0, "samples": [], "sources": []}
        for microbatch in step:
            data = microbatch.data
            entry["counted"] += data.num_targets
            entry["longest"] = max(entry["longest"], len(data.input_ids))
            entry["samples"] += data.sample_ids.tolist()
            entry["sources"] += [loader.spec.sources[i].name for i in microbatch.sources.tolist()]
        steps.append(entry | {"count": step.num_microbatches, "max_tokens": step.max_tokens})
        loader.commit(step)
    evaluated = [[i for microbatch in step for i in microbatch.data.sample_ids.tolist()] for step in loader.evaluate("texts")]
open(out, "w").write(json.dumps({"steps": steps, "evaluated": evaluated}))
dist.barrier()
dist.destroy_process_group()
"""


def test_two_ranks_of_two_processes_train_on_every_sample_once(calm: Any, spec: Any, tmp_path: Path) -> None:
    data = Path(__file__).parents[2] / "examples" / "data"
    sources = [{"path": str(data / f"{name}-00000.tar"), "name": name} for name in ("charts", "text")]
    topology = {"replicas": 3, "microbatches": 2}  # one rank has four microbatches, the other one two
    validation = {"texts": {"sources": sources[1:]}}
    job = calm.submit(spec("two-by-two", steps=2, sources=sources, topology=topology, validation=validation))
    outs = [tmp_path / f"{rank}.json" for rank in range(4)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank), str(tmp_path / "store"), calm.endpoint, job, str(out)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, out in enumerate(outs)
    ]
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, errors
    ledger = calm.ledger(job)
    documents = [json.loads(out.read_text()) for out in outs]
    of_ranks = [document["steps"] for document in documents]
    first, _, second, _ = evaluated = [document["evaluated"] for document in documents]
    assert evaluated == [first, first, second, second]
    together = [i for steps in zip(first, second, strict=True) for i in sorted(chain(*steps))]
    assert together == list(range(len(together))), "an evaluation has every sample once"
    for index, entry in enumerate(ledger):
        steps = [of_rank[index] for of_rank in of_ranks]
        assert [step["count"] for step in steps] == [4] * 4
        assert len({step["num_targets"] for step in steps}) == 1
        assert sum(step["counted"] for step in steps) == steps[0]["num_targets"], "slices have all targets, each once"
        assert max(step["longest"] for step in steps) <= steps[0]["max_tokens"]
        for first, second in (steps[:2], steps[2:]):
            assert (first["samples"], first["sources"]) == (second["samples"], second["sources"])
        assert not set(steps[0]["samples"]) & set(steps[2]["samples"])
        said = sorted(name for step in (steps[0], steps[2]) for name in step["sources"])
        assert said == sorted(name.partition("/")[0] for name in entry.samples)
