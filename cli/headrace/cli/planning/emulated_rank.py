"""One process of an emulated pipeline: `python -m headrace.cli.planning.emulated_rank RANK COUNT STORE`.

It reads one planned step per line of standard input, and for each writes one line with what it did. Both are JSON.
`headrace.cli.planning.emulated_ranks` starts these processes and talks to them.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from headrace.plan import StepPlan
from headrace.trainer.pipeline.channels import Channels
from headrace.trainer.pipeline.emulated_stage import Emulated, EmulatedStep, emulate
from headrace.trainer.pipeline.topology import PipelineTopology


def main() -> None:
    """Join the process group and run this rank's share of every step on standard input, until it ends."""
    rank, count, store = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # gloo prints messages of its own on standard output: send them to standard error
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(count))
    channels: dict[str, Channels] = {}  # by topology
    for line in sys.stdin:
        step = _step(json.loads(line))
        key = step.topology.model_dump_json()
        if key not in channels:
            channels[key] = Channels(step.topology, dist.get_rank(), torch.device("cpu"))
        print(json.dumps(_answer(emulate(step, channels[key]))), file=answers, flush=True)


def _step(document: dict[str, Any]) -> EmulatedStep:
    return EmulatedStep(
        topology=PipelineTopology.model_validate(document["topology"]),
        plan=StepPlan.from_json(document["plan"]),
        forward_s={
            unit: dict(zip(document["sample_ids"], column, strict=True)) for unit, column in document["forward_s"].items()
        },
        factors=document["factors"],
    )


def _answer(emulated: Emulated) -> dict[str, Any]:
    return {
        "places": [
            {
                "unix_s": recording.unix_s,
                "events": [
                    [
                        *(event.action.kind, event.action.microbatch, event.action.chunk),
                        *(event.start_s, event.end_s, event.wait_s, event.compute_s),
                    ]
                    for event in recording.events
                ],
            }
            for recording in emulated.recordings
        ],
        "asked_s": emulated.asked_s,
        "slept_s": emulated.slept_s,
    }


if __name__ == "__main__":
    main()
