"""A preprocessor's real store, arena and servers, and parts to put into them: all but the decoding.

As a script, `payload_world.py produce` is such a preprocessor in a process of its own, and `payload_world.py hold ARENA TICKET`
a reader that holds a part until it is killed; `payload_world.py read ENDPOINT TICKET` begins with a part over Flight and stops.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight

from headrace.identity import Identity
from headrace.preprocessor.payload.arena import Arena
from headrace.preprocessor.payload.payload_store import Entry, PayloadStore
from headrace.preprocessor.payload.writer import PayloadWriter
from headrace.preprocessor.server import PayloadServicer
from headrace.quarantine import Rejected
from headrace.rpc import Server
from headrace.sample import payload_schema
from headrace.spec import ImageSpec
from headrace.transport.flight_renewal import RenewingFlight
from headrace.transport.slots import SlotReceiver, SlotServer
from headrace.v1 import payload_pb2, payload_pb2_grpc

MIB = 1 << 20
KEYS = {"job": bytes(32)}
"""Of the tickets, by job."""


def make_batch(num_bytes: int, sample_id: int = 0) -> pa.RecordBatch:
    """One sample with about `num_bytes` of payload, different for each id."""
    return make_rows([num_bytes], sample_id)


def make_rows(sizes: list[int], sample_id: int = 0) -> pa.RecordBatch:
    """A sample for each size, with that many bytes of payload, which are all sample_id % 256."""
    ids = list(range(sample_id, sample_id + len(sizes)))
    patches = np.repeat(np.array(ids, np.uint8), sizes)
    rows: dict[str, list[Any]] = {
        "sample_id": ids,
        "input_ids": [[5, 6, id_] for id_ in ids],
        "labels": [[-100, 6, id_] for id_ in ids],
        "image_grids": [[[1, 2, 3]] * (id_ % 3) for id_ in ids],
        "mel": [np.arange(id_ % 5, dtype=np.float16) for id_ in ids],
        "mel_frames": [[id_ % 5] for id_ in ids],
        "flags": [0 for _ in ids],
    }
    schema = payload_schema(ImageSpec())
    columns = [
        pa.LargeListArray.from_arrays(pa.array(np.cumsum([0, *sizes])), pa.array(patches))
        if field.name == "patches"
        else pa.array(rows[field.name], field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class TrustingServicer(PayloadServicer):
    """Takes any ticket for genuine: for tests that are about other matters, and name parts as they like."""

    def _check(self, ticket: str) -> None:
        pass


class Producer:
    """Decodes what it is told to by writing the batch that it was given. Runs on a loop of its own, in a thread."""

    def __init__(
        self,
        budget_bytes: int,
        *,
        shared: bool = True,
        with_checksum: bool = False,
        listen: str = "127.0.0.1:0",
        identity: Identity | None = None,
        signed: bool = False,
    ) -> None:
        """`signed`: tickets must bear the signature of KEYS."""
        self.arena = Arena(budget_bytes) if shared else None
        self.store = PayloadStore(budget_bytes, self.arena)
        self.servicer = (PayloadServicer if signed else TrustingServicer)(self.store, KEYS.get, self.arena)
        self.num_decoded = 0
        self._batches: dict[str, pa.RecordBatch] = {}
        self._writer = PayloadWriter(self.arena, with_checksum=with_checksum)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._start(listen, identity))

    async def _start(self, listen: str, identity: Identity | None) -> None:
        self._server = Server(
            listen,
            {"headrace.v1.Payload": lambda server: payload_pb2_grpc.add_PayloadServicer_to_server(self.servicer, server)},
            identity,
        )
        self.endpoint = self._server.endpoint
        self.flight = RenewingFlight("127.0.0.1:0", self.servicer.lend, identity)
        self.flight_endpoint = f"127.0.0.1:{self.flight.port}"
        self.servicer.offer.flight_port = self.flight.port
        await self._server.start()
        if self.arena is not None:
            self._slots = SlotServer(self.arena.path, self.servicer.tell_slot)
            await self._slots.start()
        self._decoding = asyncio.create_task(self._decode())
        self._renewing = asyncio.create_task(self.flight.keep_renewed())

    async def _decode(self) -> None:
        while True:
            entry = await self.store.take_to_decode()
            self.store.put_payload(entry, self._writer.write(self._batches[entry.ticket], ()))
            self.num_decoded += 1
            await asyncio.sleep(0)

    def add(self, ticket: str, batch: pa.RecordBatch, *, step: int = 0) -> None:
        """A lease on a part."""
        self._batches[ticket] = batch
        self.call(lambda: self.store.add(Entry(ticket=ticket, job="job", step=step, priority=step, refs=())))

    def add_stuck(self, ticket: str) -> None:
        """A lease on a part that is being decoded, and not ready before the test says `finish`."""
        entry = Entry(ticket=ticket, job="job", step=0, priority=0, refs=(), decoding=True)
        self.call(lambda: self.store.add(entry))

    def finish(self, ticket: str, batch: pa.RecordBatch, rejected: tuple[Rejected, ...] = ()) -> None:
        """A part that was stuck is decoded."""
        self.call(lambda: self.store.put_payload(self.store.get(ticket), self._writer.write(batch, rejected)))

    def payload(self, ticket: str) -> np.ndarray:
        """The bytes of a decoded part where they lie. Write into them to damage it."""
        return np.frombuffer(self.call(lambda: self.store.get(ticket).payload.data), np.uint8)

    def is_held(self, ticket: str) -> bool:
        """Whether a trainer holds the part in the arena."""
        return bool(self.call(lambda: self.arena.is_held(self.store.get(ticket).payload.slot)))

    def num_waiting(self, ticket: str) -> int:
        """Calls that wait for the part, or send it now."""
        return int(self.call(lambda: self.store.get(ticket).num_fetches))

    def commit(self, step: int) -> None:
        """All ranks have committed it."""
        self.call(lambda: self.store.release("job", step))

    def call(self, function: Callable[[], Any]) -> Any:
        """On the store's loop."""

        async def called() -> Any:
            return function()

        return self._run(called())

    def _run(self, coroutine: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(timeout=20)

    def stop(self) -> None:
        if self._loop.is_closed():
            return

        async def stop() -> None:
            self._decoding.cancel()
            self._renewing.cancel()
            if self.arena is not None:
                await self._slots.stop()
            await self._server.stop(0)

        self.flight.stop(grace_s=2.0)
        self._run(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()
        if self.arena is not None:
            self.arena.close()


def _hold(arena: str, ticket: str) -> None:
    delivery = SlotReceiver(arena).fetch(ticket, 10.0)
    assert delivery is not None
    print("held", flush=True)
    sys.stdin.read()


def _read(endpoint: str, ticket: str) -> None:
    request = payload_pb2.FetchRequest(ticket=ticket).SerializeToString()
    reader = flight.connect(f"grpc://{endpoint}").do_get(flight.Ticket(request))
    reader.read_chunk()
    print("reading", flush=True)
    sys.stdin.read()


def _produce() -> None:
    producer = Producer(8 * MIB)
    producer.add("part", make_batch(MIB, 7))
    assert producer.arena is not None
    print(producer.endpoint, producer.arena.path.name, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    {"hold": _hold, "read": _read, "produce": _produce}[sys.argv[1]](*sys.argv[2:])
