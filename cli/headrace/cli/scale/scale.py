"""`headrace scale`: run as many preprocessors as the trainers of a service can take from."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import subprocess
import time
from typing import TYPE_CHECKING

from headrace.cli.endpoint import add_endpoint

if TYPE_CHECKING:
    from headrace.cli.scale.scaling_policy import Decision, Load
    from headrace.cli.watch.rates import Looks
    from headrace.jobs_client import JobsClient

COUNT = "{count}"
COMPOSE = "docker compose up --detach --no-recreate --no-deps --scale preprocessor={count} preprocessor"
LOOK_S = 1.0
COMMAND_S = 600.0  # the longest that a command may take


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace scale`."""
    parser.description = (
        "Look at a service's jobs, and start or end preprocessors: more as soon as trainers wait for data that more would bring, "
        "and no more where the trainers are the slowest part; fewer once fewer would have done for the whole --cool-down. "
        "One line for each decision says what it is and why. Without --compose or --run nothing but these lines is done."
    )
    parser.epilog = "example: headrace scale --run 'kubectl scale deployment/preprocessor --replicas {count}' --max 32"
    add_endpoint(parser)
    parser.add_argument("--min", type=int, default=1, metavar="N", help="fewest preprocessors (default: %(default)s)")
    parser.add_argument("--max", type=int, default=8, metavar="N", help="most preprocessors (default: %(default)s)")
    parser.add_argument(
        "--interval",
        type=float,
        default=15.0,
        metavar="S",
        help="seconds of which a decision is made; take more than a step does (default: %(default)g)",
    )
    parser.add_argument(
        "--cool-down",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds in which fewer would have done before there are fewer (default: %(default)g)",
    )
    engine = parser.add_mutually_exclusive_group()
    engine.add_argument(
        "--compose", action="store_true", help="scale the service `preprocessor` of the compose project in this directory"
    )
    engine.add_argument(
        "--run",
        dest="engine",
        metavar="COMMAND",
        help="run this command whenever the number is to change, with {count} replaced by the number; no shell reads it",
    )
    parser.add_argument("--once", action="store_true", help="make one decision, carry it out and end")


def run(args: argparse.Namespace) -> int:
    """Make one decision after the other until Ctrl-C, or one. While there is no job or no service, the number stays as it is.

    Raises UserError for limits that exclude each other or a command without {count}, EndpointError if no service answers at the
    start, and with --once UnavailableError if it goes away.
    """
    from headrace.cli.scale.scaling_policy import ScalingPolicy
    from headrace.cli.watch.bottleneck import WAITS
    from headrace.errors import UnavailableError
    from headrace.jobs_client import JobsClient

    command = _command(args)
    policy = ScalingPolicy(args.min, args.max, args.cool_down, least_wait=WAITS)
    with JobsClient(args.endpoint) as client, contextlib.suppress(KeyboardInterrupt):
        watch = _Watch(client, args.interval)
        while True:
            try:
                load = watch.measure()
            except UnavailableError as err:
                if args.once:
                    raise
                _say("away", endpoint=args.endpoint, why=str(err))
                time.sleep(LOOK_S)
                continue
            if load is None:
                _say("idle", why="there is no job, and none tells of preprocessors")
            else:
                _carry_out(policy.decide(load, time.monotonic()), load, command)
            if args.once:
                break
    return 0


def _command(args: argparse.Namespace) -> list[str]:
    """Return the words of the command that changes the number, none where nothing is done. Raises UserError."""
    from headrace.errors import UserError

    if not 0 <= args.min <= args.max:
        raise UserError(f"--min {args.min} and --max {args.max}: take numbers from 0 on, the first no larger than the second")
    for name, seconds in (("--interval", args.interval), ("--cool-down", args.cool_down)):
        if not 0 < seconds < float("inf"):
            raise UserError(f"{name} must be above 0 seconds, got {seconds:g}")
    text = COMPOSE if args.compose else args.engine or ""
    if text and COUNT not in text:
        raise UserError(f"--run has no {COUNT}, for which the number is put in: {text}")
    try:
        return shlex.split(text)
    except ValueError as err:
        raise UserError(f"--run cannot be read ({err}): {text}") from err


class _Watch:
    """Looks at all jobs of a service once a second, and sums up what it saw between two decisions."""

    def __init__(self, client: JobsClient, interval_s: float) -> None:
        self._client = client
        self._interval_s = interval_s
        self._looks: dict[str, Looks] = {}
        self._preprocessors: set[str] = set()

    def measure(self) -> Load | None:
        """Look for as long as a decision takes, and return the load; None without a job. Raises UnavailableError.

        Looks from before preprocessors came or went are left out.
        """
        from headrace.cli.scale.load import load_of

        end_s = time.monotonic() + self._interval_s
        self._look()
        while (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left_s))
            self._look()
        return load_of([looks.held for looks in self._looks.values()]) if self._looks else None

    def _look(self) -> None:
        from headrace.cli.watch.job import LISTED_FINISHED
        from headrace.cli.watch.rates import Look, Looks

        now_s = time.monotonic()
        statuses = [status for status in self._client.jobs(LISTED_FINISHED) if status.spec_json]
        here = {member.preprocessor for status in statuses for member in status.preprocessors}
        former = self._looks if here == self._preprocessors else {}
        self._preprocessors = here
        self._looks = {status.job: former.get(status.job, Looks(span_s=self._interval_s)) for status in statuses}
        for status in statuses:
            self._looks[status.job].add(Look(at_s=now_s, status=status))


def _carry_out(decision: Decision, load: Load, command: list[str]) -> None:
    """Say what was decided, and run the command if the number is to change."""
    _say(
        "decided",
        preprocessors=load.preprocessors,
        wanted=decision.wanted,
        busy=f"{load.busy:.1f}",
        data_wait=f"{load.wait:.0%}",
        why=decision.why,
    )
    if decision.wanted == load.preprocessors or not command:
        return
    words = [word.replace(COUNT, str(decision.wanted)) for word in command]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        _say("failed", command=shlex.join(words), why=str(err))
        return
    if done.returncode:
        last = (done.stderr or done.stdout).strip().rpartition("\n")[2]
        _say("failed", command=shlex.join(words), status=done.returncode, why=last)


def _say(event: str, **fields: object) -> None:
    from headrace.observability.logs import pairs

    print(f"{time.strftime('%H:%M:%S')} {event} {pairs(**fields)}", flush=True)
