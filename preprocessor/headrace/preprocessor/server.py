"""The servers of a preprocessor: trainers learn by gRPC how to fetch parts, and fetch them by the best transport."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import socket
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable

import fsspec
import grpc

from headrace.errors import HeadraceError, NotFoundError, PermissionDeniedError, UnknownTicketError
from headrace.identity import Identity
from headrace.message_codec import rejection_message
from headrace.observability import metrics
from headrace.observability.logs import pairs
from headrace.preprocessor.access import NOTHING, USUAL_URLS, Access, granting
from headrace.preprocessor.decode_memory import decoding_within
from headrace.preprocessor.engine import Engine, read_ahead_parts
from headrace.preprocessor.payload import gauges
from headrace.preprocessor.payload.arena import Arena, open_arena
from headrace.preprocessor.payload.part import Entry, Payload
from headrace.preprocessor.payload.payload_store import PayloadStore
from headrace.preprocessor.payload.staging import ReadAhead
from headrace.preprocessor.payload.writer import PayloadWriter
from headrace.preprocessor.sources.blob import BlobCache, check_fsspec, load_drivers
from headrace.preprocessor.sources.open_shards import raise_file_limit
from headrace.rpc import Server, reachable_address, unary_method
from headrace.ticket import is_genuine, job_of, part_of
from headrace.token_folder import TokenFolder
from headrace.transport.base import FLIGHT, SHARED_MEMORY, UCX, refusal_message
from headrace.transport.flight_renewal import flight_served
from headrace.transport.flight_server import Loan
from headrace.transport.slots import Reply, SlotServer
from headrace.transport.ucx_library import UcxError
from headrace.transport.ucx_server import UcxServer
from headrace.v1 import payload_pb2, payload_pb2_grpc

log = logging.getLogger(__name__)

READ_AHEAD_SHARE = 0.0625  # share of the budget: a JPEG is a thirtieth of its patches, a FLAC as large as its mel frames
PROBED_SHARE = 0.0625  # share of the budget for media that stay in memory from probing to decoding
STREAM_GRACE_S = 2.0  # how long a leaving preprocessor goes on with the parts that it is sending


class PayloadServicer(payload_pb2_grpc.PayloadServicer):
    """Hands decoded parts over: by `tell_slot` to clients on shared memory, by `lend` to the Flight and UCX servers.

    A part goes to any client with its ticket, signed with the key of its job.
    """

    def __init__(self, store: PayloadStore, keys: Callable[[str], bytes | None], arena: Arena | None = None) -> None:
        """`keys` returns the key that signs a job's tickets, or None if the job is not known here."""
        self._store = store
        self._keys = keys
        self._arena = arena
        self.offer = payload_pb2.OfferReply(arena=arena.path.name if arena is not None else "")
        """The transports that clients are told of. `payload_servers` fills in the ports of Flight and UCX."""
        self.num_parts: Counter[str] = Counter()
        """Number of parts handed over by each transport."""

    @unary_method
    async def Offer(self, request: payload_pb2.OfferRequest, context: grpc.aio.ServicerContext) -> payload_pb2.OfferReply:
        return self.offer

    @contextlib.asynccontextmanager
    async def lend(self, request: payload_pb2.FetchRequest, transport: str = FLIGHT) -> AsyncIterator[Loan]:
        """Yield a part to a transport's server, and keep it during the block. Raises NotFoundError or PermissionDeniedError."""
        async with self._held(request.ticket) as (entry, payload):
            self._handed_over(entry, transport)
            yield Loan(header=_header(payload), data=payload.data)

    async def tell_slot(self, request: payload_pb2.SlotRequest, reply: Reply) -> None:
        """Tell a client the slot of its part on the arena's socket; no slot if the part cannot be lent now.

        Raises ConnectionRefusedError if the client does not know this arena's token, and so does not share its memory.
        """
        if self._arena is None or request.arena_token != self._arena.token:
            raise ConnectionRefusedError("a client asks for slots of another arena")
        try:
            async with self._held(request.ticket) as (entry, payload):
                message = payload_pb2.SlotReply(header=_header(payload))
                if slot := self._store.lend(entry):
                    message.offset, message.generation = slot.offset, slot.generation
                    self._handed_over(entry, SHARED_MEMORY)
                await reply(message)  # the client has locked the slot when this returns
        except HeadraceError as err:
            await reply(payload_pb2.SlotReply(refusal=refusal_message(err)))

    @contextlib.asynccontextmanager
    async def _held(self, ticket: str) -> AsyncIterator[tuple[Entry, Payload]]:
        """Yield a part once it is decoded, and keep it during the block. Raises NotFoundError or PermissionDeniedError."""
        self._check(ticket)
        entry = self._store.get(ticket)
        if entry is None:
            raise NotFoundError(f"part {part_of(ticket)!r} is not held here")
        async with self._store.held(entry) as payload:
            if payload is None:
                raise NotFoundError(f"part {part_of(ticket)!r} is held here no longer")
            yield entry, payload

    def _handed_over(self, entry: Entry, transport: str) -> None:
        self._store.mark_fetched(entry)
        self.num_parts[transport] += 1
        metrics.PARTS_DELIVERED.labels(transport).inc()

    def _check(self, ticket: str) -> None:
        key = self._keys(job_of(ticket))
        if key is None:
            raise UnknownTicketError(
                f"the job of ticket {part_of(ticket)!r} is not known here: it has ended, or is that of another reorder service, "
                "whose own preprocessors have its parts"
            )
        if not is_genuine(ticket, key):
            raise PermissionDeniedError(
                f"ticket {part_of(ticket)!r} does not bear the signature of its job: fetch with the tickets that the reorder "
                "service gives to the job's ranks, as they are"
            )


def _header(payload: Payload) -> payload_pb2.PartHeader:
    return payload_pb2.PartHeader(
        num_bytes=payload.data.size,
        num_samples=payload.num_samples,
        rejections=[rejection_message(item) for item in payload.rejected],
        crc32=payload.crc32,
    )


@contextlib.asynccontextmanager
async def payload_servers(
    listen: str,
    servicer: PayloadServicer,
    arena: Arena | None,
    *,
    flight_port: int = 0,
    identity: Identity | None = None,
    with_ucx: bool = False,
    token: str = "",
    tokens: TokenFolder | None = None,
) -> AsyncIterator[str]:
    """Run all servers that trainers fetch from, and yield their gRPC endpoint. Raises EndpointError if a port cannot be had.

    `identity`: for TLS on the gRPC and Flight ports; None: plain text. `with_ucx`: offer UCX, which does not encrypt, on a port
    that it chooses. `token`: this process's own, which the gRPC server asks for before it says where the other servers are (those
    ask for tickets); empty: none. `tokens`: those of trainers, which it takes as well; None: none.
    """
    services = {"headrace.v1.Payload": lambda s: payload_pb2_grpc.add_PayloadServicer_to_server(servicer, s)}
    server = Server(listen, services, identity, token=token, tokens=tokens)
    async with contextlib.AsyncExitStack() as stack:
        flight = await stack.enter_async_context(
            flight_served(f"{listen.rpartition(':')[0]}:{flight_port}", servicer.lend, identity, STREAM_GRACE_S)
        )
        servicer.offer.flight_port = flight.port
        if with_ucx:
            await _offer_ucx(servicer, stack)
        if arena is not None:
            slots = SlotServer(arena.path, servicer.tell_slot)
            await slots.start()
            stack.push_async_callback(slots.stop)
        await server.start()
        stack.push_async_callback(server.stop, 0.2)
        yield server.endpoint


async def _offer_ucx(servicer: PayloadServicer, stack: contextlib.AsyncExitStack) -> None:
    """Offer UCX until the stack ends; if it cannot start, log that and leave clients to Flight."""
    server = UcxServer(functools.partial(servicer.lend, transport=UCX))
    try:
        await server.start()
    except UcxError as err:
        log.warning("ucx is not offered %s", pairs(reason=err))
        return
    stack.push_async_callback(server.stop)
    servicer.offer.ucx_port, servicer.offer.ucx_token = server.port, server.token


async def serve(
    *,
    listen: str,
    reorder: str,
    advertise: str,
    threads: int,
    budget_bytes: int,
    decode_bytes: int,
    access: Access,
    cache: BlobCache,
    token: str = "",
    tokens: TokenFolder | None = None,
    with_checksum: bool = False,
    flight_port: int = 0,
    identity: Identity | None = None,
    metrics_listen: str = "",
    with_ucx: bool = False,
) -> None:
    """Run a preprocessor until cancelled. Raises EndpointError if a port cannot be had, UserError where fsspec is too old.

    `access`: what jobs may have this process open. `advertise`: HOST:PORT for trainers; empty: derived from `listen` and the
    route to the reorder service. `token`: this process's own, `tokens`: those of trainers; where there are any, trainers are
    asked for one. `with_checksum`: trainers compare every part with its CRC-32, and fetch again what was damaged on the way.
    `flight_port`: on the host of `listen`; 0: a free one. `identity`: for the gRPC and Flight ports, which then speak TLS only.
    `metrics_listen`: HOST:PORT of the metrics; empty: none. `with_ucx`: offer UCX too. `decode_bytes`: memory for decoding media,
    all threads together.

    Of `budget_bytes`, parts read ahead take up to READ_AHEAD_SHARE and probed media up to PROBED_SHARE, each only what it needs;
    the arena, whose pages stay allocated, has the rest.
    """
    check_fsspec(fsspec.__version__)
    if access == NOTHING:
        log.warning("jobs may have nothing opened here: name folders with --data-root, beginnings of URLs with --allow-url")
    raise_file_limit()
    os.environ["OMP_NUM_THREADS"] = "1"  # for torch, where a recording has it imported: the engine's own threads use the cores
    read_ahead = ReadAhead(max_bytes=int(READ_AHEAD_SHARE * budget_bytes), max_parts=read_ahead_parts(threads))
    media_bytes = int(PROBED_SHARE * budget_bytes)
    arena = open_arena(budget_bytes - media_bytes - read_ahead.max_bytes)
    store = PayloadStore(budget_bytes - media_bytes, arena, read_ahead)
    gauges.watch(store, read_ahead, arena)
    servicer = PayloadServicer(store, lambda job: engine.ticket_key(job), arena)
    writer = PayloadWriter(arena, with_checksum=with_checksum)
    name = f"{socket.gethostname()}-{uuid.uuid4().hex[:6]}"  # not the process id, which is alike in containers
    try:
        with granting(access), decoding_within(decode_bytes), metrics.exported(metrics_listen, metrics.PREPROCESSOR):
            if access.urls != USUAL_URLS:
                load_drivers(access.urls or ())
            servers = payload_servers(
                listen,
                servicer,
                arena,
                flight_port=flight_port,
                identity=identity,
                with_ucx=with_ucx,
                token=token,
                tokens=tokens,
            )
            async with servers as listening:
                endpoint = advertise or reachable_address(listening, reorder)
                engine = Engine(
                    name=name,
                    endpoint=endpoint,
                    reorder=reorder,
                    threads=threads,
                    store=store,
                    writer=writer,
                    cache=cache,
                    media_bytes=media_bytes,
                )
                print(f"headrace preprocessor listening on {listening}", flush=True)
                try:
                    await engine.run()
                finally:
                    log.info("parts handed over %s", pairs(**servicer.num_parts))
                    if arena is not None:
                        log.info("arena %s", pairs(**dataclasses.asdict(arena.statistics())))
    finally:
        if arena is not None:
            arena.close()
