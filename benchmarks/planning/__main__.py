"""`python -m benchmarks.planning`: every figure of the planner, in two tables, results/planning.json and rank-balance.json."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.planning import optimum, permutation, placing, quality, rank_balance, scale, speed, stage_splits, unit_replicas
from benchmarks.report import RESULTS, Report
from benchmarks.timing import progress
from headrace.reorder_service.planning import warm_up


def main() -> None:
    """Measure, print, write. The verdict is in the table: a goal that is missed is no error of this program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, sizes and instances")
    parser.add_argument("--only", choices=("rank-balance",), help="measure this part, and leave planning.json as it is")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON files and planning-scaling.png go")
    options = parser.parse_args()

    progress("compiling or loading the kernels")
    warm_up()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    balance = Report(benchmark="rank-balance", date=date, quick=options.quick, sections=list(rank_balance.sections()))
    balance.write(options.results / "rank-balance.json")
    balance.show()
    if options.only:
        return
    sections = [
        *quality.sections(),
        *stage_splits.sections(),
        *unit_replicas.sections(quick=options.quick),
        *speed.sections(quick=options.quick),
        *scale.sections(options.results / "planning-scaling.png", quick=options.quick),
        *optimum.sections(quick=options.quick),
        *permutation.sections(quick=options.quick),
        *placing.sections(),
    ]
    report = Report(benchmark="planning", date=date, quick=options.quick, sections=sections)
    report.write(options.results / "planning.json")
    report.show()


if __name__ == "__main__":
    main()
