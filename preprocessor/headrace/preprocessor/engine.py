"""The preprocessor's engine: takes orders from the reorder service, works in threads, reports back.

    orders --> part waiting --read--> in memory --decode--> store     (payload.staging, payload.payload_store)
          +--> list, index, probe

Each stage has its own threads. Reading threads wait for disks and servers; decoding threads, one for each core, are never held
up by a slow shard. Listing, indexing and probing read too, and have a third set of threads.

Decoding uses threads, not processes. Codecs, resizing and checksums release the interpreter's lock, so two threads on two cores
decode pixels alone 1.9 times as fast as one, and whole samples, of whose time a tenth is Python (annotations, templates, tokens),
1.6 to 1.7 times. Two preprocessors with one thread each reach 2.0. Preprocessors do not depend on each other, so on many cores
run several with few threads rather than one with many; a process pool in here would do the same with a second wire format.
Separate reading threads cost nothing measurable for files in the page cache, so every source is read in them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
import uuid
from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from headrace.errors import HeadraceError, UserError, first_error, from_rpc
from headrace.handshake import explained
from headrace.herd import retry_pause_s
from headrace.manifest import PAGE_SHARDS, ShardInfo
from headrace.message_codec import (
    probe_message,
    ref_value,
    rejection_message,
    rejection_value,
    shard_message,
    shard_value,
    vocabulary_message,
)
from headrace.observability import metrics, tracing
from headrace.observability.logs import pairs
from headrace.preprocessor.access import is_forbidden
from headrace.preprocessor.decoding import LoadedPart, LoadedSample
from headrace.preprocessor.job_work import JobWork
from headrace.preprocessor.known_jobs import KnownJobs
from headrace.preprocessor.payload.part import DamagedPartError, Entry, PartStage, Payload
from headrace.preprocessor.payload.payload_store import PayloadStore
from headrace.preprocessor.payload.probe_cache import ProbeCache
from headrace.preprocessor.payload.writer import PayloadWriter
from headrace.preprocessor.reporting import Reports
from headrace.preprocessor.sources import list_shards
from headrace.preprocessor.sources.blob import BlobCache
from headrace.preprocessor.tasks import Start, cancelled_at_exit, in_thread
from headrace.quarantine import Rejected
from headrace.rpc import aio_channel, metadata
from headrace.v1 import fleet_pb2, fleet_pb2_grpc
from headrace.v1.common_pb2 import Occupancy, Shard

log = logging.getLogger(__name__)

RECONNECT_S = 0.2  # first pause after a broken connection; doubles up to RECONNECT_MAX_S
RECONNECT_MAX_S = 0.5
REFUSED_S = 2.0  # pause after an error that a user must fix first, such as a missing token
ORDER_THREADS = 8  # threads that list, index and probe: mostly they wait for disks and servers
GOODBYE_S = 0.2  # how long a leaving preprocessor waits for the end of its stream


def read_ahead_parts(threads: int) -> int:
    """Return how many parts to read ahead for `threads` decoding threads: the next one for each, and two more."""
    return threads + 2


class Engine:
    """Carries out the orders of the reorder service in worker threads; `run` it until cancelled."""

    def __init__(
        self,
        *,
        name: str,
        endpoint: str,
        reorder: str,
        threads: int,
        store: PayloadStore,
        writer: PayloadWriter,
        cache: BlobCache,
        media_bytes: int,
    ) -> None:
        """`media_bytes` bounds the samples kept in memory from probing to decoding; `store` must have a read-ahead stage."""
        self._name = name
        self._instance = uuid.uuid4().hex
        self._endpoint = endpoint
        self._reorder = reorder
        self._threads = threads
        self._store = store
        self._writer = writer
        self._media = ProbeCache[LoadedSample](media_bytes)
        self._num_read_threads = read_ahead_parts(threads)
        self._read_threads = ThreadPoolExecutor(self._num_read_threads, thread_name_prefix="read")
        self._decode_threads = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._order_threads = ThreadPoolExecutor(ORDER_THREADS, thread_name_prefix="order")
        self._jobs = KnownJobs(cache, self._media)
        self._reports = Reports(name, self._heartbeat)
        self._num_preprocessors = 1  # as the reorder service says
        self._samples_decoded = 0
        self._bytes_decoded = 0

    def ticket_key(self, job: str) -> bytes | None:
        """Return the key that signs a job's tickets (headrace.ticket); None if the job is not open here."""
        known = self._jobs.get(job)
        return known.ticket_key if known is not None else None

    async def run(self) -> None:
        """Serve the reorder service until cancelled, reconnecting whenever the stream ends.

        An order that fails is reported, and the preprocessor goes on. Any other error ends the preprocessor, so that its leases
        go to another one; a lease that is never answered would not.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._stay_connected())
                for _ in range(self._num_read_threads):
                    group.create_task(self._read_loop())
                for _ in range(self._threads):
                    group.create_task(self._decode_loop())
        except ExceptionGroup as group:
            raise first_error(group) from group
        finally:
            for pool in (self._read_threads, self._decode_threads, self._order_threads):
                pool.shutdown(wait=False, cancel_futures=True)

    async def _stay_connected(self) -> None:
        pause_s = RECONNECT_S
        while True:
            worked, error = await self._connection()
            error = await explained(error, self._reorder)
            if worked:
                pause_s = RECONNECT_S
            elif isinstance(error, UserError):
                pause_s = REFUSED_S
            level = logging.WARNING if isinstance(error, UserError) else logging.INFO
            log.log(level, "not connected %s", pairs(reorder=self._reorder, retry_s=pause_s, error=error or "the stream ended"))
            await asyncio.sleep(retry_pause_s(pause_s, self._num_preprocessors, random.random()))
            pause_s = min(2 * pause_s, RECONNECT_MAX_S)

    async def _connection(self) -> tuple[bool, HeadraceError | None]:
        """Run one stream from its Hello to its end. Return whether any order came, and the error that ended it, if any."""
        slots = self._threads + self._num_read_threads  # parts that are being decoded, and parts that are read ahead
        hello = fleet_pb2.Hello(preprocessor=self._name, endpoint=self._endpoint, slots=slots, instance=self._instance)
        hello.takes_lots, hello.other_slots, hello.clock_s = True, max(slots, ORDER_THREADS), time.time()
        self._reports.begin(hello)
        try:
            said = metadata()
        except UserError as err:  # retried: the token's file may be back in a moment
            return False, err
        async with aio_channel(self._reorder) as channel, cancelled_at_exit() as start:
            stream = fleet_pb2_grpc.FleetStub(channel).Work(metadata=said)
            start(self._reports.send(stream))  # in our own task: gRPC's would be left behind, half done, when a stream breaks
            listening = start(self._listen(stream, start))
            try:
                await asyncio.wait({listening})
                return listening.result()
            except asyncio.CancelledError:
                self._reports.goodbye()
                await asyncio.wait({listening}, timeout=GOODBYE_S)
                raise
            finally:
                self._store.void_leases()
                self._reports.void_leases()

    async def _listen(self, messages: AsyncIterable[fleet_pb2.FleetOrders], start: Start) -> tuple[bool, HeadraceError | None]:
        """Carry out orders until the stream ends. Return whether any order came, and the error that ended it, if any."""
        worked, error = False, None
        try:
            async for message in messages:
                for order in message.orders:
                    kind = order.WhichOneof("order")
                    if kind == "welcome":
                        self._reports.heartbeat_s = order.welcome.heartbeat_s
                        self._num_preprocessors = order.welcome.num_preprocessors
                        if not worked:
                            log.info("connected %s", pairs(reorder=self._reorder, endpoint=self._endpoint))
                            self._forget_jobs_but(order.welcome.jobs)
                            start(self._reports.beat())
                        worked = True
                    else:
                        self._obey(kind, getattr(order, kind), start)
        except grpc.aio.AioRpcError as err:
            error = from_rpc(err, self._reorder)
        return worked, error

    def _obey(self, kind: str, order: Any, start: Start) -> None:
        match kind:
            case "job_opened":
                if not self._jobs.is_open(order.job, order.spec_json, order.ticket_key):
                    self._forget(order.job)  # an earlier job of this name, whose shards have other numbers
                    self._jobs.open(order.job, order.spec_json, order.ticket_key)
            case "job_closed":
                self._forget(order.job)
            case "step_committed":
                self._store.release(order.job, order.step)
            case "list_shards":
                start(self._carry_out(self._list, order))
            case "index_shard":
                start(self._carry_out(self._index, order))
            case "probe_samples":
                start(self._carry_out(self._probe, order))
            case "decode_part" if order.trial:
                start(self._carry_out(self._trial_decode, order))
            case "decode_part":
                self._add_parts(order.lease, [order], order.shards)
            case "decode_parts":
                self._add_parts(order.lease, order.parts, order.shards)

    def _forget_jobs_but(self, running: Collection[str]) -> None:
        for job in self._jobs.all_but(running):
            self._forget(job)

    def _forget(self, name: str) -> None:
        self._store.release(name)
        self._jobs.forget(name)

    async def _carry_out(self, work: Callable[[Any], Awaitable[None]], order: Any) -> None:
        """Carry out an order with `work`; if that fails, report it to the reorder service and go on."""
        try:
            await work(order)
        except Exception as err:
            self._note_if_forbidden(order.job, err)
            self._reports.failed(order.lease, err)

    def _note_if_forbidden(self, job: str, error: Exception) -> None:
        """Log what a job may not have opened here. Who submitted it, the reorder service's log says."""
        if is_forbidden(error):
            log.warning("refused to open %s", pairs(job=job, reorder=self._reorder, reason=error))

    async def _list(self, order: fleet_pb2.ListShards) -> None:
        job = self._jobs[order.job]
        shards, processor = await asyncio.gather(
            in_thread(self._order_threads, list_shards, job.spec), in_thread(self._order_threads, lambda: job.processor)
        )
        for start in range(0, len(shards), PAGE_SHARDS):
            of_page = enumerate(shards[start : start + PAGE_SHARDS], start)
            page = fleet_pb2.ShardsListed(lease=order.lease, shards=[shard_message(number, shard) for number, shard in of_page])
            page.more = start + PAGE_SHARDS < len(shards)
            if not page.more:
                page.vocabulary.CopyFrom(vocabulary_message(processor.vocabulary))
            self._reports.put(shards_listed=page)

    async def _index(self, order: fleet_pb2.IndexShard) -> None:
        job = self._jobs[order.job]
        with job.shards_known(_shards([order.shard])):
            num_rows, rejected = await in_thread(self._order_threads, job.index, order.shard.number)
        _count_rejected(rejected)
        reply = fleet_pb2.ShardIndexed(
            lease=order.lease, num_samples=num_rows, rejections=[rejection_message(item) for item in rejected]
        )
        self._reports.put(shard_indexed=reply)

    async def _probe(self, order: fleet_pb2.ProbeSamples) -> None:
        refs = [ref_value(ref) for ref in order.samples]
        job = self._jobs[order.job]
        with (
            tracing.span("probe", order.trace, samples=len(refs), preprocessor=self._name),
            job.shards_known(_shards(order.shards)),
        ):
            probes, rejected = await in_thread(self._order_threads, job.probe, refs, dict(order.killed))
        _count_rejected(rejected)
        reply = fleet_pb2.SamplesProbed(
            lease=order.lease,
            probes=[probe_message(sample_id, probe) for sample_id, probe in probes],
            rejections=[rejection_message(item) for item in rejected],
        )
        self._reports.put(samples_probed=reply)

    async def _trial_decode(self, order: fleet_pb2.DecodePart) -> None:
        """Decode samples only to see whether this process survives it, and drop the result."""
        job = self._jobs[order.job]
        with job.shards_known(_shards(order.shards)):
            await in_thread(self._decode_threads, job.decode_batch, [ref_value(ref) for ref in order.samples])
        self._reports.decoded(order.lease)

    def _add_parts(self, lease: str, orders: Sequence[fleet_pb2.DecodePart], shards: Iterable[Shard]) -> None:
        """Have parts decoded under one lease. `shards`: those of all their samples."""
        self._reports.begin_parts(lease, len(orders))
        for order in orders:
            try:
                self._add_part(lease, order, shards)
            except Exception as err:
                self._reports.part_failed(lease, err)

    def _add_part(self, lease: str, order: fleet_pb2.DecodePart, shards: Iterable[Shard]) -> None:
        entry = Entry(
            ticket=order.ticket,
            job=order.job,
            step=order.step,
            priority=order.priority,
            refs=tuple(ref_value(ref) for ref in order.samples),
            shards=self._jobs[order.job].remember_shards(_shards(shards)),
            left_out={item.sample_id: rejection_value(item) for item in order.left_out},
            strict=order.strict,
        )
        entry = self._store.add(entry)
        entry.killed = dict(order.killed)
        if entry.payload is not None:
            self._reports.part_decoded(lease)
        else:
            entry.lease = lease

    async def _read_loop(self) -> None:
        while True:
            entry = await self._store.take_to_read()
            with self._answering_for(entry):
                self._store.put_loaded(entry, await in_thread(self._read_threads, self._read, self._jobs[entry.job], entry))

    async def _decode_loop(self) -> None:
        while True:
            entry = await self._store.take_to_decode()
            with self._answering_for(entry):
                assert entry.loaded is not None
                payload = await in_thread(self._decode_threads, self._decode, self._jobs[entry.job], entry, entry.loaded)
                self._samples_decoded += payload.num_samples
                self._bytes_decoded += payload.data.size
                metrics.SAMPLES_DECODED.inc(payload.num_samples)
                metrics.DECODED_BYTES.inc(payload.data.size)
                _count_rejected(payload.rejected)
                self._store.put_payload(entry, payload)
                self._reports.part_decoded(entry.lease)
                entry.lease = ""

    @contextlib.contextmanager
    def _answering_for(self, entry: Entry) -> Iterator[None]:
        """If the block fails to read or decode a part, drop the part, report its lease as failed and go on."""
        try:
            yield
        except Exception as err:
            self._store.abandon(entry)
            self._note_if_forbidden(entry.job, err)
            self._reports.part_failed(entry.lease, err)

    def _read(self, job: JobWork, entry: Entry) -> LoadedPart:
        """Load a part, in a reading thread."""
        with self._timed("read", entry):
            return job.load(entry.refs, entry.killed, entry.left_out)

    def _decode(self, job: JobWork, entry: Entry, part: LoadedPart) -> Payload:
        """Decode a part, in a decoding thread. Raises DamagedPartError if a strict part lacks samples."""
        with self._timed("decode", entry):
            payload = job.decode(part, self._writer)
        if damaged := entry.damaged_in(payload):
            self._writer.discard(payload)
            raise DamagedPartError(damaged)
        return payload

    @contextlib.contextmanager
    def _timed(self, stage: str, entry: Entry) -> Iterator[None]:
        begin = time.perf_counter()
        with tracing.span(stage, entry.ticket, samples=len(entry.refs), preprocessor=self._name):
            yield
        metrics.STAGE_SECONDS.labels(stage).observe(time.perf_counter() - begin)

    def _heartbeat(self) -> fleet_pb2.Heartbeat:
        return fleet_pb2.Heartbeat(
            samples_decoded=self._samples_decoded,
            bytes_decoded=self._bytes_decoded,
            store_bytes=self._store.held_bytes,
            store_budget_bytes=self._store.budget_bytes,
            occupancy=self._occupancy(),
        )

    def _occupancy(self) -> Occupancy:
        parts = self._store.stage_parts
        return Occupancy(
            ordered=parts[PartStage.WAITING],
            read=parts[PartStage.READ],
            decoding=parts[PartStage.DECODE],
            stored=parts[PartStage.STORE],
        )


def _count_rejected(rejected: Iterable[Rejected]) -> None:
    for item in rejected:
        metrics.SAMPLES_REJECTED.labels(item.reason).inc()


def _shards(messages: Iterable[Shard]) -> Iterator[tuple[int, ShardInfo]]:
    return ((message.number, shard_value(message)) for message in messages)
