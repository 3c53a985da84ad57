"""`python -m tests.chaos_trainer`: lose nodes of recoverable jobs at every place, and see that they learn the same."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from tests.chaos_trainer.cases import Case, cases, shuffled
from tests.chaos_trainer.cluster import Cluster
from tests.chaos_trainer.run import Run
from tests.chaos_trainer.verdict import Trained, judge


class References:
    """Jobs with which nothing goes wrong, by number of steps and of nodes."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._trained: dict[tuple[int, int], Trained] = {}

    def of(self, case: Case, steps: int) -> Trained:
        """What `case` would have come to after so many steps."""
        key = steps, case.nodes
        if key not in self._trained:
            calm = Case(name="undisturbed", steps=steps, nodes=case.nodes, max_failures=case.max_failures)
            self._trained[key] = Run(self._cluster, calm).run()
        return self._trained[key]


def run_case(cluster: Cluster, references: References, case: Case) -> tuple[Trained, list[str]]:
    """What it has come to, and all that is wrong with it."""
    trained = Run(cluster, case).run()
    if not trained.weights:
        return trained, trained.errors
    expected = references.of(case, case.steps if case.recovers else trained.steps)
    return trained, [*expected.errors, *judge(expected, trained, case.allowed_replays)]


def main(arguments: list[str] | None = None) -> int:
    """0: all was well; 1: something was not; 130: interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos_trainer", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name")
    parser.add_argument("--seed", type=int, help="of the order (default: as they are listed; with --minutes, another each time)")
    parser.add_argument("--minutes", type=float, metavar="M", help="begin no case after so many (default: no limit)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for the logs (default: they are removed)")
    args = parser.parse_args(arguments)
    seed = args.seed
    if seed is None and args.minutes is not None:
        seed = secrets.randbelow(1000)
        print(f"seed {seed}")
    found = cases() if seed is None else shuffled(seed)
    try:
        with Cluster(args.keep) as cluster:
            return run(cluster, [case for case in found if args.only in case.name], args.minutes)
    except KeyboardInterrupt:
        return 130


def run(cluster: Cluster, found: Sequence[Case], minutes: float | None = None) -> int:
    """Every case, and a line on each. The exit code."""
    references, num_run, num_bad, began_s = References(cluster), 0, 0, time.monotonic()
    for case in found:
        if minutes is not None and time.monotonic() > began_s + 60 * minutes:
            break
        case_began_s = time.monotonic()
        trained, wrong = run_case(cluster, references, case)
        num_run += 1
        num_bad += bool(wrong)
        print(line(num_run, case, trained, wrong, time.monotonic() - case_began_s), flush=True)
    print(f"{num_run} cases, {num_bad} of them bad")
    return int(num_bad > 0)


def line(number: int, case: Case, trained: Trained, wrong: Sequence[str], took_s: float) -> str:
    """What there is to say of a case."""
    recovered = f", next step after {max(trained.recovery_s):.1f} s" if trained.recovery_s else ""
    words = "".join(f"\n       {one}" for one in wrong)
    return f"{number:4} {took_s:5.1f} s  {'BAD ' if wrong else 'good'}  {case.name}{recovered}{words}"


if __name__ == "__main__":
    sys.exit(main())
