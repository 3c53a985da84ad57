"""`python -m benchmarks.preprocess`: codecs, delivery beside other loaders, scaling, formats, memory, remote sets."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.preprocess import codecs, delivery, formats, memory, remote, scaling
from benchmarks.preprocess.workload import write_photos
from benchmarks.report import RESULTS, Report, Section
from benchmarks.timing import progress

PHOTOS, PHOTO_SHARDS = 3_200, 32
"""Enough that no contender comes to the end of an epoch while it is measured."""
ROUNDS, SECONDS = 3, 4.0
PARTS = ("codecs", "delivery", "scaling", "formats", "memory", "remote")


def main() -> None:
    """Measure, print, write. The verdict is in the table: a goal that is missed is no error of this program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preprocess", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round of everything")
    parser.add_argument("--only", choices=PARTS, help="measure one part, and leave preprocess.json as it is")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where preprocess.json goes")
    options = parser.parse_args()
    rounds, seconds = (1, 1.5) if options.quick else (ROUNDS, SECONDS)

    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        folder = Path(name)
        photos = folder / "photos"
        if options.only in (None, "delivery", "scaling"):
            progress(f"writing {PHOTOS:,} photographs")
            write_photos(photos, PHOTOS, PHOTO_SHARDS)
        measure: dict[str, Callable[[], list[Section]]] = {
            "codecs": lambda: codecs.sections(quick=options.quick),
            "delivery": lambda: delivery.sections(photos, rounds=rounds, seconds=seconds),
            "scaling": lambda: scaling.sections(photos, rounds=rounds, seconds=seconds),
            "formats": lambda: formats.sections(folder / "formats", rounds=rounds, quick=options.quick),
            "memory": lambda: memory.sections(folder / "spread", quick=options.quick),
            "remote": lambda: remote.sections(folder / "remote", rounds=rounds),
        }
        sections = [section for part in PARTS if options.only in (None, part) for section in measure[part]()]
    report = Report(
        benchmark="preprocess", date=datetime.now(UTC).isoformat(timespec="seconds"), quick=options.quick, sections=sections
    )
    if options.only is None:
        report.write(options.results / "preprocess.json")
    report.show()


if __name__ == "__main__":
    main()
