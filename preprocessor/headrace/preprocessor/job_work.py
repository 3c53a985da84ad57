"""What a preprocessor does for a job: index shards, and probe, read and decode samples. Blocking functions for worker threads.

Reading a part waits for disks and servers and brings it into memory; decoding it needs no more than that. So the two run in
separate threads (headrace.preprocessor.engine).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.errors import DatasetError
from headrace.manifest import MAX_SHARD_ROWS, ShardInfo, Shards
from headrace.observability import metrics
from headrace.observability.logs import pairs
from headrace.preprocessor import reading_ahead
from headrace.preprocessor.decoding import (
    LoadedPart,
    LoadedSample,
    MediaArrays,
    Row,
    SampleProcessor,
    SizedSample,
    Sizes,
    probe_of,
)
from headrace.preprocessor.image.thumbnail import ThumbnailBudget, may_have_thumbnail, thumbnail_of
from headrace.preprocessor.payload.part import Payload
from headrace.preprocessor.payload.probe_cache import ProbeCache
from headrace.preprocessor.payload.writer import PayloadWriter
from headrace.preprocessor.sources import Record, Shard, open_shard
from headrace.preprocessor.sources.blob import BlobCache, is_remote
from headrace.preprocessor.sources.open_shards import OpenShards
from headrace.printable import sendable
from headrace.quarantine import BadSampleError, Reason, Rejected, rejection_of_killer
from headrace.sample import Probe, SampleRef
from headrace.source_spec import SourceSpec
from headrace.spec import JobSpec
from headrace.transport.base import read_batches

log = logging.getLogger(__name__)

SIZES_BYTES = 4 << 20  # for sizes kept from probing to decoding: about 500 samples of 1,000 tokens, a few global batches
OPEN_SHARDS = 32  # indexed shards, at least, that a job likes to keep open; the index of a tar takes some 80 bytes a sample

_NONE_KILLED: Mapping[int, int] = {}
_NONE_LEFT_OUT: Mapping[int, Rejected] = {}

_T = TypeVar("_T")


class JobWork:
    """One job's spec, sample processor and open shards, with the work on its samples. Thread-safe."""

    def __init__(
        self,
        name: str,
        spec: JobSpec,
        cache: BlobCache | None = None,
        ticket_key: bytes = b"",
        media: ProbeCache[LoadedSample] | None = None,
        open_shards: OpenShards | None = None,
    ) -> None:
        """`cache` is for remote shards; None: one below the system's temporary directory. `media` keeps samples from probing to
        decoding; None: they are read again. `open_shards` is shared by all jobs of the process; None: this job has its own.
        """
        self.name = name
        self.spec = spec
        self.ticket_key = ticket_key
        self._cache = cache
        self._remembered: WeakValueDictionary[int, ShardInfo] = WeakValueDictionary()
        self.shards: Shards = self._remembered
        """Shards by number: those passed to `remember_shards` and `shards_known`, or the whole list if the owner has set it."""
        # Samples are shuffled over `shuffle_shards` shards of each source, and a window may lie across two such blocks.
        self._wanted_shards = max(OPEN_SHARDS, 2 * spec.shuffle_shards * len(spec.sources))
        self._lock = threading.Lock()
        self._processor: SampleProcessor | None = None
        self._sizes = ProbeCache[Sizes](SIZES_BYTES)
        self._media = media
        self._open_shards = open_shards or OpenShards()
        self._advised = False
        self._thumbnails = ThumbnailBudget()

    @property
    def processor(self) -> SampleProcessor:
        """The job's preprocessing, created at first use. Raises SpecError if the tokenizer does not fit the template."""
        if self._processor is None:  # without the lock, as every sample asks: threads queueing for it slow each other down
            with self._lock:
                if self._processor is None:
                    self._processor = SampleProcessor(self.spec)
        return self._processor

    def remember_shards(self, shards: Iterable[tuple[int, ShardInfo]]) -> tuple[ShardInfo, ...]:
        """Know shards by number for as long as the result is referenced, since a data set may have any number of them."""
        return tuple(self._remembered.setdefault(number, shard) for number, shard in shards)

    @contextlib.contextmanager
    def shards_known(self, shards: Iterable[tuple[int, ShardInfo]]) -> Iterator[None]:
        """Know shards by number during the block."""
        kept = self.remember_shards(shards)
        yield
        del kept

    def index(self, shard: int) -> tuple[int, list[Rejected]]:
        """Return the number of rows of a shard, and the damage in it; an unexpected error counts as a corrupt archive.

        Raises DatasetError (also for more than MAX_SHARD_ROWS rows), OSError or MemoryError if the shard cannot be read here.
        """
        info = self.shards[shard]
        try:
            opened = self._shard(shard)
        except (DatasetError, OSError, MemoryError):
            raise
        except Exception as err:
            log.exception("unexpected error in shard=%s", info.url)
            return 0, [Rejected(name=info.name, reason=Reason.ARCHIVE_CORRUPT, detail=f"unexpected {type(err).__name__}: {err}")]
        self._advise(info, opened.rows_fetched_together)
        if opened.num_rows > MAX_SHARD_ROWS:
            raise DatasetError(f"{info.url}: a shard may have {MAX_SHARD_ROWS} rows, this one says {opened.num_rows}: split it")
        damage = [
            Rejected(name=f"{info.name}/{item.name}" if item.name else info.name, reason=item.reason, detail=item.detail)
            for item in opened.rejected
        ]
        return opened.num_rows, damage

    def _advise(self, shard: ShardInfo, rows: int) -> None:
        """Log, once, that single samples are fetched with their neighbours, where the job could have these follow each other."""
        if self._advised or not self.spec.shuffle or rows <= self.spec.shuffle_rows:
            return
        self._advised = True
        remedy = f"write row groups of fewer rows, or set shuffle_rows: {rows}, with which they follow each other"
        log.warning("single samples are fetched with their row groups %s", pairs(shard=shard.url, rows=rows, remedy=remedy))

    def probe(
        self, refs: Sequence[SampleRef], killed: Mapping[int, int] = _NONE_KILLED
    ) -> tuple[list[tuple[int, Probe]], list[Rejected]]:
        """Return (sample_id, probe) of the good samples, and the rejections of the others; keep what was read for decoding.

        `killed`: sample id -> number of preprocessors that died while working on it; such a sample is rejected unread.
        """
        good: list[tuple[int, Probe]] = []
        rejected: list[Rejected] = []
        for ref, loaded in self._load_all(
            refs, lambda ref: self._loaded(ref, killed), is_read=lambda ref: ref.sample_id not in killed
        ):
            sizes = self._size(ref, loaded)
            if isinstance(sizes, Rejected):
                rejected.append(sizes)
            else:
                self._sizes.put(self.name, ref, sizes, sizes.nbytes)
                if self._media is not None and isinstance(loaded, LoadedSample):
                    self._media.put(self.name, ref, loaded, loaded.nbytes)
                metrics.TOKENS_DISARMED.inc(sizes.sequence.num_disarmed)
                good.append((ref.sample_id, probe_of(self.sample_name(ref), sizes)))
        return good, rejected

    def load(
        self,
        refs: Sequence[SampleRef],
        killed: Mapping[int, int] = _NONE_KILLED,
        left_out: Mapping[int, Rejected] = _NONE_LEFT_OUT,
    ) -> LoadedPart:
        """Read samples into memory, unless they are still there from probing, shard by shard, which suits caches and disks.

        `killed`: sample id -> number of preprocessors that died while working on it; such a sample is rejected unread. Samples in
        `left_out` are not read either. Raises DatasetError, OSError or MemoryError if a shard cannot be read here.
        """

        def load(ref: SampleRef) -> LoadedSample | Rejected:
            return left_out.get(ref.sample_id) or self._in_memory(ref, killed)

        def is_read(ref: SampleRef) -> bool:
            is_kept = self._media is not None and self._media.has(self.name, ref)
            return not (is_kept or ref.sample_id in killed or ref.sample_id in left_out)

        read = dict(self._load_all(sorted(refs, key=lambda ref: (ref.shard, ref.row)), load, is_read))
        return LoadedPart(samples={ref: read[ref] for ref in refs})

    def decode(self, part: LoadedPart, writer: PayloadWriter) -> Payload:
        """Decode a part to a payload: its samples in the order of the plan, without those that turn out to be damaged.

        Pixels and sound are decoded straight into the payload.
        """
        sized = {ref: self._sized(ref, loaded) for ref, loaded in part.samples.items()}
        good = {ref: sample for ref, sample in sized.items() if isinstance(sample, SizedSample)}
        arrays = self.processor.allocate([sample.sizes for sample in good.values()])
        draft = self._encode(
            {ref: self.processor.row(sample.sizes, patches, mel) for ref, sample, patches, mel in _cut(good, *arrays)},
            arrays,
        )
        reserved = writer.reserve(draft, *arrays)
        try:
            rows = {
                ref: self._guarded(ref, partial(self.processor.decode_into, sample, of_patches, of_mel))
                for ref, sample, of_patches, of_mel in _cut(good, reserved.patches, reserved.mel)
            }
            results = [rows.get(ref, sample) for ref, sample in sized.items()]
            rejected = tuple(result for result in results if isinstance(result, Rejected))
            kept = {ref: row for ref, row in rows.items() if isinstance(row, Row)}
            if len(kept) == len(rows):
                return writer.finish(reserved, len(kept), rejected)
            payload = writer.write(self._encode(kept), rejected)
        except BaseException:
            writer.discard(reserved)
            raise
        writer.discard(reserved)
        return payload

    def decode_batch(self, refs: Sequence[SampleRef]) -> tuple[pa.RecordBatch, tuple[Rejected, ...]]:
        """Load and decode samples onto the heap; return their batch and the rejections."""
        payload = self.decode(self.load(refs), PayloadWriter())
        (batch,) = read_batches(payload.data)
        return batch, payload.rejected

    def _in_memory(self, ref: SampleRef, killed: Mapping[int, int]) -> LoadedSample | Rejected:
        probed = self._media.take(self.name, ref) if self._media is not None else None
        return self._loaded(ref, killed) if probed is None or ref.sample_id in killed else probed

    def _loaded(self, ref: SampleRef, killed: Mapping[int, int]) -> LoadedSample | Rejected:
        if deaths := killed.get(ref.sample_id):
            return rejection_of_killer(self.sample_name(ref), deaths, ref.sample_id, ref.row)
        return self._attempt(ref, self.processor.load)

    def _sized(self, ref: SampleRef, loaded: LoadedSample | Rejected) -> SizedSample | Rejected:
        """Return a sample with its sizes, reusing those found by probing if it was probed here."""
        if isinstance(loaded, Rejected):
            return loaded
        sizes = self._sizes.take(self.name, ref) or self._size(ref, loaded)
        return sizes if isinstance(sizes, Rejected) else SizedSample(loaded=loaded, sizes=sizes)

    def _size(self, ref: SampleRef, loaded: LoadedSample | Rejected) -> Sizes | Rejected:
        return loaded if isinstance(loaded, Rejected) else self._guarded(ref, partial(self.processor.size, loaded))

    def _encode(self, rows: Mapping[SampleRef, Row], arrays: MediaArrays | None = None) -> pa.RecordBatch:
        return self.processor.encode([ref.sample_id for ref in rows], list(rows.values()), arrays)

    def sample_name(self, ref: SampleRef) -> str:
        """Return the name of a sample, SOURCE/SHARD/KEY."""
        return sendable(f"{self.shards[ref.shard].name}/{self._shard(ref.shard).key(ref.row)}")

    def close(self) -> None:
        """Close the shards, and forget what was probed."""
        if self._media is not None:
            self._media.forget(self.name)
        for slot in self._open_shards.remove_job(self):
            if slot.shard is not None:
                slot.shard.close()

    def _load_all(
        self,
        refs: Sequence[SampleRef],
        load: Callable[[SampleRef], LoadedSample | Rejected],
        is_read: Callable[[SampleRef], bool],
    ) -> Iterator[tuple[SampleRef, LoadedSample | Rejected]]:
        """Yield each sample loaded, in order; remote ones side by side. `is_read`: whether `load` reads a sample at all."""
        rows: dict[int, list[int]] = {}
        for ref in refs:
            if is_remote(self.shards[ref.shard].url) and is_read(ref):
                rows.setdefault(ref.shard, []).append(ref.row)
        if not rows:
            yield from ((ref, load(ref)) for ref in refs)
            return

        def ask(shard: int) -> None:
            with contextlib.suppress(Exception):  # told by reading
                self._shard(shard).prefetch(rows[shard])

        asked = {shard: reading_ahead.Begun(partial(ask, shard)) for shard in rows}

        def load_asked(ref: SampleRef) -> LoadedSample | Rejected:
            if ref.shard in asked:
                asked[ref.shard].result()
            return load(ref)

        yield from reading_ahead.in_order(refs, load_asked)

    def _attempt(self, ref: SampleRef, work: Callable[[Record, SourceSpec], _T]) -> _T | Rejected:
        """Read one record and do `work` on it, with errors handled by `_guarded`."""
        source = self.spec.sources[self.shards[ref.shard].source]
        return self._guarded(ref, lambda: work(self._shard(ref.shard).read(ref.row), source))

    def _guarded(self, ref: SampleRef, work: Callable[[], _T]) -> _T | Rejected:
        """Do `work` on one sample. Return a rejection if the sample is damaged, or on an unexpected error, which is logged.

        Raises DatasetError, OSError and MemoryError, which are not the sample's fault, so that another preprocessor may try.
        """
        try:
            return work()
        except BadSampleError as err:
            reason, detail, modality = err.reason, err.detail, err.modality
            thumbnail = self._thumbnail(err)
        except (DatasetError, OSError, MemoryError):
            raise
        except Exception as err:
            log.exception("unexpected error in sample shard=%s row=%d", self.shards[ref.shard].url, ref.row)
            reason, detail, modality, thumbnail = Reason.CORRUPT_MEDIA, f"unexpected {type(err).__name__}: {err}", "", b""
        return Rejected(
            name=self.sample_name(ref),
            reason=reason,
            detail=detail,
            sample_id=ref.sample_id,
            row=ref.row,
            modality=modality,
            thumbnail=thumbnail,
        )

    def _thumbnail(self, error: BadSampleError) -> bytes:
        """Return what can be seen of the medium at fault, within the job's budget of thumbnails; empty where nothing can."""
        return thumbnail_of(error.medium) if may_have_thumbnail(error.medium) and self._thumbnails.take() else b""

    def _shard(self, index: int) -> Shard:
        """Return a shard, opening it if it is not open. Different shards are opened in parallel."""
        slot = self._open_shards.slot(self, index, self._wanted_shards)
        with slot.lock:
            if slot.shard is None:
                info = self.shards[index]
                slot.shard = open_shard(info.url, self.spec.sources[info.source], self._cache)
            return slot.shard


def _cut(
    samples: Mapping[SampleRef, SizedSample], patches: NDArray[np.uint8], mel: NDArray[np.float16]
) -> Iterator[tuple[SampleRef, SizedSample, NDArray[np.uint8], NDArray[np.float16]]]:
    """Yield each sample with its slices of the arrays that hold the media of all samples."""
    patch = frame = 0
    for ref, sized in samples.items():
        sizes = sized.sizes
        yield ref, sized, patches[patch : patch + sizes.num_patches], mel[frame : frame + sizes.num_frames]
        patch += sizes.num_patches
        frame += sizes.num_frames
