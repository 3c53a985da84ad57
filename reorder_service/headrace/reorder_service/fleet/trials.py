"""Find the sample that kills preprocessors: try a suspected work's samples one by one, and never touch a guilty one again.

Members die of other things as well, and with all the work they hold, so one death is no proof. After MOST_DEATHS of them, the
samples of a work are tried, each by an order of its own, and only one of all samples of all jobs at a time. A sample is guilty if
MOST_DEATHS members died of its trial and did not come back, because a stream may also break where nobody died. All this is kept
in memory: another leader counts from the beginning.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace.observability.logs import pairs
from headrace.reorder_service.fleet.member import Trial, Work

log = logging.getLogger(__name__)

MOST_DEATHS = 2
GONE_S = 3.0  # seconds after which a lost member is dead: a live one is back within half a second (headrace.preprocessor.engine)


@dataclass(slots=True, eq=False)
class _Suspect:
    work: Work
    left: deque[Trial]


class _Lost(NamedTuple):
    """The member that disconnected during the current trial, and when."""

    name: str
    since_s: float


class Trials:
    """The trials of a fleet's suspected works, in the fleet's event loop."""

    def __init__(
        self,
        submit: Callable[[Work], None],
        withdraw: Callable[[Work], None],
        resume: Callable[[Work], None],
        now_s: Callable[[], float],
    ) -> None:
        """`submit` and `withdraw` place the work of a trial and take it back.

        `resume` is called with a suspected work once all its samples are tried.
        """
        self._submit = submit
        self._withdraw = withdraw
        self._resume = resume
        self._now_s = now_s
        self._suspects: deque[_Suspect] = deque()
        self._lost: _Lost | None = None

    def suspect(self, work: Work) -> bool:
        """Put a work that members died with on trial. Return False if too few have died, or if its samples cannot be tried."""
        if work.deaths < MOST_DEATHS or work.trials is None:
            return False
        log.warning("on trial %s", pairs(job=work.job, deaths=work.deaths, samples=work.num_samples))
        work.lease = None  # a member with an overdue lease may still finish it
        self._suspects.append(_Suspect(work, deque(work.trials(work))))
        if len(self._suspects) == 1:
            self._go_on()
        return True

    def orphan(self, work: Work, member: str, *, died: bool) -> bool:
        """Take over `work`, left behind by `member`, if it is the current trial; return whether it is."""
        if self._present is None or self._present.work is not work:
            return False
        if died:
            self._lost = _Lost(member, self._now_s())
        else:
            self._submit(work)
        return True

    def is_back(self, member: str) -> None:
        """Note that a member has joined: if it had the current trial, it has not died of it, and the trial is repeated."""
        if self._lost is not None and self._lost.name == member and self._present is not None:
            self._lost = None
            self._submit(self._present.work)

    def look(self) -> None:
        """Count the death of a member that was lost with the current trial and stayed away for GONE_S. Call it regularly."""
        trial = self._present
        if self._lost is None or trial is None or self._now_s() - self._lost.since_s < GONE_S:
            return
        self._lost = None
        log.warning("died of a trial %s", pairs(job=trial.work.job, deaths=trial.work.deaths))
        if trial.work.deaths < MOST_DEATHS:
            self._submit(trial.work)
        else:
            trial.on_guilty(self._suspects[0].work.deaths + trial.work.deaths)
            if self._present is trial:  # otherwise its suspect was released, and the trials of the next one have begun
                self._passed()

    def forget(self, wanted: Callable[[Work], bool]) -> None:
        """Drop the suspected works for which `wanted` is False."""
        first = self._suspects[0] if self._suspects else None
        if first is not None and not wanted(first.work) and self._present is not None:
            self._withdraw(self._present.work)
        self._suspects = deque(suspect for suspect in self._suspects if wanted(suspect.work))
        if first is not None and not (self._suspects and self._suspects[0] is first):
            self._lost = None
            self._go_on()

    @property
    def _present(self) -> Trial | None:
        return self._suspects[0].left[0] if self._suspects and self._suspects[0].left else None

    def _passed(self) -> None:
        """End the current trial and go on to the next one."""
        self._suspects[0].left.popleft()
        self._go_on()

    def _go_on(self) -> None:
        while self._suspects and (trial := self._present) is None:
            work = self._suspects.popleft().work
            work.deaths = 0
            self._resume(work)
        if self._suspects and trial is not None:

            def over(*_: Any, of: Trial = trial) -> None:
                if self._present is of:
                    self._passed()

            trial.work.on_done = trial.work.on_failed = over
            self._submit(trial.work)
