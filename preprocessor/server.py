"""gRPC face of a preprocessor: trainers fetch parts here."""

from __future__ import annotations

import socket
import uuid
from collections.abc import AsyncIterator

import grpc
import torch

from headrace.codec import rejection_message
from headrace.errors import NotFoundError
from headrace.rpc import CHUNK_BYTES, Server, answers_stream, reachable_address
from headrace.v1 import payload_pb2, payload_pb2_grpc
from preprocessor.engine import Engine
from preprocessor.store import PayloadStore


class PayloadServicer(payload_pb2_grpc.PayloadServicer):
    """Streams decoded parts in chunks."""

    def __init__(self, store: PayloadStore) -> None:
        self._store = store

    @answers_stream
    async def Fetch(
        self, request: payload_pb2.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[payload_pb2.FetchReply]:
        entry = self._store.get(request.ticket)
        if entry is None:
            raise NotFoundError(f"part {request.ticket!r} is not held here")
        async with self._store.held(entry) as payload:
            if payload is None:
                raise NotFoundError(f"part {request.ticket!r} is held here no longer")
            data = memoryview(payload.data)
            header = payload_pb2.PartHeader(
                num_bytes=len(data),
                num_samples=payload.num_samples,
                rejections=[rejection_message(item) for item in payload.rejected],
            )
            yield payload_pb2.FetchReply(header=header)
            for start in range(0, len(data), CHUNK_BYTES):
                yield payload_pb2.FetchReply(chunk=bytes(data[start : start + CHUNK_BYTES]))
            self._store.mark_fetched(entry)


async def serve(*, listen: str, reorder: str, advertise: str, threads: int, budget_bytes: int) -> None:
    """Run until cancelled. Raises EndpointError where the port cannot be had.

    `advertise`: HOST:PORT for trainers; empty: derived from `listen` and the route to the reorder service.
    """
    torch.set_num_threads(1)  # the engine's own threads use the cores
    store = PayloadStore(budget_bytes)
    server = Server(
        listen, {"headrace.v1.Payload": lambda s: payload_pb2_grpc.add_PayloadServicer_to_server(PayloadServicer(store), s)}
    )
    endpoint = advertise or reachable_address(server.endpoint, reorder)
    name = f"{socket.gethostname()}-{uuid.uuid4().hex[:6]}"  # process ids are alike in containers
    engine = Engine(name=name, endpoint=endpoint, reorder=reorder, threads=threads, store=store)
    await server.start()
    print(f"headrace preprocessor listening on {server.endpoint}", flush=True)
    try:
        await engine.run()
    finally:
        await server.stop(0.2)
