"""Two slices of a stage, of its layers or of its sequences, that choose layers to run again: what one lacks, both do without."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from headrace.plan import Microbatch, StepPlan, Topology
from headrace.sample import SCHEMA, UNIT_COLUMNS
from headrace.spec import parse
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.pipeline.layer_partition import bounds, with_cuts
from headrace.trainer.pipeline.pipeline_step import PipelineStep
from headrace.trainer.pipeline.process_groups import ProcessGroups
from headrace.trainer.pipeline.routes import Portion, Routes
from headrace.trainer.pipeline.stage_building import build_stages
from headrace.trainer.pipeline.topology import PipelineTopology
from tests.verify.batches import AUDIO, IMAGE, SHAPE, VOCAB, packed, whole_model

SLICES, TIMEOUT_S = 2, 60.0
KINDS = ("tp", "cp")
MICROBATCHES, TOKENS = 6, 200
"""All of them are in flight, so that what layers save by running again is many times what one holds then."""
GIB = 2.0**30


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """What each process has found of each kind of slices."""
    folder = tmp_path_factory.mktemp("slices")
    mp.start_processes(compute, args=(folder,), nprocs=SLICES, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(SLICES)]


def compute(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=SLICES, timeout=timedelta(seconds=TIMEOUT_S))
    torch.save({kind: of_kind(kind, rank) for kind in KINDS}, folder / f"{rank}.pt")
    dist.destroy_process_group()


def of_kind(kind: str, rank: int) -> dict[str, Any]:
    kept, _, bytes_kept = run(kind, None)
    _, again, bytes_again = run(kind, 0)
    # The second slice alone is short of memory, by half of what layers that run again would save.
    half, number, _ = run(kind, (bytes_kept + bytes_again) / 2 if rank else GIB)
    return {"losses": (kept, half), "layers": (again, number), "bytes": bytes_kept}


def run(kind: str, limit: float | None) -> tuple[tuple[float, float], int, float]:
    """Loss and gradient norm of a step, the layers that ran again, and the bytes forecast.

    limit: in bytes; None: nothing runs again; 0: everything does.
    """
    auto = {"checkpointing": "auto", "device_memory_gib": limit / GIB} if limit else {"checkpointing": limit == 0}
    topology = parse(PipelineTopology, {"schedule": "gpipe", "units": {"llm": {kind: SLICES, **auto}}}, "topology")
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "image": IMAGE, "audio": AUDIO}
    topology = with_cuts(topology, SHAPE, **sizes)
    cuts, cpu = bounds(topology, SHAPE, **sizes)["llm"], torch.device("cpu")
    groups = ProcessGroups.make(topology, cpu, tied=True)
    place = topology.place(dist.get_rank())
    own = groups.of_place[place]
    stages = build_stages(whole_model, topology, place, cuts, seed=1, device=cpu, slices=own.slices, context=own.context)
    step = PipelineStep(topology, {place: stages}, groups)
    memory = step.places[0].forecast_memory(IMAGE, AUDIO)
    microbatches = [Microbatch(units={"llm": (sample,)}) for sample in range(MICROBATCHES)]
    planned = Topology(replicas=1, microbatches=MICROBATCHES, stages={"llm": 1})
    routes = Routes(StepPlan(strategy="by hand", seed=0, topology=planned, replicas=[microbatches]), {"llm": 1})

    def text_of(portion: Portion) -> PackedMicrobatch:
        ids = np.random.default_rng(portion.samples[0]).integers(3, VOCAB, TOKENS, dtype=np.int32)
        nothing: dict[str, Any] = {name: [] for name in SCHEMA.names}
        return packed(
            [nothing | {"sample_id": portion.samples[0], "input_ids": ids, "labels": ids, "flags": 0}], UNIT_COLUMNS["llm"]
        )

    result = step.run(routes, [step.places[0].prepare.feed(routes, text_of)], 1e-3)
    assert memory.forecast is not None
    return (result.loss, result.grad_norm), memory.forecast.num_checkpointed, memory.forecast.total


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_both_slices_run_the_same_layers_again(answers: list[dict[str, dict[str, Any]]], kind: str) -> None:
    (of_all, of_some), others = answers[0][kind]["layers"], answers[1][kind]["layers"]
    assert others == (of_all, of_some)
    assert 0 < of_some < of_all == SHAPE.llm.layers


@pytest.mark.parametrize("kind", KINDS)
def test_and_nothing_else_changes(answers: list[dict[str, dict[str, Any]]], kind: str) -> None:
    for answer in answers:
        kept, some = answer[kind]["losses"]
        assert some == kept
        assert answer[kind]["bytes"] == answers[0][kind]["bytes"], "they forecast alike"
