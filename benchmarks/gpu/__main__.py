"""`python -m benchmarks.gpu`: checks and measures the trainer on this machine's GPUs: a table, a JSON file.

Without a GPU the same checks run on the CPU with tiny shapes, and say so, but for those of host waits, compiled layers, pipelines
and nodes, which are skipped. That shows that they run, and whether results are
right; their times mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu import (
    attention_kernels,
    checkpoint_stall,
    copy_stress,
    cuda_trainers,
    fed_by_service,
    host_waits_of_step,
    memory_forecast,
    recompiles,
    stage_speed,
    step_equality,
)
from benchmarks.gpu.isolated_check import Check, CheckProcesses
from benchmarks.gpu.target import Target
from benchmarks.report import RESULTS, Report, Row, Section, at_most
from benchmarks.timing import progress

CHECKS = (
    Check(measure=attention_kernels.measure, title="Attention of packed segments beside float32 on the CPU", budget_s=40),
    Check(measure=step_equality.measure, title="A step on the device beside float32 on the CPU", budget_s=70),
    Check(measure=host_waits_of_step.measure, title="Places where the host waits for the device in a step", budget_s=30),
    Check(measure=copy_stress.measure, title="Microbatches copied while the device is behind", budget_s=40),
    Check(measure=memory_forecast.measure, title="Memory of a stage: as planned, and as the allocator has it", budget_s=30),
    Check(measure=stage_speed.measure, title="Speed of one stage of a 7B LLM, bf16, without checkpointing", budget_s=110),
    Check(measure=recompiles.measure, title="torch.compile of a block over microbatches of other lengths", budget_s=60),
    Check(measure=checkpoint_stall.measure, title="What a checkpoint costs training", budget_s=60),
    Check(measure=fed_by_service.measure, title="Training with real data from a local service", budget_s=90),
    Check(measure=cuda_trainers.measure, title="`headrace train`, a process for each GPU, on the bundled example", budget_s=180),
)
"""In the order in which they run, those first that tell most."""
TOTAL_S = 480.0
"""Seconds for a whole run: checks share what those before have left, and one that has none left is ended at once."""
_BUDGET_ON_CPU_S = 300.0  # of each check: what shares the processor may make it slow


def main(arguments: list[str] | None = None) -> int:
    """0: everything could be measured; 1: something could not. Goals that are missed show in the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="checks whose name contains it; gpu.json is left as it is")
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help=f"where the rows go (default: {RESULTS.name}/ with a GPU, nowhere without)"
    )
    parser.add_argument("--cpu", action="store_true", help="take the CPU though there is a GPU")
    options = parser.parse_args(arguments)
    target, processes = Target.here(cpu=options.cpu), CheckProcesses()
    progress(f"on {target.name}")
    began_s, sections = time.monotonic(), []
    checks = [check for check in CHECKS if options.only in check.name]
    for number, check in enumerate(checks, 1):
        passed_s = time.monotonic() - began_s
        budget_s = min(check.budget_s, TOTAL_S - passed_s) if target.is_gpu else _BUDGET_ON_CPU_S
        left = replace(check, budget_s=max(1.0, budget_s))
        progress(f"{number}/{len(checks)} {check.name}, at most {left.budget_s:.0f} s ({passed_s:.0f} s passed)")
        sections.append(processes.run(left, target))
    goal = at_most(TOTAL_S) if target.is_gpu and not options.only else None
    took = Row(name=f"{len(checks)} checks", value=time.monotonic() - began_s, unit="s", goal=goal)
    sections.append(Section(title="The whole run", rows=[took]))
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
