"""`python -m tests.verify`: combinations of schedule, planning, units, parallelism, frozen parts and numerics, beside one
process. Of pipelines every three choices are together in at least one of them, which runs on every transport; behind them come
FSDP ranks, and ranks that share sequences."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from tests.verify.parts import PARTS, Part
from tests.verify.processes import TRANSPORTS, Processes

_LINES = 40  # of what is said of a case: most of a traceback
_ORDERS = 100
"""After so many orders processes are started anew: each takes half a megabyte more, which twenty of them do not have for long."""


def main(arguments: list[str] | None = None) -> int:
    """0: all cases are equal; 1: some are not; 130: interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.verify", description=__doc__)
    parser.add_argument("--part", choices=PARTS, help="of what is compared (default: each, one after the other)")
    parser.add_argument("--cases", type=int, metavar="N", help="so many of all that there are of a part, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains it")
    parser.add_argument("--transport", choices=TRANSPORTS, help="what carries a pipeline's messages (default: each in turn)")
    parser.add_argument(
        "--skip", type=int, default=0, metavar="N", help="the first cases of --part, which an earlier run has compared"
    )
    parser.add_argument("--at-once", type=int, default=3, metavar="N", help="cases side by side (default: %(default)s)")
    args = parser.parse_args(arguments)
    if args.skip and args.part is None:
        parser.error("--skip goes with --part, whose cases it counts")
    bad = 0
    try:
        for part in [PARTS[args.part]] if args.part else PARTS.values():
            bad += _compare(part, part.cases(args), args.skip, args.at_once)
    except KeyboardInterrupt:
        return 130
    return 1 if bad else 0


def _compare(part: Part, cases: Sequence[Any], skip: int, at_once: int) -> int:
    """Print a line for each case but the first `skip`, behind what differs in it. Returns how many of them differ."""
    began_s, bad, left = time.monotonic(), 0, cases[skip:]
    for number, (case, found) in enumerate(zip(left, _compared(part, left, at_once), strict=True), skip + 1):
        bad += bool(found)
        for line in found[:_LINES]:
            print(f"  {line}", flush=True)
        print(f"{number:5}/{len(cases)}  {'DIFFERS' if found else 'equal':8}{case}", flush=True)
    print(f"{len(left)} cases in {time.monotonic() - began_s:.0f} s, {bad} of them differ", flush=True)
    return bad


def _compared(part: Part, cases: Sequence[Any], at_once: int) -> Iterator[list[str]]:
    """What differs in each case, in their order."""
    idle: SimpleQueue[Processes] = SimpleQueue()

    def compare(case: Any) -> list[str]:
        processes, are_spent = idle.get(), True  # where one has failed, the others may wait for it
        try:
            found = part.differences(processes, case)
            are_spent = processes.num_orders > _ORDERS
            return found
        except RuntimeError as err:
            return str(err).splitlines()
        finally:
            if are_spent:
                processes.close()
                processes = part.start()
            idle.put(processes)

    for _ in range(at_once):
        idle.put(part.start())
    pool = ThreadPoolExecutor(at_once)
    try:
        yield from pool.map(compare, cases)
    finally:
        pool.shutdown(cancel_futures=True)
        while not idle.empty():
            idle.get().close()


if __name__ == "__main__":
    sys.exit(main())
