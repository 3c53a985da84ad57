"""`python -m benchmarks.context`: which rank takes which tokens of a long sequence, and how many ranks take it.

Planning and attention are measured, on one core; steps are SIMULATED. Nothing is trained.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.context import degrees, distributions, exchanged, rank_attention
from benchmarks.report import RESULTS, Report


def main() -> None:
    """Measure, print, write. The verdict is in the table: a missed goal is no error of this program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer masks and batches, and shorter sequences")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where context.json goes")
    options = parser.parse_args()
    report = Report(
        benchmark="context",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=options.quick,
        sections=[
            *distributions.sections(quick=options.quick),
            rank_attention.section(quick=options.quick),
            exchanged.section(quick=options.quick),
            degrees.section(quick=options.quick),
        ],
    )
    report.write(options.results / "context.json")
    report.show()


if __name__ == "__main__":
    main()
