"""`make bench-transport`: payload between two processes of one machine, by every transport, beside a raw socket and a memcpy."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.report import RESULTS, Report, Rival, Row, Section, at_least, at_most
from benchmarks.timing import progress
from headrace.cli.bench.bench_transport import MIB, ROUNDS, SIZES, THREADS, TransportFigures, measure
from headrace.transport.base import FLIGHT, SHARED_MEMORY

FLIGHT_GOAL, WRITE_GOAL, HAND_OFF_GOAL_US = 0.85, 0.9, 200


def main() -> None:
    """Measure, print, write. The verdict is in the table: a goal that is missed is no error of this program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where transport.json goes")
    options = parser.parse_args()
    figures = measure(1 if options.quick else ROUNDS, progress)
    report = Report(
        benchmark="transport",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=options.quick,
        sections=[_network(figures), _shared_memory(figures)],
    )
    report.write(options.results / "transport.json")
    report.show()


def _network(figures: TransportFigures) -> Section:
    rows = []
    for size in SIZES:
        raw = Rival(value=figures.raw[size].bytes_per_s / 1e9, source="raw TCP")
        for name in (name for name in figures.rates if name != SHARED_MEMORY):
            for threads, rates in ((THREADS, figures.rates), (1, figures.single)):
                rate = rates[name][size]
                is_judged = (name, threads, size) == (FLIGHT, THREADS, max(SIZES))
                goal = at_least(FLIGHT_GOAL * raw.value) if is_judged else None
                socket = figures.raw[size]
                detail = f"receiver's CPU {rate.cpu_s_per_gb:.2g} s/GB, raw {socket.cpu_s_per_gb:.2g}"
                detail = f"{detail}; sender's {rate.sender_cpu_s_per_gb:.2g}, raw {socket.sender_cpu_s_per_gb:.2g}"
                detail = f"{detail}; goal: {FLIGHT_GOAL:g} x raw TCP" if goal else detail
                what = f"{name}, parts of {size // MIB} MiB, {threads} at a time"
                rows.append(Row(name=what, value=rate.bytes_per_s / 1e9, unit="GB/s", rival=raw, goal=goal, detail=detail))
    return Section(title="Loopback, into Arrow batches; beside a TCP socket into one buffer that is used again", rows=rows)


def _shared_memory(figures: TransportFigures) -> Section:
    rows = []
    for size in SIZES:
        mib = size // MIB
        written = Rival(value=size / figures.memcpy_s[size] / 1e9, source="memcpy")
        rows.append(
            Row(
                name=f"written by the preprocessor, {mib} MiB",
                value=size / figures.write_s[size] / 1e9,
                unit="GB/s",
                rival=written,
                goal=at_least(WRITE_GOAL * written.value) if size == max(SIZES) else None,
                detail=f"goal: {WRITE_GOAL:g} x one memcpy" if size == max(SIZES) else "",
            )
        )
        if size in figures.hand_off_s:
            goal = at_most(HAND_OFF_GOAL_US)
            rows.append(
                Row(
                    name=f"hand-off, {mib} MiB",
                    value=1e6 * figures.hand_off_s[size],
                    unit="us",
                    goal=goal,
                    detail="median of the best round",
                )
            )
    return Section(title="Shared memory: parts that are decoded already, written once and then read in place", rows=rows)


if __name__ == "__main__":
    main()
