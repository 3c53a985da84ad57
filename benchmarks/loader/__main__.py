"""`python -m benchmarks.loader`: our loader in other libraries' training loops, in groups of processes, and after a restart."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.loader import balance, group, in_loops, resume
from benchmarks.preprocess.workload import write_photos
from benchmarks.report import RESULTS, Report, Section
from benchmarks.timing import progress

PHOTOS, PHOTO_SHARDS = 1_600, 16
PARTS = ("loops", "balance", "group", "resume")


def main() -> None:
    """Measure, print, write. The verdict is in the table: a goal that is missed is no error of this program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round of everything")
    parser.add_argument("--only", choices=PARTS, help="measure one part, and leave loader.json as it is")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where loader.json goes")
    options = parser.parse_args()
    rounds, seconds = (1, 1.5) if options.quick else (3, 4.0)

    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        photos = Path(name) / "photos"
        if options.only in (None, "loops", "group"):
            progress(f"writing {PHOTOS:,} photographs")
            write_photos(photos, PHOTOS, PHOTO_SHARDS)
        measure: dict[str, Callable[[], Iterable[Section]]] = {
            "loops": lambda: in_loops.sections(photos, rounds=rounds, seconds=seconds),
            "balance": lambda: balance.sections(quick=options.quick),
            "group": lambda: group.sections(photos, rounds=rounds, seconds=seconds),
            "resume": lambda: resume.sections(Path(name) / "resume", quick=options.quick),
        }
        sections = [section for part in PARTS if options.only in (None, part) for section in measure[part]()]
    report = Report(
        benchmark="loader", date=datetime.now(UTC).isoformat(timespec="seconds"), quick=options.quick, sections=sections
    )
    if options.only is None:
        report.write(options.results / "loader.json")
    report.show()


if __name__ == "__main__":
    main()
