"""gRPC face of a preprocessor: trainers fetch parts here."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import uuid
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import torch

from headrace.codec import rejection_message
from headrace.errors import NotFoundError
from headrace.rpc import Server, answers_stream, reachable_address
from headrace.telemetry import pairs
from headrace.transport import chunks
from headrace.transport.base import GRPC, SHARED_MEMORY
from headrace.transport.slots import Reply, SlotServer
from headrace.v1 import payload_pb2
from preprocessor.arena import Arena, open_arena
from preprocessor.engine import Engine
from preprocessor.sources.blob import BlobCache
from preprocessor.store import Entry, Payload, PayloadStore, PayloadWriter

log = logging.getLogger(__name__)


class PayloadServicer:
    """Hands decoded parts over: by `tell_slot` to clients that share memory with us, by `Fetch` to all."""

    def __init__(self, store: PayloadStore, arena: Arena | None = None) -> None:
        self._store = store
        self._arena = arena
        self._arena_name = arena.path.name if arena is not None else ""
        self.num_parts: Counter[str] = Counter()
        """Parts handed over, by transport."""

    async def Offer(self, request: payload_pb2.OfferRequest, context: grpc.aio.ServicerContext) -> payload_pb2.OfferReply:
        return payload_pb2.OfferReply(arena=self._arena_name)

    @answers_stream
    async def Fetch(self, request: payload_pb2.FetchRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[chunks.Reply]:
        async with self._held(request.ticket) as (entry, payload):
            yield payload_pb2.FetchReply(header=self._header(payload))
            for chunk in chunks.split(payload.data):
                yield chunk
            self._store.mark_fetched(entry)
            self.num_parts[GRPC] += 1

    async def tell_slot(self, request: payload_pb2.SlotRequest, reply: Reply) -> None:
        """Answer on the arena's socket. Raises ConnectionRefusedError where the client has not read the arena."""
        if self._arena is None or request.arena_token != self._arena.token:
            raise ConnectionRefusedError("a client asks for slots of another arena")
        try:
            async with self._held(request.ticket) as (entry, payload):
                message = payload_pb2.SlotReply(header=self._header(payload))
                if slot := self._store.lend(entry):
                    message.offset, message.generation = slot.offset, slot.generation
                    self._store.mark_fetched(entry)
                    self.num_parts[SHARED_MEMORY] += 1
                await reply(message)  # the client has locked the slot when this returns
        except NotFoundError as err:
            await reply(payload_pb2.SlotReply(not_found=str(err)))

    @contextlib.asynccontextmanager
    async def _held(self, ticket: str) -> AsyncIterator[tuple[Entry, Payload]]:
        """The part once it is decoded, kept during the block. Raises NotFoundError."""
        entry = self._store.get(ticket)
        if entry is None:
            raise NotFoundError(f"part {ticket!r} is not held here")
        async with self._store.held(entry) as payload:
            if payload is None:
                raise NotFoundError(f"part {ticket!r} is held here no longer")
            yield entry, payload

    def _header(self, payload: Payload) -> payload_pb2.PartHeader:
        return payload_pb2.PartHeader(
            num_bytes=payload.data.size,
            num_samples=payload.num_samples,
            rejections=[rejection_message(item) for item in payload.rejected],
            arena=self._arena_name,
            crc32=payload.crc32,
        )


async def serve(
    *,
    listen: str,
    reorder: str,
    advertise: str,
    threads: int,
    budget_bytes: int,
    cache: BlobCache,
    with_checksum: bool = False,
) -> None:
    """Run until cancelled. Raises EndpointError where the port cannot be had.

    `advertise`: HOST:PORT for trainers; empty: derived from `listen` and the route to the reorder service. `with_checksum`:
    trainers compare every part with its CRC-32, and fetch again what was damaged on the way.
    """
    torch.set_num_threads(1)  # the engine's own threads use the cores
    arena = open_arena(budget_bytes)
    store = PayloadStore(budget_bytes, arena)
    servicer = PayloadServicer(store, arena)
    try:
        server = Server(listen, {chunks.SERVICE: lambda s: chunks.add_service(s, servicer)})
        endpoint = advertise or reachable_address(server.endpoint, reorder)
        name = f"{socket.gethostname()}-{uuid.uuid4().hex[:6]}"  # process ids are alike in containers
        writer = PayloadWriter(arena, with_checksum=with_checksum)
        engine = Engine(name=name, endpoint=endpoint, reorder=reorder, threads=threads, store=store, writer=writer, cache=cache)
        async with contextlib.AsyncExitStack() as stack:
            if arena is not None:
                slots = SlotServer(arena.path, servicer.tell_slot)
                await slots.start()
                stack.push_async_callback(slots.stop)
            await server.start()
            stack.push_async_callback(server.stop, 0.2)
            print(f"headrace preprocessor listening on {server.endpoint}", flush=True)
            try:
                await engine.run()
            finally:
                log.info("parts handed over %s", pairs(**servicer.num_parts))
                if arena is not None:
                    log.info("arena %s", pairs(**dataclasses.asdict(arena.statistics())))
    finally:
        if arena is not None:
            arena.close()
