"""`python -m tests.simulation`: simulate one run after the other, each drawn from a seed, and see that every promise holds."""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
from collections import Counter
from typing import Any

from tests.simulation import determinism

determinism.install()


def main(arguments: list[str]) -> int:
    """0: all was well; 1: something was not; 130: interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, metavar="N", help="replay the run of this seed, with the log of all processes")
    parser.add_argument("--first", type=int, metavar="N", help="seed of the first run (default: a new one)")
    parser.add_argument("--runs", type=int, metavar="N", help="end after so many runs (default: no limit)")
    parser.add_argument(
        "--minutes", type=float, default=10.0, metavar="M", help="begin no run after so many (default: %(default)s)"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--stride", type=int, help=argparse.SUPPRESS)  # of a worker: it takes every so many-th seed
    parser.add_argument(
        "--find-seeded",
        nargs="*",
        metavar="NAME",
        help="put known faults (tests.simulation.seeded_faults) into the code, all or these, and find each",
    )
    args = parser.parse_args(arguments)
    if args.find_seeded is not None:
        return find_seeded(args.find_seeded)
    if args.seed is not None:
        return replay(args.seed)
    first = args.first if args.first is not None else int.from_bytes(os.urandom(4))
    if args.stride is not None:
        return work(first, args.stride, args.runs, args.minutes)
    return simulate(first, args.runs, args.minutes, args.processes)


def replay(seed: int) -> int:
    from tests.simulation import campaign

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    outcome = campaign.run_seed(seed)
    print(report(document(outcome)))
    return int(bool(outcome.violations))


def work(first: int, stride: int, runs: int | None, minutes: float) -> int:
    """What one of several processes does: a line of JSON for each run."""
    from tests.simulation import campaign

    logging.disable(logging.CRITICAL)
    ends_s = determinism.real_time_s() + 60 * minutes
    for outcome in campaign.runs(first, stride, lambda done: done == runs or determinism.real_time_s() > ends_s):
        print(json.dumps(document(outcome)), flush=True)
    return 0


def document(outcome: Any) -> dict[str, Any]:
    return {
        "seed": outcome.seed,
        "relayed": outcome.num_relayed,
        "commits": outcome.num_commits,
        "simulated_s": outcome.simulated_s,
        "digest": outcome.digest,
        "struck": outcome.struck,
        "faults": [str(fault) for fault in outcome.faults],
        "violations": outcome.violations,
    }


def simulate(first: int, runs: int | None, minutes: float, processes: int) -> int:
    """Runs in several processes, and what they found."""
    print(f"first seed {first}, commit {commit()}, {processes} processes", flush=True)
    began_s = determinism.real_time_s()
    command = [sys.executable, "-m", "tests.simulation", "--stride", str(processes), "--minutes", str(minutes)]
    workers = []
    for number in range(processes):
        share = [] if runs is None else ["--runs", str(len(range(number, runs, processes)))]
        workers.append(subprocess.Popen([*command, "--first", str(first + number), *share], stdout=subprocess.PIPE, text=True))
    struck: Counter[str] = Counter()
    simulated_s, num_runs, num_relayed, num_steps, violating, digest = 0.0, 0, 0, 0, 0, 0
    try:
        for worker in workers:
            assert worker.stdout is not None
            for line in worker.stdout:
                run = json.loads(line)
                num_runs += 1
                num_relayed += run["relayed"] > 0
                num_steps += run["commits"]
                simulated_s += run["simulated_s"]
                struck.update(run["struck"])
                digest ^= run["digest"]
                if run["violations"]:
                    violating += 1
                    print(report(run), flush=True)
    except KeyboardInterrupt:
        return 130
    took_s = determinism.real_time_s() - began_s
    died = [worker.wait() for worker in workers]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    of_cpu = simulated_s / (used.ru_utime + used.ru_stime)
    print("\n".join(f"{name:34}{count:8}" for name, count in sorted(struck.items())))
    print(
        f"{num_runs} runs, {num_relayed} of them by a relay: {num_steps} steps and {sum(struck.values())} faults in "
        f"{simulated_s / 3600:.1f} simulated hours, which took {took_s / 60:.1f} minutes\n"
        f"simulated hours: {simulated_s / took_s:.0f} an hour by the clock, {of_cpu:.0f} an hour of processor time\n"
        f"digest {digest:08x}; {violating} runs with violations"
    )
    return int(bool(violating) or any(died))


def report(run: dict[str, Any]) -> str:
    """What there is to say of one run."""
    head = f"{'VIOLATION' if run['violations'] else 'good'}  seed {run['seed']}, commit {commit()}, {run['simulated_s']:.1f} s"
    replayed = f"replay it with: python -m tests.simulation --seed {run['seed']}"
    return "\n    ".join([head, *run["violations"][:3], *run["faults"], replayed])


def commit() -> str:
    """The commit that is checked out, with a mark where files were changed since."""
    done = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=10"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def find_seeded(names: list[str]) -> int:
    """Find each seeded fault, and say how long it took."""
    from tests.simulation import campaign, seeded_faults

    logging.disable(logging.CRITICAL)
    missed = 0
    for name in names or seeded_faults.NAMES:
        found = campaign.find(name)
        missed += not found.violation
        print(f"{name:32}{found.seconds:7.1f} s {found.num_runs:6} runs  {found.violation or 'NOT FOUND'}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    os.environ["HEADRACE_RELAY"] = "0"  # which of a host's ranks becomes the relay is decided by a real lock
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings have the same order in every process
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
        )
    sys.exit(main(sys.argv[1:]))
