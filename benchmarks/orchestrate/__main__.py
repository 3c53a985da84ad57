"""`python -m benchmarks.orchestrate`: searches for a placement, and encoders in an LLM's bubbles, beside what papers report.

Times of searches are measured, on one core; what they find is SIMULATED or a formula's. Small placements are EMULATED, and one is
trained for real.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.orchestrate import cost_tables, emulated_run, optimus, real_run, searches
from benchmarks.report import RESULTS, Report, Section

PARTS = ("papers", "cost-tables", "emulated-run", "real-run", "optimus")


def main() -> None:
    """Measure, print, write. The verdict is in the table: a missed goal is no error of this program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.orchestrate", description=__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer repetitions of what is timed, the smaller clusters only, and of the real run fewer lengths, rounds and steps",
    )
    parser.add_argument("--only", choices=PARTS, help="one part, which is printed and not written (default: all)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where orchestrate.json goes")
    options = parser.parse_args()
    parts: dict[str, Callable[[], Iterable[Section]]] = {
        "papers": lambda: searches.sections(quick=options.quick),
        "cost-tables": lambda: cost_tables.sections(quick=options.quick),
        "emulated-run": emulated_run.sections,
        "real-run": lambda: real_run.sections(quick=options.quick),
        "optimus": optimus.sections,
    }
    report = Report(
        benchmark="orchestrate",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=options.quick,
        sections=[section for part, run in parts.items() if options.only in (None, part) for section in run()],
    )
    if options.only is None:
        report.write(options.results / "orchestrate.json")
    report.show()


if __name__ == "__main__":
    main()
