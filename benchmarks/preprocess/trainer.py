"""`python -m benchmarks.preprocess.trainer ENDPOINT JOB`: a trainer that takes batches and uses them, without a model.

It imports what any trainer does, `headrace.trainer.connect`, and runs beside the services as a process of its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

import torch

from benchmarks.preprocess.meter import Meter, Reading
from benchmarks.preprocess.workload import touch
from headrace import trainer
from headrace.trainer import StepLoader
from headrace.trainer.loading.steps import Step


def main() -> None:
    """Consume until the time is over, print the reading."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("endpoint")
    parser.add_argument("job")
    parser.add_argument("--skip", type=int, required=True, help="samples before the measurement")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument(
        "--watch", type=int, action="append", default=[], metavar="PID", help="read the CPU time of this process too"
    )
    parser.add_argument(
        "--rate", type=float, default=0.0, help="samples per second that the emulated model takes (default: no model)"
    )
    parser.add_argument(
        "--transport", action="append", choices=("shared_memory", "flight"), help="default: the best that there is"
    )
    parser.add_argument("--on-demand", action="store_true", help="measure for every line that comes in, and rest between")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transports = {"transports": options.transport} if options.transport else {}
    with trainer.connect(options.endpoint, job=options.job, **transports) as loader:
        steps = iter(loader)
        for _ in sys.stdin if options.on_demand else range(1):
            meter = Meter(skip_samples=options.skip, seconds=options.seconds, watched=options.watch)
            _measure(meter, loader, steps, options.rate).print()


def _measure(meter: Meter, loader: StepLoader, steps: Iterator[Step], rate: float) -> Reading:
    waits_s: list[float] = []
    for step in steps:
        num_samples = 0
        for microbatch in step:
            touch(microbatch.data.patches)
            num_samples += len(microbatch.data.sample_ids)
            if rate:
                time.sleep(len(microbatch.data.sample_ids) / rate)
        if meter.counting:
            waits_s.append(step.data_wait_s)
        loader.commit(step)
        if not meter.add(num_samples):
            break
    return meter.reading(waits_s)


if __name__ == "__main__":
    main()
