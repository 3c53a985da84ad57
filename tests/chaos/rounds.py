"""A round: a job on the standing cluster, and what strikes it."""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from headrace.errors import HeadraceError
from headrace.ledger import LedgerEntry
from headrace.transport.base import SHARED_MEMORY
from tests.chaos.cluster import COUNT, Cluster, job_spec
from tests.chaos.faults import Disturbance, Fault
from tests.chaos.verdict import Outcome, Verdict, judge, strike

log = logging.getLogger(__name__)

ROUND_TIMEOUT_S = 90.0
POLL_S = 0.05


class Round:
    """One job from its first step to its last, in the thread of whoever calls `run`: children end with the thread that starts
    them."""

    def __init__(self, cluster: Cluster, job: str, disturbance: Disturbance, steps: int) -> None:
        self._cluster = cluster
        self._job = job
        self._disturbance = disturbance
        self._steps = steps
        self._waiting = list(disturbance.faults)
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._struck: list[tuple[Fault, float, int]] = []
        self._next = [0] * COUNT
        """First step that each rank has not committed."""
        self._commits_s: list[float] = []
        self._ended = [False] * COUNT
        self._had: dict[tuple[int, int], list[int]] = {}
        self._errors: list[str] = []

    def run(self, expected: list[LedgerEntry] | None = None) -> Outcome:
        """`expected`: the ledger of an undisturbed run; None: this is one."""
        cluster = self._cluster
        found: list[LedgerEntry] = []
        try:
            cluster.submit(job_spec(self._job, self._steps))
            for rank in cluster.ranks:
                rank.begin(self._job, self._disturbance.transport)
            self._consume()
            for rank in cluster.ranks:
                rank.end()
            cluster.heal()
            cluster.await_whole(self._job)
            found = cluster.ledger(self._job)
        except (HeadraceError, TimeoutError) as err:
            self._errors.append(str(err))
            self._give_up()
        return Outcome(
            struck=tuple(strike(*struck, self._commits_s) for struck in self._struck),
            verdict=judge(found if expected is None else expected, found, self._had) if found else Verdict(),
            errors=tuple(self._errors),
        )

    def _give_up(self) -> None:
        """The next round begins with ranks that know nothing of this job."""
        for rank in self._cluster.ranks:
            rank.end()
            rank.kill()
        self._cluster.heal()

    def _consume(self) -> None:
        """Until all ranks have ended. Raises TimeoutError."""
        deadline = time.monotonic() + ROUND_TIMEOUT_S
        while not all(self._ended):
            now_s = time.monotonic()
            if now_s > deadline:
                raise TimeoutError(f"job {self._job} stands still: its ranks wait for the steps {self._next}")
            while self._timers and self._timers[0][0] <= now_s:
                heapq.heappop(self._timers)[2]()
            self._errors += filter(None, (process.look_after() for process in self._cluster.processes))
            try:
                number, message = self._cluster.heard.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if message["job"] == self._job:
                self._hear(number, message)

    def _hear(self, number: int, message: dict[str, Any]) -> None:
        if "fetched" in message:
            step = message["fetched"]
            self._had[number, step] = message["sample_ids"]
            self._reached(number, step)
            self._strike(number, step)
            self._cluster.ranks[number].commit()
        elif "committed" in message:
            self._reached(number, message["committed"] + 1)
        elif "ended" in message:
            self._reached(number, self._steps)
            self._ended[number] = True
        else:
            raise TimeoutError(f"rank {number}: {message['error']}")

    def _reached(self, number: int, step: int) -> None:
        """The rank has committed all steps before that one."""
        self._next[number] = max(self._next[number], step)
        while len(self._commits_s) < min(self._next):
            log.info("%s committed step=%d", self._job, len(self._commits_s))
            self._commits_s.append(time.monotonic())

    def _strike(self, number: int, step: int) -> None:
        """What follows the fetch of that step by that rank."""
        due = [fault for fault in self._waiting if (fault.watched_rank, fault.step) == (number, step)]
        self._waiting = [fault for fault in self._waiting if fault not in due]
        for fault in due:
            if fault.delay_s:
                self._at(time.monotonic() + fault.delay_s, partial(self._begin, fault))
            else:
                self._begin(fault)

    def _begin(self, fault: Fault) -> None:
        end = self._cluster.strike(fault)
        log.info("%s struck: %s", self._job, fault)
        begun_s = time.monotonic()
        self._struck.append((fault, begun_s, self._next[fault.watched_rank]))

        def ended() -> None:
            end()
            log.info("%s over: %s", self._job, fault)

        self._at(begun_s + fault.lasts_s, ended)

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time_s, next(self._order), action))


def run_undisturbed(cluster: Cluster, job: str, steps: int) -> tuple[Outcome, list[LedgerEntry]]:
    """A job with nothing wrong. Its ledger as well."""
    outcome = Round(cluster, job, Disturbance(seed=0, transport=SHARED_MEMORY, faults=()), steps).run()
    return outcome, cluster.ledger(job)
