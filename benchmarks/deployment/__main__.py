"""`python -m benchmarks.deployment`: what further hosts add, and what mutual TLS and tokens take."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from benchmarks.deployment.hosts import SHARE, hosts
from benchmarks.deployment.hosts_fleet import PLAIN, Fleet, Papers, fleet
from benchmarks.preprocess.workload import write_photos
from benchmarks.report import RESULTS, Report, Rival, Row, Section, at_least
from benchmarks.timing import progress

COUNTS = (1, 2, 4)
PHOTOS, PHOTO_SHARDS = 1_600, 16
ROUNDS, SECONDS = 5, 8.0
LINEAR, ENCRYPTED = 0.95, 0.95
RAY_DATA = Rival(value=1.12 / 4, source="Ray Data, published: 1.12 x from 4 nodes")


def main() -> None:
    """Measure, print, write. The verdict is in the table: a goal that is missed is no error of this program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deployment", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round of everything")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where deployment.json goes")
    options = parser.parse_args()
    rounds, seconds = (1, 3.0) if options.quick else (ROUNDS, SECONDS)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name, hosts(sum(COUNTS) + 1) as every:
        folder = Path(name)
        progress(f"writing {PHOTOS:,} photographs")
        write_photos(folder / "photos", PHOTOS, PHOTO_SHARDS)
        closed = _papers(folder / "papers")
        with contextlib.ExitStack() as stack:
            fleets: dict[str, Fleet] = {}
            free = iter(every)
            for label, count, papers in [*((f"{count}", count, closed) for count in COUNTS), ("plain", 1, PLAIN)]:
                progress(f"starting {count} hosts ({label})")
                on = [next(free) for _ in range(count)]
                running = fleet(folder / "photos", on, papers, folder / f"fleet-{label}", seconds=seconds)
                fleets[label] = stack.enter_context(running)
            rates = _rates(fleets, rounds)
    report = Report(
        benchmark="deployment",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=options.quick,
        sections=[_scaling(rates), _encryption(rates)],
    )
    report.write(options.results / "deployment.json")
    report.show()


def _rates(fleets: Mapping[str, Fleet], rounds: int) -> dict[str, list[float]]:
    """Samples per second of each fleet in turns; a first turn of each is not counted."""
    rates: dict[str, list[float]] = {label: [] for label in fleets}
    for number in range(rounds + 1):
        progress(f"turn {number} of {rounds}")
        for label, running in fleets.items():
            reading = running.turn()
            if number:
                rates[label].append(reading.samples / reading.seconds)
    return rates


def _scaling(rates: Mapping[str, list[float]]) -> Section:
    rows = [Row(name="one host", value=median(rates["1"]), unit="samples/s")]
    for count in COUNTS[1:]:
        shares = [many / (count * one) for one, many in zip(rates["1"], rates[str(count)], strict=True)]
        rows.append(
            Row(
                name=f"{count} hosts: share of linear",
                value=median(shares),
                rival=RAY_DATA if count == COUNTS[-1] else None,
                goal=at_least(LINEAR),
                detail=f"turns: {', '.join(f'{share:.2f}' for share in shares)}",
            )
        )
    title = (
        f"Preprocessors on hosts of {SHARE:g} of a core each (network namespaces with addresses of their own, without delay or "
        "loss); by Arrow Flight, with mutual TLS and tokens"
    )
    return Section(title=title, rows=rows)


def _encryption(rates: Mapping[str, list[float]]) -> Section:
    shares = [closed / plain for closed, plain in zip(rates["1"], rates["plain"], strict=True)]
    row = Row(
        name="samples with mutual TLS and tokens, of those without",
        value=median(shares),
        goal=at_least(ENCRYPTED),
        detail=f"turns: {', '.join(f'{share:.2f}' for share in shares)}",
    )
    return Section(title="What closed doors leave of a host that is held to a share of a core", rows=[row])


def _papers(folder: Path) -> Papers:
    """Make certificates and tokens as a user does, and say who gets what."""
    for command in (["certs", str(folder)], ["tokens", str(folder / "tokens")]):
        subprocess.run([sys.executable, "-m", "headrace.cli", *command], check=True, capture_output=True)
    tokens = folder / "tokens"
    with (tokens / "submit").open("a", encoding="utf-8") as submit:  # the trainer's process submits the job, too
        submit.write((tokens / "train").read_text(encoding="utf-8"))

    def of(part: str, role: str) -> dict[str, str]:
        return {"HEADRACE_TLS": str(folder / part), "HEADRACE_CLUSTER_TOKEN_FILE": str(tokens / role)}

    return Papers(
        reorder={"HEADRACE_TLS": str(folder / "reorder"), "HEADRACE_TOKENS": str(tokens)},
        preprocessor=of("preprocessor", "preprocess") | {"HEADRACE_TOKENS": str(tokens)},
        trainer=of("trainer", "train"),
    )


if __name__ == "__main__":
    main()
