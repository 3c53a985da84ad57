"""`python -m benchmarks.loader.group_rank ENDPOINT JOB STORE RANK SIZE`: one of the processes that train on the same samples.

The first one prints the bytes that it broadcast over those of its microbatches, and its reading.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.preprocess.meter import Meter
from benchmarks.preprocess.workload import touch
from headrace import trainer
from headrace.trainer.loading import group_memory
from headrace.trainer.loading.collate import PAYLOAD

TIMEOUT = timedelta(seconds=120)
_broadcast = dist.broadcast
_sent_bytes = 0


def _counted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    """A broadcast whose bytes are counted."""
    global _sent_bytes
    _sent_bytes += tensor.nbytes
    return _broadcast(tensor, *arguments, **options)


def main() -> None:
    """Take steps until the first process says that its time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("endpoint")
    parser.add_argument("job")
    parser.add_argument("store", help="file by which the processes find each other")
    parser.add_argument("rank", type=int)
    parser.add_argument("size", type=int)
    parser.add_argument("--broadcast", action="store_true", help="have no memory in common, as on several hosts")
    parser.add_argument("--skip", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.broadcast:
        group_memory.FOLDER = Path("/proc")
    parallel = None
    if options.size > 1:
        init = f"file://{options.store}"
        dist.init_process_group("gloo", init_method=init, rank=options.rank, world_size=options.size, timeout=TIMEOUT)
        parallel = trainer.Parallel(group=dist.group.WORLD)
    dist.broadcast = _counted
    meter = Meter(skip_samples=options.skip, seconds=options.seconds)
    payload_bytes = 0
    with trainer.connect(options.endpoint, job=options.job, parallel=parallel) as loader:
        for step in loader:
            num_samples = 0
            for microbatch in step:
                touch(microbatch.data.patches)
                num_samples += len(microbatch.data.sample_ids)
                payload_bytes += sum(getattr(microbatch.data, name).nbytes for name in PAYLOAD)
            loader.commit(step)
            goes_on = torch.tensor([meter.add(num_samples)])
            if options.size > 1:
                _broadcast(goes_on, 0)
            if not goes_on.item():
                break
    if options.rank == 0:
        print(_sent_bytes / payload_bytes)
        meter.reading().print()


if __name__ == "__main__":
    main()
