"""The rule by which silent and hung ranks are told from ranks that compute, wait for data or write for long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.trainer.rank_progress import ProgressReport
from headrace.trainer.side_channel import Heard

HANG_TIMEOUT_S = 600.0
"""As long as NCCL's own watchdog waits for a collective."""
_SILENCE_S = 30.0
_SILENCE_AFTER_ALARM_S = 1.5
ALARM_S = 3.0
"""How long after an error that another rank's end may have caused a rank that has fallen silent is looked for."""
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Patience:
    """How long ranks are waited for."""

    hang_s: float = HANG_TIMEOUT_S
    """After how many seconds without progress on any rank the job counts as hung."""

    @property
    def silence_s(self) -> float:
        """After how many seconds without a beat a process counts as gone; beats come each half second, whatever it computes."""
        return min(_SILENCE_S, self.hang_s)


def who(rank: int, report: ProgressReport | None) -> str:
    """Return the name of a rank for people, with its place in the job if that is known."""
    return f"rank {rank} ({report.place})" if report is not None and report.place else f"rank {rank}"


def silent_rank(heard: Mapping[int, Heard], now_s: float, patience: Patience, *, alarmed: bool) -> str:
    """Return who has been silent for longest, in words; empty if nobody has been for too long. `now_s`: as `Heard.since_s`.

    `alarmed`: whether another rank raised an error that such an end may have caused, so that a few missing beats suffice.
    """
    limit_s = min(_SILENCE_AFTER_ALARM_S, patience.silence_s) if alarmed else patience.silence_s
    rank, last = min(heard.items(), key=lambda item: item[1].since_s, default=(0, None))
    if last is None or now_s - last.since_s <= limit_s:
        return ""
    return (
        f"{who(rank, last.report)} has said nothing for {now_s - last.since_s:.0f} s, so that its process has ended or is "
        f"stopped, or its host is cut off (last: {last.report})"
    )


def hung_job(reports: Mapping[int, ProgressReport], patience: Patience) -> str:
    """Return why the job hangs, in words; empty if it does not. `reports`: those of all ranks.

    Ranks of a job wait for each other in every step. So one that hangs soon stops all of them, and as long as one of them gets
    on, or waits for data, none hangs. Ranks that do not wait are named first: the others probably wait for them.
    """
    if not all(report.idle_s > patience.hang_s for report in reports.values()):
        return ""
    hung = [rank for rank, report in reports.items() if not report.waits] or list(reports)
    named = "; ".join(f"{who(rank, reports[rank])} at {reports[rank]}" for rank in hung[:_MOST_NAMED])
    more = f" and {len(hung) - _MOST_NAMED} more" if len(hung) > _MOST_NAMED else ""
    others = "the others wait" if len(hung) < len(reports) else "all wait" if reports[hung[0]].waits else "none waits"
    return f"no rank has got on for {patience.hang_s:g} s (--hang-timeout): {named}{more}; {others}"
