"""`python -m benchmarks.orchestrate`: searches for a placement, and encoders in an LLM's bubbles, beside what papers report.

Times of searches are measured, on one core; what they find is SIMULATED or a formula's. Nothing is trained.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.orchestrate import optimus, searches
from benchmarks.report import RESULTS, Report


def main() -> None:
    """Measure, print, write. The verdict is in the table: a missed goal is no error of this program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.orchestrate", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions of what is timed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where orchestrate.json goes")
    options = parser.parse_args()
    report = Report(
        benchmark="orchestrate",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=options.quick,
        sections=[*searches.sections(quick=options.quick), *optimus.sections()],
    )
    report.write(options.results / "orchestrate.json")
    report.show()


if __name__ == "__main__":
    main()
