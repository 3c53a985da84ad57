"""Statistics of a step loader and its part fetcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchStatistics:
    """Statistics of a rank's fetched parts. Counts are since the start; bytes are those of the memory that the parts came in."""

    num_parts: Mapping[str, int]
    """Number of parts received, by transport."""
    received_bytes: int
    num_hedged: int
    """Hedging deadlines that passed while the consumer waited for a part; at each, another location was requested."""
    num_fetched_again: int
    """Repeated fetches of a part from another location, after a failure, a hedge or a move."""
    num_late: int
    """Duplicate deliveries, of parts that had come from elsewhere before; they are released at once."""
    hedge_deadline_s: float
    """Present hedging deadline: seconds to wait for a part at one preprocessor before another one is asked."""
    num_pending: int
    """Fetches in flight now, including stalled ones."""
    ready_bytes: int
    """Bytes of parts that lie ready for the consumer now: at most `prefetch_bytes` plus the fetches in flight. Near zero, the
    consumer waits for parts."""
    held_bytes: int
    """Bytes of parts that the consumer has taken and may read in place until it commits their step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStatistics(FetchStatistics):
    """Statistics of a `StepLoader`, as returned by `StepLoader.statistics`."""

    data_wait_s: float
    """Total seconds the consumer has waited for plans and parts. If it grows with the step time, the fleet is too small."""
    idle_buffer_bytes: int
    """Bytes of idle buffers kept for the next microbatches; at most `prefetch_bytes`."""

    @classmethod
    def of_receiver(cls, data_wait_s: float) -> Self:
        """Return the statistics of a process that fetches no parts, since another one of its group does."""
        return cls(
            num_parts={},
            received_bytes=0,
            num_hedged=0,
            num_fetched_again=0,
            num_late=0,
            hedge_deadline_s=0.0,
            num_pending=0,
            ready_bytes=0,
            held_bytes=0,
            data_wait_s=data_wait_s,
            idle_buffer_bytes=0,
        )
