"""`python -m benchmarks.ray`: what a killed node of a Ray cluster delays."""

from __future__ import annotations

import argparse
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.peers import RAY_DATA
from benchmarks.peers.environment import python_of
from benchmarks.preprocess.workload import write_photos
from benchmarks.ray import killed
from benchmarks.report import RESULTS, Report
from benchmarks.timing import progress

PHOTOS, PHOTO_SHARDS = 1_600, 32
ROUNDS = 3


def main() -> None:
    """Measure, print, write. The verdict is in the table: a missed goal is no error of this program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round of everything")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where ray.json goes")
    options = parser.parse_args()
    python = python_of(RAY_DATA)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        photos = Path(name) / "photos"
        progress(f"writing {PHOTOS:,} photographs")
        write_photos(photos, PHOTOS, PHOTO_SHARDS)
        sections = [killed.section(python, photos, rounds=1 if options.quick else ROUNDS)]
    report = Report(benchmark="ray", date=datetime.now(UTC).isoformat(timespec="seconds"), quick=options.quick, sections=sections)
    report.write(options.results / "ray.json")
    report.show()


if __name__ == "__main__":
    main()
