"""A preprocessor: the real Engine and PayloadStore, and a server that hands parts out."""

from __future__ import annotations

import json
from typing import Any

import grpc

from headrace.errors import NotFoundError, status_of
from headrace.preprocessor.engine import Engine, read_ahead_parts
from headrace.preprocessor.payload.payload_store import PayloadStore
from headrace.preprocessor.payload.staging import ReadAhead
from headrace.ticket import is_genuine, job_of

THREADS = 2
BUDGET_BYTES = 1 << 30
FETCH = "/simulation.Payload/Fetch"


async def run_preprocessor(number: int, endpoint: str, reorder: str) -> None:
    """Serve the reorder service at `reorder` until cancelled, or an error of the engine's own."""
    store = PayloadStore(BUDGET_BYTES, None, ReadAhead(max_bytes=1 << 26, max_parts=read_ahead_parts(THREADS)))
    engine = Engine(
        name=f"preprocessor-{number}",
        endpoint=endpoint,
        reorder=reorder,
        threads=THREADS,
        store=store,
        writer=None,
        cache=None,
        media_bytes=0,
    )
    server = grpc.aio.server()
    fetch = grpc.unary_unary_rpc_method_handler(_Payload(engine, store).fetch, bytes.decode, str.encode)
    service, _, method = FETCH.strip("/").partition("/")
    server.add_registered_method_handlers(service, {method: fetch})
    server.add_insecure_port(endpoint)
    await server.start()
    try:
        await engine.run()
    finally:
        await server.stop(None)


class _Payload:
    """What headrace.preprocessor.server.PayloadServicer does for a ticket: only who has it, signed, gets the part."""

    def __init__(self, engine: Engine, store: PayloadStore) -> None:
        self._engine, self._store = engine, store

    async def fetch(self, ticket: str, context: Any) -> str:
        """The ids of a part's samples and the names of those refused, as JSON."""
        key = self._engine.ticket_key(job_of(ticket))
        entry = self._store.get(ticket) if key is not None and is_genuine(ticket, key) else None
        if entry is not None:
            async with self._store.held(entry) as payload:
                if payload is not None:
                    self._store.mark_fetched(entry)
                    ids = list(map(int, payload.data.to_pybytes().split()))
                    return json.dumps({"ids": ids, "rejected": [item.sample_id for item in payload.rejected]})
        await context.abort(status_of(NotFoundError()), "the part is not held here")
        raise AssertionError("not reached")
