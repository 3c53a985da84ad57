"""A part of a microbatch as its preprocessor has it: a lease, then media in memory, then payload."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import pyarrow as pa

from headrace.errors import HeadraceError
from headrace.manifest import ShardInfo
from headrace.preprocessor.decoding import LoadedPart
from headrace.preprocessor.payload.arena import Slot
from headrace.quarantine import Rejected
from headrace.sample import SampleRef
from headrace.transport.base import checksum


class Stage(StrEnum):
    """Where a part is. Its name in the metrics."""

    WAITING = "waiting"  # nothing of it is in memory
    READ = "read"  # being read, or in memory and not yet being decoded
    DECODE = "decode"  # being decoded
    STORE = "store"  # decoded, for trainers to fetch


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A decoded part: an Arrow IPC stream, and the samples that turned out to be damaged."""

    data: pa.Buffer
    num_samples: int
    rejected: tuple[Rejected, ...]
    slot: Slot | None = None
    """Where in the arena it lies; None: on the heap."""
    crc32: int | None = None

    @property
    def is_damaged(self) -> bool:
        """Whether the bytes are not those that were written, as far as that can be told."""
        return self.crc32 is not None and self.crc32 != checksum(self.data)


class DamagedPartError(HeadraceError):
    """Samples of a part that is to be decoded as a whole cannot be decoded here. Perhaps they can elsewhere."""

    def __init__(self, damaged: Sequence[Rejected]) -> None:
        first = damaged[0]
        super().__init__(f"cannot decode sample {first.name} ({first.reason}: {first.detail})")
        self.damaged = damaged


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """A part that this preprocessor has a lease on. `priority`: the lower, the sooner a trainer needs it."""

    ticket: str
    job: str
    step: int
    priority: int
    refs: tuple[SampleRef, ...]
    shards: tuple[ShardInfo, ...] = ()
    """What its job keeps of the shards that they lie in (headrace.preprocessor.job_work)."""
    killed: Mapping[int, int] = field(default_factory=dict)
    """Sample -> preprocessors that died of it: it is refused untouched."""
    left_out: Mapping[int, Rejected] = field(default_factory=dict)
    """Samples that no copy of the part has, wherever it is decoded."""
    strict: bool = False
    """Whether it is kept only if all other samples can be decoded."""
    lease: str = ""
    """To report when it is decoded; empty: nobody waits for that."""
    loading: bool = False
    loaded: LoadedPart | None = None
    """Its samples in memory, until it is decoded."""
    decoding: bool = False
    payload: Payload | None = None
    waiting: int = 0
    """Fetches that wait for it or read it now."""
    fetched: bool = False
    """Evicted first, and not decoded ahead again."""
    delivered: bool = False
    """A trainer has had it since it was last taken."""
    evicted: bool = False
    """It was decoded before, and dropped for room."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    gone: bool = False

    def damaged_in(self, payload: Payload) -> list[Rejected]:
        """The samples that the payload must have, and lacks."""
        known = self.left_out.keys() | self.killed.keys()
        return [item for item in payload.rejected if item.sample_id not in known] if self.strict else []

    @property
    def stage(self) -> Stage | None:
        """None for a part that was delivered and evicted: there is nothing to do for it unless it is asked for again."""
        if self.payload is not None:
            return Stage.STORE
        if self.decoding:
            return Stage.DECODE
        if self.loading or self.loaded is not None:
            return Stage.READ
        return None if self.fetched and not self.waiting else Stage.WAITING
