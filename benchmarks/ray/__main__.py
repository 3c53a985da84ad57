"""`python -m benchmarks.ray`: what a killed Ray node delays, and what preprocessors on Ray deliver beside plain ones."""

from __future__ import annotations

import argparse
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.peers import PEERS
from benchmarks.peers.environment import python_of
from benchmarks.preprocess.workload import write_photos
from benchmarks.ray import hosted, killed
from benchmarks.report import RESULTS, Report
from benchmarks.timing import progress

PHOTOS, PHOTO_SHARDS = 1_600, 32
ROUNDS, SECONDS = 3, 4.0
RAY_DATA = next(peer for peer in PEERS if peer.module == "ray_data")
"""Its environment has Ray, and behind it what Headrace has: all processes of Ray run in it."""


def main() -> None:
    """Measure, print, write. The verdict is in the table: a missed goal is no error of this program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round of everything")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where ray.json goes")
    options = parser.parse_args()
    rounds, seconds = (1, 1.5) if options.quick else (ROUNDS, SECONDS)
    python = python_of(RAY_DATA)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        photos = Path(name) / "photos"
        progress(f"writing {PHOTOS:,} photographs")
        write_photos(photos, PHOTOS, PHOTO_SHARDS)
        sections = [
            killed.section(python, photos, rounds=rounds),
            hosted.section(python, RAY_DATA, photos, rounds=rounds, seconds=seconds),
        ]
    report = Report(benchmark="ray", date=datetime.now(UTC).isoformat(timespec="seconds"), quick=options.quick, sections=sections)
    report.write(options.results / "ray.json")
    report.show()


if __name__ == "__main__":
    main()
