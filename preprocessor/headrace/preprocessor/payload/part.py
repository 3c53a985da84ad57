"""A part of a microbatch as a preprocessor holds it: first a lease, then media in memory, then decoded payload."""

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


class PartStage(StrEnum):
    """The stage that a part has reached; the value is the stage's name in the metrics."""

    WAITING = "waiting"  # none of its media are in memory
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
    """Its place in the arena; None if it is on the heap."""
    crc32: int | None = None

    @property
    def is_damaged(self) -> bool:
        """Whether `data` differs from what was written, by its CRC-32; False if it has none."""
        return self.crc32 is not None and self.crc32 != checksum(self.data)


class DamagedPartError(HeadraceError):
    """Raised when samples of a strict part cannot be decoded here; another preprocessor may be able to decode them."""

    def __init__(self, damaged: Sequence[Rejected]) -> None:
        first = damaged[0]
        super().__init__(f"cannot decode sample {first.name} ({first.reason}: {first.detail})")
        self.damaged = damaged


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """A part that this preprocessor was told to decode, and its state. The lower `priority`, the sooner a trainer needs it."""

    ticket: str
    job: str
    step: int
    priority: int
    refs: tuple[SampleRef, ...]
    shards: tuple[ShardInfo, ...] = ()
    """Shards of the samples, referenced here so that the job goes on knowing them (`JobWork.remember_shards`)."""
    killed: Mapping[int, int] = field(default_factory=dict)
    """Sample id -> number of preprocessors that died while working on it; such a sample is rejected unread."""
    left_out: Mapping[int, Rejected] = field(default_factory=dict)
    """Samples, by id, that are left out of the part wherever it is decoded."""
    strict: bool = False
    """Whether the part is refused unless all samples can be decoded that are neither in `left_out` nor in `killed`."""
    lease: str = ""
    """The lease to report when the part is decoded; empty if there is none to report."""
    loading: bool = False
    loaded: LoadedPart | None = None
    """The samples in memory, until they are decoded."""
    decoding: bool = False
    payload: Payload | None = None
    num_fetches: int = 0
    """Number of fetches by trainers that wait for the part or are reading it."""
    expendable: bool = False
    """Whether it is evicted first and not decoded ahead again: a trainer has fetched it, or its lease is void."""
    delivered: bool = False
    """Whether a trainer has fetched it since it was last ordered."""
    evicted: bool = False
    """Whether it was decoded before, and dropped to make room."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    gone: bool = False

    def damaged_in(self, payload: Payload) -> list[Rejected]:
        """Return the rejections of samples that a strict part must have and `payload` lacks."""
        known = self.left_out.keys() | self.killed.keys()
        return [item for item in payload.rejected if item.sample_id not in known] if self.strict else []

    @property
    def stage(self) -> PartStage | None:
        """The part's current stage; None if it is expendable and not here, so that nothing is done unless it is asked for."""
        if self.payload is not None:
            return PartStage.STORE
        if self.decoding:
            return PartStage.DECODE
        if self.loading or self.loaded is not None:
            return PartStage.READ
        return None if self.expendable and not self.num_fetches else PartStage.WAITING
