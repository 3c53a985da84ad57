"""How long finished jobs are kept in the store, and how many: a pure decision."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.errors import UserError
from headrace.reorder_service.store.finished_jobs import JobNote

DAY_S = 86_400.0
EVER = "ever"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepFinished:
    """Which finished jobs are kept: at most `jobs` of them, the latest, and each for at most `days` after its end."""

    days: float = math.inf
    jobs: float = math.inf

    @classmethod
    def parse(cls, text: str) -> KeepFinished:
        """Return what `--keep-finished` says: DAYS,JOBS or `ever`. Raises UserError for anything else."""
        if text == EVER:
            return cls()
        days, _, jobs = text.partition(",")
        try:
            kept = cls(days=float(days), jobs=int(jobs))
        except ValueError:
            kept = cls(days=-1)
        if not (kept.days >= 0 and kept.jobs >= 0):  # false also for NaN
            raise UserError(
                f"--keep-finished {text!r} is neither DAYS,JOBS, two numbers of which none is negative, "
                f"nor {EVER!r}: write for example 7,5000"
            )
        return kept

    def dropped(self, notes: Iterable[JobNote], now_s: float) -> list[JobNote]:
        """Return the finished jobs that are not kept any longer, those that ended first before others.

        A job whose end was not noted yet is kept.
        """
        ended = [(note.ended_s, note) for note in notes if note.is_over and note.ended_s is not None]
        ended.sort(key=operator.itemgetter(0))
        too_many = len(ended) - self.jobs
        return [note for rank, (ended_s, note) in enumerate(ended) if rank < too_many or now_s - ended_s > self.days * DAY_S]
