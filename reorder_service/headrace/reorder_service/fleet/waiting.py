"""The work that waits for a slot of a preprocessor, by kind and by what makes it urgent."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headrace.reorder_service.fleet.fair_queue import FairQueue
from headrace.reorder_service.fleet.member import Work, never


class WaitingWork:
    """Fair queues of kept and of other work (`Work.keep`), and all that is urgent at a time."""

    def __init__(self) -> None:
        self.queues: dict[bool, FairQueue[Work]] = {False: FairQueue(), True: FairQueue()}
        """By `Work.keep`."""
        self._by_urgency: dict[Callable[[], bool], set[Work]] = {}  # by the works' `urgent` functions, which many share

    def add(self, work: Work) -> None:
        """Add a work that is not waiting yet."""
        self.queues[work.keep].push(work)
        if work.urgent is not never:
            self._by_urgency.setdefault(work.urgent, set()).add(work)

    def remove(self, work: Work) -> None:
        """Remove a work, if it waits."""
        if self.queues[work.keep].pop(work) and work.urgent is not never:
            self._by_urgency[work.urgent].discard(work)
            if not self._by_urgency[work.urgent]:
                del self._by_urgency[work.urgent]

    def forget(self, job: str) -> None:
        """Remove all works of a job that is over."""
        for queue in self.queues.values():
            queue.forget(job)
        self._by_urgency = {
            urgent: rest for urgent, works in self._by_urgency.items() if (rest := {w for w in works if w.job != job})
        }

    def first_urgent(self) -> Work | None:
        """Return the kept work that is to be placed next, if it is urgent."""
        first = self.queues[True].first()
        return first if first is not None and first.urgent() else None

    def urgent(self) -> Iterator[Work]:
        """Yield the works that are urgent now, those of each urgency by priority. Works may be removed meanwhile."""
        for works in [works for urgent, works in self._by_urgency.items() if urgent()]:
            yield from sorted(works, key=lambda work: work.priority)
