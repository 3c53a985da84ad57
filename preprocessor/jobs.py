"""What a preprocessor does for a job: list, index, probe and decode. Blocking functions for worker threads."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import pyarrow as pa

from headrace.errors import DatasetError
from headrace.quarantine import BadSampleError, Reason, Rejected
from headrace.sample import Probe, SampleRef
from headrace.spec import JobSpec, SourceSpec
from preprocessor.pipeline import Pipeline, Row
from preprocessor.sources import Record, Shard, ShardInfo, open_shard
from preprocessor.store import Payload

log = logging.getLogger(__name__)

OPEN_SHARDS = 32  # indexed shards kept open per job; an index is about 100 bytes a sample

_T = TypeVar("_T")


class Job:
    """One job's spec, manifest, pipeline and open shards. Thread-safe."""

    def __init__(self, name: str, spec: JobSpec) -> None:
        self.name = name
        self.spec = spec
        self.shards: tuple[ShardInfo, ...] = ()
        self._lock = threading.Lock()
        self._pipeline: Pipeline | None = None
        self._open: OrderedDict[int, Shard] = OrderedDict()

    @property
    def pipeline(self) -> Pipeline:
        """Made at first use. Raises SpecError where the tokenizer does not fit the template."""
        with self._lock:
            if self._pipeline is None:
                self._pipeline = Pipeline(self.spec)
            return self._pipeline

    def index(self, shard: int) -> tuple[int, list[Rejected]]:
        """Rows of a shard, and the damage in it. One that cannot be opened has no rows and one rejection."""
        info = self.shards[shard]
        try:
            opened = self._shard(shard)
        except (OSError, DatasetError) as err:
            return 0, [Rejected(name=info.name, reason=Reason.ARCHIVE_CORRUPT, detail=f"cannot be read: {err}")]
        damage = [
            Rejected(name=f"{info.name}/{item.name}" if item.name else info.name, reason=item.reason, detail=item.detail)
            for item in opened.rejected
        ]
        return opened.num_rows, damage

    def probe(self, refs: Sequence[SampleRef]) -> tuple[list[tuple[int, Probe]], list[Rejected]]:
        """(sample_id, probe) of the good samples, and the others."""
        good: list[tuple[int, Probe]] = []
        rejected: list[Rejected] = []
        for ref in refs:
            result = self._attempt(ref, self.pipeline.probe)
            if isinstance(result, Rejected):
                rejected.append(result)
            else:
                good.append((ref.sample_id, dataclasses.replace(result, name=self.sample_name(ref))))
        return good, rejected

    def decode(self, refs: Sequence[SampleRef]) -> Payload:
        """The samples as one Arrow batch, those that turn out to be damaged left out."""
        # Read in the order of the shards, which caches and disks like; hand on in the order of the plan.
        read = {ref.sample_id: self._attempt(ref, self.pipeline.decode) for ref in sorted(refs, key=lambda r: (r.shard, r.row))}
        ids: list[int] = []
        rows: list[Row] = []
        rejected: list[Rejected] = []
        for ref in refs:
            result = read[ref.sample_id]
            if isinstance(result, Rejected):
                rejected.append(result)
            else:
                ids.append(ref.sample_id)
                rows.append(result)
        batch = self.pipeline.encode(ids, rows)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return Payload(data=sink.getvalue(), num_samples=len(ids), rejected=tuple(rejected))

    def sample_name(self, ref: SampleRef) -> str:
        """SOURCE/SHARD/KEY."""
        return f"{self.shards[ref.shard].name}/{self._shard(ref.shard).key(ref.row)}"

    def _known_name(self, ref: SampleRef) -> str:
        """The sample's name, with its row for a key where the shard has become unreadable."""
        try:
            return self.sample_name(ref)
        except (OSError, DatasetError):
            return f"{self.shards[ref.shard].name}/{ref.row}"

    def close(self) -> None:
        """Close the shards."""
        with self._lock:
            for shard in self._open.values():
                shard.close()
            self._open.clear()

    def _attempt(self, ref: SampleRef, work: Callable[[Record, SourceSpec], _T]) -> _T | Rejected:
        """`work` on one record. Whatever goes wrong with one sample is that sample's rejection, never the job's end."""
        try:
            shard = self._shard(ref.shard)
            return work(shard.read(ref.row), self.spec.sources[self.shards[ref.shard].source])
        except BadSampleError as err:
            reason, detail = err.reason, err.detail
        except (OSError, DatasetError) as err:
            reason, detail = Reason.MISSING_MEDIA, f"cannot be read: {err}"
        except Exception as err:
            log.exception("unexpected error in sample shard=%s row=%d", self.shards[ref.shard].url, ref.row)
            reason, detail = Reason.CORRUPT_MEDIA, f"unexpected {type(err).__name__}: {err}"
        return Rejected(name=self._known_name(ref), reason=reason, detail=detail, sample_id=ref.sample_id)

    def _shard(self, index: int) -> Shard:
        with self._lock:
            shard = self._open.get(index)
            if shard is None:
                info = self.shards[index]
                shard = self._open[index] = open_shard(info.url, self.spec.sources[info.source])
            self._open.move_to_end(index)
            # The oldest is closed by its last reader's reference, not here: another thread may be reading from it.
            while len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
            return shard
