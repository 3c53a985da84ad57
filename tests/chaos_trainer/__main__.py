"""`python -m tests.chaos_trainer`: lose nodes of recoverable jobs at every place, and see that they learn the same."""

from __future__ import annotations

import argparse
import os
import queue
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from tests.chaos_trainer.cases import Case, cases, shuffled
from tests.chaos_trainer.cluster import Cluster
from tests.chaos_trainer.run import Run
from tests.chaos_trainer.verdict import Trained, judge

NUM_LANES = 2  # cases at the same time: a node that waits for another one leaves a core idle


class References:
    """Jobs with which nothing goes wrong, by number of steps and of nodes."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._trained: dict[tuple[int, int, bool, int | None], Trained] = {}
        self._lock = threading.Lock()

    def of(self, case: Case, steps: int) -> Trained:
        """What `case` would have come to after so many steps, on as many processes that are a node each."""
        key = steps, case.nodes * case.gpus_per_node, case.adapted, case.evaluate_every
        with self._lock:
            if key not in self._trained:
                alike = {"max_failures": case.max_failures, "adapted": case.adapted, "evaluate_every": case.evaluate_every}
                calm = Case(name="undisturbed", steps=steps, nodes=key[1], **alike)
                self._trained[key] = Run(self._cluster, calm).run()
            return self._trained[key]


def run_case(cluster: Cluster, references: References, case: Case) -> tuple[Trained, list[str]]:
    """What it has come to, and all that is wrong with it."""
    trained = Run(cluster, case).run()
    if not trained.weights:
        return trained, trained.errors
    expected = references.of(case, case.steps if case.recovers else trained.steps)
    repeated = trained.repeated if case.computes_once else []
    return trained, [*expected.errors, *repeated, *judge(expected, trained, case.allowed_replays, is_whole=case.is_whole)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Of a case."""

    case: Case
    trained: Trained
    wrong: Sequence[str]
    took_s: float

    def __str__(self) -> str:
        recovered = f", next step after {max(self.trained.recovery_s):.1f} s" if self.trained.recovery_s else ""
        words = "".join(f"\n       {one}" for one in self.wrong)
        return f"{self.took_s:5.1f} s  {'BAD ' if self.wrong else 'good'}  {self.case.name}{recovered}{words}"


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
    references, ran, num_bad, began_s = References(cluster), list[Case](), 0, time.monotonic()

    def results(of: Iterable[Case]) -> Iterator[Result]:
        for case in of:
            case_began_s = time.monotonic()
            if minutes is not None and case_began_s > began_s + 60 * minutes:
                break
            trained, wrong = run_case(cluster, references, case)
            yield Result(case=case, trained=trained, wrong=wrong, took_s=time.monotonic() - case_began_s)

    together = deque(
        sorted((case for case in found if not case.strikes_services), key=lambda case: (-case.gpus_per_node, -case.steps))
    )
    alone = [case for case in found if case.strikes_services]
    lanes = [results(_taken(together)) for _ in range(NUM_LANES)]
    for result in chain(results(alone), _side_by_side(lanes)):
        ran.append(result.case)
        num_bad += bool(result.wrong)
        print(f"{len(ran):4} {result}", flush=True)
    minutes, num_shared = (time.monotonic() - began_s) / 60, sum(case.gpus_per_node > 1 for case in ran)
    print(f"{len(ran)} of {len(found)} cases were run in {minutes:.1f} minutes, {num_bad} of them bad", end="; ")
    print(f"{num_shared} had nodes of two processes")
    return int(num_bad > 0)


def _taken(cases: deque[Case]) -> Iterator[Case]:
    """One after the other, as long as there are any: others take them too."""
    with suppress(IndexError):
        while True:
            yield cases.popleft()


def _side_by_side(lanes: Sequence[Iterator[Result]]) -> Iterator[Result]:
    """Of all lanes, each in a thread of its own, as they come. Raises what one of them does."""
    come: queue.SimpleQueue[Result | BaseException | None] = queue.SimpleQueue()

    def follow(lane: Iterator[Result]) -> None:
        try:
            for result in lane:
                come.put(result)
            come.put(None)
        except BaseException as err:
            come.put(err)

    for lane in lanes:
        threading.Thread(target=follow, args=(lane,), daemon=True).start()  # nobody waits for it after Ctrl-C
    num_open = len(lanes)
    while num_open:
        match come.get():
            case None:
                num_open -= 1
            case BaseException() as err:
                raise err
            case result:
                yield result


if __name__ == "__main__":
    sys.exit(main())
