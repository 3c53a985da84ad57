"""`python -m benchmarks.preprocess`: codecs, delivery beside other loaders, scaling, formats, memory; a table and a JSON file."""

from __future__ import annotations

import argparse
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.preprocess import codecs, delivery, formats, memory, scaling
from benchmarks.preprocess.workload import write_photos
from benchmarks.report import RESULTS, Report
from benchmarks.timing import progress

PHOTOS, PHOTO_SHARDS = 3_200, 32
"""Enough that no contender comes to the end of an epoch while it is measured."""
ROUNDS, SECONDS = 3, 4.0


def main() -> None:
    """Measure, print, write. The verdict is in the table: a goal that is missed is no error of this program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preprocess", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round of everything")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where preprocess.json goes")
    options = parser.parse_args()
    rounds, seconds = (1, 1.5) if options.quick else (ROUNDS, SECONDS)

    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        photos = Path(folder) / "photos"
        progress(f"writing {PHOTOS:,} photographs")
        write_photos(photos, PHOTOS, PHOTO_SHARDS)
        sections = [
            *codecs.sections(quick=options.quick),
            *delivery.sections(photos, rounds=rounds, seconds=seconds),
            *scaling.sections(photos, rounds=rounds, seconds=seconds),
            *formats.sections(Path(folder) / "formats", rounds=rounds, quick=options.quick),
            *memory.sections(Path(folder) / "spread", quick=options.quick),
        ]
    report = Report(
        benchmark="preprocess", date=datetime.now(UTC).isoformat(timespec="seconds"), quick=options.quick, sections=sections
    )
    report.write(options.results / "preprocess.json")
    report.show()


if __name__ == "__main__":
    main()
