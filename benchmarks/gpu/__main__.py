"""`python -m benchmarks.gpu`: checks and measures the trainer on this machine's GPUs: a table, a JSON file.

Without a GPU the same checks run on the CPU with tiny shapes, and say so. That shows that they run, and whether results are
right; their times mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu.isolated_check import Check, CheckProcesses
from benchmarks.gpu.target import Target
from benchmarks.report import RESULTS, Report
from benchmarks.timing import progress

CHECKS = (
    Check(module="attention_kernels", title="Attention of packed segments beside float32 on the CPU", budget_s=40),
    Check(module="step_equality", title="A step on the device beside float32 on the CPU", budget_s=70),
    Check(module="host_waits_of_step", title="Places where the host waits for the device in a step", budget_s=30),
    Check(module="copy_stress", title="Microbatches copied while the device is behind", budget_s=40),
    Check(module="memory_forecast", title="Memory of a stage: as planned, and as the allocator has it", budget_s=30),
    Check(module="stage_speed", title="Speed of one stage of a 7B LLM, bf16, without checkpointing", budget_s=60),
    Check(module="recompiles", title="torch.compile of a block over microbatches of other lengths", budget_s=60),
    Check(module="checkpoint_stall", title="What a checkpoint costs training", budget_s=60),
    Check(module="fed_by_service", title="Training with real data from a local service", budget_s=90),
    Check(module="several_gpus", title="Pipelines of several processes, one for each GPU", budget_s=120),
)
"""In the order in which they run; the sum of their budgets is the longest that a run may take."""
TOTAL_S = 480.0
"""Seconds for a whole run: a check that no time is left for is ended at once."""


def main(arguments: list[str] | None = None) -> int:
    """0: everything could be measured; 1: something could not. Goals that are missed show in the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="checks whose name contains it; gpu.json is left as it is")
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help=f"where the rows go (default: {RESULTS.name}/ with a GPU, nowhere without)"
    )
    options = parser.parse_args(arguments)
    target, processes = Target.here(), CheckProcesses()
    progress(f"on {target.name}")
    began_s, sections = time.monotonic(), []
    checks = [check for check in CHECKS if options.only in check.module]
    for number, check in enumerate(checks, 1):
        passed_s = time.monotonic() - began_s
        left = Check(module=check.module, title=check.title, budget_s=max(1.0, min(check.budget_s, TOTAL_S - passed_s)))
        progress(f"{number}/{len(checks)} {check.module}, at most {left.budget_s:.0f} s ({passed_s:.0f} s passed)")
        sections.append(processes.run(left, target))
    report = Report(
        benchmark="gpu" if target.is_gpu else "gpu, CPU form",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=not target.is_gpu,
        sections=sections,
        device=target.name,
    )
    if options.results is not None or (target.is_gpu and not options.only):
        report.write((options.results or RESULTS) / ("gpu.json" if target.is_gpu else "gpu-emulated.json"))
    report.show()
    return 1 if any(row.unit == "failure" for row in report.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
