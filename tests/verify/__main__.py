"""`python -m tests.verify`: every combination of schedule, planning, units, parallelism and frozen parts, beside one process."""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.verify.cases import MOST_PROCESSES, every_case
from tests.verify.comparison import differences
from tests.verify.processes import Processes


def main(arguments: list[str] | None = None) -> int:
    """0: all cases are equal; 1: some are not; 130: interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.verify", description=__doc__)
    parser.add_argument("--cases", type=int, metavar="N", help="so many, drawn at random (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains it")
    args = parser.parse_args(arguments)
    cases = [case for case in every_case() if args.only in str(case)]
    if args.cases is not None:
        cases = random.Random(args.seed).sample(cases, min(args.cases, len(cases)))
    began_s, bad = time.monotonic(), 0
    try:
        with Processes(MOST_PROCESSES) as processes:
            for number, case in enumerate(cases, 1):
                found = differences(processes, case)
                bad += bool(found)
                for line in found[:5]:
                    print(f"  {line}", flush=True)
                print(f"{number:5}/{len(cases)}  {'DIFFERS' if found else 'equal':8}{case}", flush=True)
    except KeyboardInterrupt:
        return 130
    print(f"{len(cases)} cases in {time.monotonic() - began_s:.0f} s, {bad} of them differ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
