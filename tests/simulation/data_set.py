"""A data set that exists by formula, and the work on it: what stands in for reading and decoding real files.

A row's sizes, and whether it is damaged, are functions of shard and row. The engine and the payload store around this are real.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from headrace.manifest import ShardInfo, Vocabulary
from headrace.preprocessor.decoding import LoadedPart
from headrace.preprocessor.payload.part import Payload
from headrace.quarantine import Reason, Rejected, rejection_of_killer
from headrace.sample import Probe, SampleRef
from headrace.spec import JobSpec, parse_spec

SHARDS, ROWS = 12, 40
BAD_SHARE = 0.02  # of the rows

_Sized = tuple[Probe | None, Rejected | None]


def job_spec(name: str, *, steps: int, ranks: int, window: int, substitute: bool) -> JobSpec:
    """A job of small steps in several parts each, planned at random, which costs next to nothing."""
    return parse_spec(
        {
            "name": name,
            "sources": [{"path": "/simulated", "name": "rows", "on_bad": "substitute" if substitute else "skip"}],
            "steps": steps,
            "global_batch": 4 * ranks,
            "part_samples": 2 if substitute else 4,  # with 4, parts of different ranks share leases
            "window": window,
            "strategy": "random",
            "topology": {"replicas": ranks, "microbatches": 2},
        }
    )


def list_shards(_spec: JobSpec) -> list[ShardInfo]:
    """The data set's shards, in place of headrace.preprocessor.sources.list_shards."""
    return [ShardInfo(source=0, url=f"/simulated/{n:05d}", name=f"rows/{n:05d}") for n in range(SHARDS)]


def sample_name(shard: int, row: int) -> str:
    return f"rows/{shard:05d}/{row:04d}"


@functools.cache
def _sized(ref: SampleRef) -> _Sized:
    random = Random(zlib.crc32(f"{ref.shard}/{ref.row}".encode()))
    name = sample_name(ref.shard, ref.row)
    if random.random() < BAD_SHARE:
        return None, Rejected(
            name=name, reason=Reason.CORRUPT_MEDIA, detail="damaged by formula", sample_id=ref.sample_id, row=ref.row
        )
    tokens, patches = random.randrange(16, 900), 4 * random.randrange(1, 300)
    return Probe(
        name=name, num_tokens=tokens + patches // 4, num_targets=tokens // 2, image_patches=(patches,), mel_frames=()
    ), None


class SimulatedJobWork:
    """headrace.preprocessor.job_work.JobWork on the data set by formula."""

    def __init__(self, name: str, spec: JobSpec, _cache: Any = None, ticket_key: bytes = b"", *_: Any) -> None:
        self.name, self.spec, self.ticket_key = name, spec, ticket_key
        self.processor = SimpleNamespace(vocabulary=Vocabulary(size=32_000, image_token=1, audio_token=2))

    def remember_shards(self, shards: Iterable[tuple[int, ShardInfo]]) -> tuple[ShardInfo, ...]:
        return tuple(shard for _, shard in shards)

    @contextlib.contextmanager
    def shards_known(self, _shards: Iterable[tuple[int, ShardInfo]]) -> Iterator[None]:
        yield

    def index(self, _shard: int) -> tuple[int, list[Rejected]]:
        return ROWS, []

    def probe(
        self, refs: Sequence[SampleRef], killed: Mapping[int, int] | None = None
    ) -> tuple[list[tuple[int, Probe]], list[Rejected]]:
        good: list[tuple[int, Probe]] = []
        rejected: list[Rejected] = []
        for ref in refs:
            if deaths := (killed or {}).get(ref.sample_id):
                rejected.append(rejection_of_killer(sample_name(ref.shard, ref.row), deaths, ref.sample_id, ref.row))
                continue
            probe, refused = _sized(ref)
            if probe is not None:
                good.append((ref.sample_id, probe))
            elif refused is not None:
                rejected.append(refused)
        return good, rejected

    def load(self, refs: Sequence[SampleRef], killed: Mapping[int, int], left_out: Mapping[int, Rejected]) -> LoadedPart:
        return LoadedPart(samples={ref: left_out.get(ref.sample_id) or SimpleNamespace(nbytes=4096) for ref in refs})

    def decode(self, part: LoadedPart, _writer: Any) -> Payload:
        rejected = tuple(item for item in part.samples.values() if isinstance(item, Rejected))
        ids = [ref.sample_id for ref, item in part.samples.items() if not isinstance(item, Rejected)]
        return Payload(data=pa.py_buffer(" ".join(map(str, ids)).encode()), num_samples=len(ids), rejected=rejected)

    def decode_batch(self, refs: Sequence[SampleRef]) -> None:
        pass

    def close(self) -> None:
        pass
