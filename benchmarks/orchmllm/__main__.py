"""`python -m benchmarks.orchmllm`: ranks that have all units and meet after every phase, beside what OrchMLLM's paper reports.

Planning is measured, on one core, and so are four ranks that train a small model. Steps of the paper's models are SIMULATED, by
formulas, on lengths drawn as its data sets have them.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.orchmllm import fitting_batches, level_phases, node_traffic, planning_time, real_ranks
from benchmarks.report import RESULTS, Report
from benchmarks.timing import progress
from headrace.reorder_service.planning import warm_up


def main() -> None:
    """Measure, print, write. The verdict is in the table: a missed goal is no error of this program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.orchmllm", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer batches, and fewer ranks where many take long")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where orchmllm.json goes")
    options = parser.parse_args()
    progress("compiling or loading the kernels")
    warm_up()
    report = Report(
        benchmark="orchmllm",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=options.quick,
        sections=[
            planning_time.section(quick=options.quick),
            *level_phases.sections(quick=options.quick),
            *node_traffic.sections(quick=options.quick),
            *fitting_batches.sections(quick=options.quick),
            real_ranks.section(quick=options.quick),
        ],
    )
    report.write(options.results / "orchmllm.json")
    report.show()


if __name__ == "__main__":
    main()
