"""`python -m tests.verify`: combinations of schedule, planning, units, parallelism, frozen parts and numerics, beside one
process. Every STRENGTH choices are together in at least one of them."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue

from tests.verify.cases import MOST_PROCESSES, Case, every_case
from tests.verify.comparison import differences
from tests.verify.covering import covering_cases
from tests.verify.processes import OPEN_END, Processes

STRENGTH = 3
_LINES = 40  # of what is said of a case: most of a traceback


def main(arguments: list[str] | None = None) -> int:
    """0: all cases are equal; 1: some are not; 130: interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.verify", description=__doc__)
    parser.add_argument("--cases", type=int, metavar="N", help="so many of all that there are, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains it")
    parser.add_argument("--transport", choices=OPEN_END, help="what carries messages (default: each case by one, in turn)")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="cases side by side (default: %(default)s)")
    args = parser.parse_args(arguments)
    cases = list(every_case() if args.cases is not None else covering_cases(STRENGTH))
    cases = [case for case in cases if args.only in str(case)]
    if args.cases is not None:
        cases = random.Random(args.seed).sample(cases, min(args.cases, len(cases)))
    transports = [args.transport] if args.transport else list(OPEN_END)
    pairs = [(case, transports[number % len(transports)]) for number, case in enumerate(cases)]
    began_s, bad = time.monotonic(), 0
    try:
        for number, ((case, transport), found) in enumerate(zip(pairs, _compared(pairs, args.at_once), strict=True), 1):
            bad += bool(found)
            for line in found[:_LINES]:
                print(f"  {line}", flush=True)
            print(f"{number:5}/{len(cases)}  {'DIFFERS' if found else 'equal':8}{case}, {transport}", flush=True)
    except KeyboardInterrupt:
        return 130
    print(f"{len(cases)} cases in {time.monotonic() - began_s:.0f} s, {bad} of them differ")
    return 1 if bad else 0


def _compared(pairs: Sequence[tuple[Case, str]], at_once: int) -> Iterator[list[str]]:
    """What differs in each case over its transport, in their order."""
    idle: SimpleQueue[Processes] = SimpleQueue()

    def compare(pair: tuple[Case, str]) -> list[str]:
        case, transport = pair
        processes = idle.get()
        try:
            return differences(processes, case, transport=transport)
        except RuntimeError as err:
            processes = stack.enter_context(Processes(MOST_PROCESSES))  # the others may wait for the one that failed
            return str(err).splitlines()
        finally:
            idle.put(processes)

    with ExitStack() as stack:
        for _ in range(at_once):
            idle.put(stack.enter_context(Processes(MOST_PROCESSES)))
        pool = ThreadPoolExecutor(at_once)
        try:
            yield from pool.map(compare, pairs)
        finally:
            pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    sys.exit(main())
