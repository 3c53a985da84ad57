"""What a loader tells of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchStatistics:
    """Of a rank's parts. Counts are since the start; bytes are those of the memory in which the parts came."""

    num_parts: Mapping[str, int]
    """Received, by transport."""
    received_bytes: int
    num_hedged: int
    """Deadlines passed in which the consumer waited for a part: each time another preprocessor was asked for."""
    num_fetched_again: int
    """Fetches from another place than the first one: after a failure, a hedge or a move."""
    num_late: int
    """Parts received that had come from elsewhere before: released at once."""
    hedge_deadline_s: float
    """How long a part is waited for at one preprocessor, as deliveries go now."""
    num_pending: int
    """Fetches under way now, stalled ones included."""
    ready_bytes: int
    """Of parts that wait for the consumer now: at most `prefetch_bytes` and what is under way. Near zero: it waits for them."""
    held_bytes: int
    """Of parts whose tensors the consumer may read in place now, until it commits their step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStatistics(FetchStatistics):
    """Of a `StepLoader`, as `statistics` takes them."""

    data_wait_s: float
    """Time in which the consumer waited for plans and parts, in all. Grows with the step time: the fleet is too small."""
    idle_buffer_bytes: int
    """Of buffers that stay warm for the next microbatches; bounded by `prefetch_bytes`."""
