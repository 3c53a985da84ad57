"""One process of several that share microbatches. It goes through scenarios, each a job of its own, and writes what it got."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headrace import trainer
from headrace.errors import HeadraceError
from headrace.trainer.loading import group_channel, group_memory
from headrace.trainer.loading.collate import PAYLOAD

SHOWN = (*PAYLOAD, "sample_ids", "cu_seqlens", "image_grids", "mel_frames", "pack_offsets", "rows", "mask_fields")

received_bytes = 0
_broadcast = dist.broadcast


def counted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> None:
    """A broadcast whose bytes are counted."""
    global received_bytes
    received_bytes += tensor.nbytes
    _broadcast(tensor, *arguments, **options)


def shown(microbatch: trainer.Microbatch) -> dict[str, Any]:
    data = microbatch.data
    values = {name: getattr(data, name).tolist() for name in SHOWN}
    values["payload_bytes"] = sum(getattr(data, name).nbytes for name in PAYLOAD)
    return values | {"num_targets": data.num_targets, "sources": microbatch.sources.tolist(), "filler": microbatch.is_filler}


def take_part(scenario: dict[str, Any], rank: int) -> dict[str, Any]:
    """What this process gets of a job."""
    global received_bytes
    got: dict[str, Any] = {"steps": [], "error": "", "state": None}
    parallel = trainer.Parallel(group=dist.group.WORLD, **scenario["parallel"][rank])
    group_channel.BEAT_S = scenario.get("beat_s", 5.0)
    group_memory.FOLDER, group_memory.SHARE = Path(scenario.get("folder", "/dev/shm")), scenario.get("share", 4)
    options = scenario.get("options", {})
    try:
        loader = trainer.connect(scenario["endpoint"], job="job", parallel=parallel, transports=["flight"], **options)
        try:
            if scenario.get("opens_before"):
                loader.open()
            if "resume" in scenario:
                loader.load_state_dict(loader.state_dict() | {"step": scenario["resume"][rank]})
            if loader.has_next():
                got["first"] = loader.next_step
            for step in loader:
                received_bytes = 0
                entry: dict[str, Any] = {"index": step.index, "num_targets": step.num_targets, "count": step.num_microbatches}
                entry["target_weight"] = step.target_weight
                entry["microbatches"] = []
                got["steps"].append(entry)
                kept = []  # but for the sender, whose memory is reused as soon as nobody reads it
                for microbatch in step:
                    entry["microbatches"].append(shown(microbatch))
                    kept += [microbatch] if rank else []
                    if len(entry["microbatches"]) == scenario.get("leaves_behind"):
                        break
                entry["received_bytes"] = received_bytes
                entry["unchanged"] = not rank or list(map(shown, kept)) == entry["microbatches"]
                del kept
                entry["rejected"] = [item.sample_id for item in step.rejected]
                loader.commit(step, loss=7.0 if rank == 1 else float("nan"))
                got["state"] = loader.state_dict()
        finally:
            loader.close()
    except HeadraceError as err:
        got["error"] = f"{type(err).__name__}: {err}"
    return got


def main(rank: int, world_size: int, folder: Path) -> None:
    """Read scenarios.json there, and write RANK.json."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    dist.broadcast = counted
    scenarios = json.loads((folder / "scenarios.json").read_text())
    results = {name: take_part(scenario, rank) for name, scenario in scenarios.items()}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
