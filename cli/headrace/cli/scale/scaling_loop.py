"""Decide again and again how many preprocessors the jobs of a service need, for `headrace scale` and for `--engine ray`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from headrace.errors import UnavailableError, UserError

if TYPE_CHECKING:
    from headrace.cli.scale.scaling_policy import Load
    from headrace.jobs_client import JobsClient
    from headrace.rates import Looks

MINIMUM, MAXIMUM, INTERVAL_S, COOL_DOWN_S = 1, 8, 15.0, 300.0
LOOK_S = 1.0


def add_limits(parser: argparse._ActionsContainer) -> None:
    """Add the arguments of which `Limits` are made. What is not given is None."""
    parser.add_argument("--min", type=int, metavar="N", help=f"fewest preprocessors (default: {MINIMUM})")
    parser.add_argument("--max", type=int, metavar="N", help=f"most preprocessors (default: {MAXIMUM})")
    parser.add_argument(
        "--interval",
        type=float,
        metavar="S",
        help=f"seconds of which a decision is made; take more than a step does (default: {INTERVAL_S:g})",
    )
    parser.add_argument(
        "--cool-down",
        type=float,
        metavar="S",
        help=f"seconds in which fewer would have done before there are fewer (default: {COOL_DOWN_S:g})",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Between which numbers of preprocessors to decide, and how often."""

    minimum: int
    maximum: int
    interval_s: float
    cool_down_s: float

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """Return what the arguments of `add_limits` say. Raises UserError for what excludes each other."""

        return cls(
            minimum=MINIMUM if args.min is None else args.min,
            maximum=MAXIMUM if args.max is None else args.max,
            interval_s=INTERVAL_S if args.interval is None else args.interval,
            cool_down_s=COOL_DOWN_S if args.cool_down is None else args.cool_down,
        )

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= self.maximum:
            raise UserError(
                f"--min {self.minimum} and --max {self.maximum}: take numbers from 0 on, the first no larger than the second"
            )
        for name, seconds in (("--interval", self.interval_s), ("--cool-down", self.cool_down_s)):
            if not 0 < seconds < float("inf"):
                raise UserError(f"{name} must be above 0 seconds, got {seconds:g}")


def follow(
    client: JobsClient,
    limits: Limits,
    carry_out: Callable[[int], None],
    *,
    meanwhile: Callable[[], None] = lambda: None,
    once: bool = False,
) -> None:
    """Make one decision after the other, say each and have it carried out; for ever, or once.

    carry_out: called with a number of preprocessors that may not be the present one, more than once with the same perhaps. While
    no service answers, or a job begins, the number stays as it is. meanwhile: called once a second, whatever is decided.
    Raises UnavailableError with `once` if the service goes away, and what the callables raise.
    """
    from headrace.bottleneck import WAITS
    from headrace.cli.scale.scaling_policy import ScalingPolicy

    policy = ScalingPolicy(limits.minimum, limits.maximum, limits.cool_down_s, least_wait=WAITS)
    watch = _Watch(client, limits.interval_s, meanwhile)
    while True:
        try:
            load = watch.measure()
        except UnavailableError as err:
            if once:
                raise
            say("away", endpoint=client.endpoint, why=str(err))
            watch.rest(LOOK_S)
            continue
        now_s = time.monotonic()
        if load is not None:
            decision = policy.decide(load, now_s)
            say(
                "decided",
                preprocessors=load.preprocessors,
                wanted=decision.wanted,
                busy=f"{load.busy:.1f}",
                data_wait=f"{load.wait:.0%}",
                why=decision.why,
            )
            if decision.wanted != load.preprocessors:
                carry_out(decision.wanted)
        elif (idle := policy.decide_without_jobs(now_s)) is None:
            say("idle", why="there is no job, and none tells of preprocessors")
        else:
            say("decided", wanted=idle.wanted, why=idle.why)
            carry_out(idle.wanted)
        if once:
            return


def say(event: str, **fields: object) -> None:
    """Print a line of the time, what happened, and its fields."""
    from headrace.observability.logs import pairs

    print(f"{time.strftime('%H:%M:%S')} {event} {pairs(**fields)}", flush=True)


class _Watch:
    """Looks at all jobs of a service once a second, and sums up what it saw between two decisions."""

    def __init__(self, client: JobsClient, interval_s: float, meanwhile: Callable[[], None]) -> None:
        self._client = client
        self._interval_s = interval_s
        self._meanwhile = meanwhile
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
            self.rest(min(LOOK_S, left_s))
            self._look()
        return load_of([looks.held for looks in self._looks.values()]) if self._looks else None

    def rest(self, seconds: float) -> None:
        """Let so much time pass."""
        self._meanwhile()
        time.sleep(seconds)

    def _look(self) -> None:
        from headrace.cli.watch.job import LISTED_FINISHED
        from headrace.rates import Look, Looks

        now_s = time.monotonic()
        statuses = [status for status in self._client.jobs(LISTED_FINISHED) if status.spec_json]
        here = {member.preprocessor for status in statuses for member in status.preprocessors}
        former = self._looks if here == self._preprocessors else {}
        self._preprocessors = here
        self._looks = {status.job: former.get(status.job, Looks(span_s=self._interval_s)) for status in statuses}
        for status in statuses:
            self._looks[status.job].add(Look(at_s=now_s, status=status))
