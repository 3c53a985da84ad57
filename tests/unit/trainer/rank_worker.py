"""One rank of data-parallel steps, each from the same start."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from headrace.spec import JobSpec
from headrace.trainer.loading.collate import PackedMicrobatch, collate
from headrace.trainer.models.multimodal import build_model
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.train_step import TrainStep


def read_part(path: str) -> PackedMicrobatch:
    with pa.ipc.open_stream(path) as reader:
        return collate(list(reader))


def main(rank: int, world_size: int, folder: Path) -> None:
    """Read settings.json there, and write RANK.npz."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
    )
    options = json.loads((folder / "settings.json").read_text())
    results = {}
    for name, ranks in options["divisions"].items():
        model = build_model("tiny", JobSpec.model_validate(options["spec"]), options["vocab_size"], 1, 2, options["seed"])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.01)
        step = TrainStep(model, optimizer, settings=OptimizerSpec(max_grad_norm=options["max_grad_norm"]))
        for path in ranks[rank]:
            step.accumulate(read_part(path))
        result = step.finish()
        results[f"{name}/totals"] = np.array([result.loss, result.target_weight, result.grad_norm])
        results |= {f"{name}/{key}": parameter.detach().numpy() for key, parameter in model.named_parameters()}
    np.savez(folder / f"{rank}.npz", **results)
    dist.destroy_process_group()
