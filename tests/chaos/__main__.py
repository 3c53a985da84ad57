"""`python -m tests.chaos`: strike a standing cluster, round after round, and see that nothing is lost or repeated."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from tests.chaos.cluster import Cluster
from tests.chaos.faults import Disturbance, draw, seeds
from tests.chaos.footprints import ALLOWED_FDS, ALLOWED_KIB, ALLOWED_KIB_A_ROUND, WARM_ROUNDS, Footprints
from tests.chaos.rounds import Round, run_undisturbed
from tests.chaos.verdict import Outcome, table

STEPS = 10


def main(arguments: list[str] | None = None) -> int:
    """0: all was well; 1: something was not; 130: interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="of the first round, which gives the next ones theirs (default: a new one)")
    parser.add_argument("--rounds", type=int, default=100, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--minutes", type=float, metavar="M", help="begin no round after so many (default: no limit)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for the logs (default: they are removed)")
    args = parser.parse_args(arguments)
    seed = args.seed if args.seed is not None else int.from_bytes(os.urandom(4))
    print(f"seed {seed}", flush=True)
    try:
        with Cluster(args.keep) as cluster:
            logging.basicConfig(filename=cluster.folder / "chaos.log", level=logging.INFO, format="%(asctime)s %(message)s")
            return run(cluster, seeds(seed, args.rounds), args.minutes)
    except KeyboardInterrupt:
        return 130


def run(cluster: Cluster, round_seeds: list[int], minutes: float | None = None) -> int:
    """A round for each seed, and the tables. The exit code."""
    outcomes, footprints = [], Footprints()
    calm, expected = run_undisturbed(cluster, "undisturbed", STEPS)
    outcomes.append(calm)
    began_s = time.monotonic()
    for number, seed in enumerate(round_seeds):
        if minutes is not None and time.monotonic() > began_s + 60 * minutes:
            break
        disturbance = draw(seed, steps=STEPS)
        round_began_s = time.monotonic()
        outcomes.append(Round(cluster, f"round-{number}", disturbance, STEPS).run(expected))
        footprints.look(cluster.processes)
        print(line(number, disturbance, outcomes[-1], time.monotonic() - round_began_s), flush=True)
    print(f"\n{table(outcomes)}\n\n{footprints.table()}")
    print(
        f"allowed: {ALLOWED_KIB >> 10} MiB and {ALLOWED_KIB_A_ROUND / 1024:g} a round, {ALLOWED_FDS} fds, "
        f"over what a process had after {WARM_ROUNDS} rounds"
    )
    for growth in footprints.grown:
        print(f"GREW  {growth}")
    num_bad = sum(not outcome.is_good for outcome in outcomes)
    print(f"{len(outcomes) - 1} rounds, {num_bad} of them bad")
    return int(num_bad > 0 or bool(footprints.grown))


def line(number: int, disturbance: Disturbance, outcome: Outcome, took_s: float) -> str:
    """What there is to say of a round."""
    told = [f"{one.fault}: {_seconds(one.next_commit_s)}" for one in outcome.struck]
    told += [f"{fault}: never came" for fault in disturbance.faults if fault not in [one.fault for one in outcome.struck]]
    verdict = outcome.verdict
    wrong = {"lost": len(verdict.lost), "repeated": len(verdict.repeated), "failed steps": verdict.failed_steps}
    words = [f"{name} {value}" for name, value in wrong.items() if value] + list(outcome.errors)
    head = f"{number:4} --seed {disturbance.seed:<10} {disturbance.transport:13} {took_s:5.1f} s"
    return f"{head}  {'good' if outcome.is_good else 'BAD '}  {'; '.join(told + words)}"


def _seconds(next_commit_s: float | None) -> str:
    return "no commit after it" if next_commit_s is None else f"next commit after {next_commit_s:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
