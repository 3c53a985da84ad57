"""The sending process of `headrace bench transport`: a preprocessor's real servers with parts ready, and a raw TCP server.

It prints one line of JSON with its endpoint, raw port, tickets and write times. Then it answers each line of its standard input
with the processor time that it has taken, in seconds, and exits when that input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable
from time import perf_counter, process_time

import numpy as np
import pyarrow as pa

from headrace.identity import identity
from headrace.preprocessor.payload.arena import Arena
from headrace.preprocessor.payload.part import Entry
from headrace.preprocessor.payload.payload_store import PayloadStore
from headrace.preprocessor.payload.writer import PayloadWriter
from headrace.preprocessor.server import PayloadServicer, payload_servers
from headrace.sample import SCHEMA, payload_schema
from headrace.spec import ImageSpec
from headrace.ticket import make_key, make_ticket

MIB = 1 << 20
ROW_BYTES = MIB  # of patches per sample: an image of about a third of a megapixel
PARTS = 4  # per size, so that a consumer does not read again what it has just read
JOB = "bench"
WRITES = 32  # timings of each call, of which the fastest counts


def make_part(num_bytes: int) -> pa.RecordBatch:
    """Return a part, an Arrow batch, with `num_bytes` of patches in samples of about ROW_BYTES each, at least one."""
    rows = max(1, num_bytes // ROW_BYTES)
    patches = np.arange(num_bytes, dtype=np.uint32).astype(np.uint8)
    tokens = pa.array([[1, 2, 3]] * rows, pa.list_(pa.int32()))
    nothing = pa.array([[]] * rows, SCHEMA.field("mel").type)
    columns = {
        "sample_id": pa.array(range(rows), pa.int64()),
        "input_ids": tokens,
        "labels": tokens,
        "patches": pa.LargeListArray.from_arrays(np.linspace(0, num_bytes, rows + 1).astype(np.int64), pa.array(patches)),
        "image_grids": pa.array([[[1, 2, 2]]] * rows, SCHEMA.field("image_grids").type),
        "mel": nothing,
        "mel_frames": pa.array([[]] * rows, pa.list_(pa.int32())),
        "flags": pa.array([0] * rows, pa.int32()),
    }
    schema = payload_schema(ImageSpec())
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def fastest_s(*calls: Callable[[], object]) -> list[float]:
    """Time every call WRITES times and return the fastest time of each, in seconds.

    The calls take turns, so that other load on the machine slows them alike.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(WRITES):
        for call, of in zip(calls, seconds, strict=True):
            begin = perf_counter()
            call()
            of.append(perf_counter() - begin)
    return [min(of) for of in seconds]


def time_writes(arena: Arena, num_bytes: int) -> dict[str, float]:
    """Measure the seconds to write a part into warm shared memory, and those of one memcpy of as many bytes."""
    batch, writer = make_part(num_bytes), PayloadWriter(arena)

    def write() -> None:
        payload = writer.write(batch, ())
        assert payload.slot is not None
        arena.free(payload.slot)

    source = batch.column(SCHEMA.names.index("patches")).values.to_numpy()
    target = np.empty_like(source)
    write_s, memcpy_s = fastest_s(write, lambda: np.copyto(target, source))
    return {"write_s": write_s, "memcpy_s": memcpy_s}


def serve_raw(num_bytes: int) -> int:
    """Start a TCP server that sends as many bytes of one buffer as it is asked for (8 bytes, little-endian); return its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    data = memoryview(np.ones(num_bytes, np.uint8).tobytes())  # written to, since untouched pages would all be one page of zeros

    def answer() -> None:
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(ConnectionError):
                while asked := connection.recv(8):
                    connection.sendall(data[: int.from_bytes(asked, "little")])

    threading.Thread(target=answer, daemon=True).start()
    return int(listener.getsockname()[1])


def fill_store(store: PayloadStore, writer: PayloadWriter, key: bytes, sizes: list[int]) -> dict[int, list[str]]:
    """Fill the store with PARTS parts of each size, and return their tickets by size in bytes."""
    tickets: dict[int, list[str]] = {}
    for size in sizes:
        batch = make_part(size)
        for number in range(PARTS):
            ticket = make_ticket(JOB, f"{size}/{number}", key)
            entry = store.add(Entry(ticket=ticket, job=JOB, step=0, priority=0, refs=()))
            entry.decoding = True
            store.put_payload(entry, writer.write(batch, ()))
            tickets.setdefault(size, []).append(ticket)
    return tickets


def tell_processor_time() -> None:
    """Answer each line of standard input with the seconds of processor time of this process, until that input ends."""
    for _ in sys.stdin:
        print(process_time(), flush=True)


async def run(sizes: list[int]) -> None:
    """Serve parts of the given sizes in bytes until standard input ends, over TLS if the environment names papers."""
    budget = 3 * PARTS * sum(sizes)
    arena, key, own = Arena(budget), make_key(), identity()
    try:
        writes = {size: time_writes(arena, size) for size in sizes}
        store = PayloadStore(budget, arena)
        servicer = PayloadServicer(store, {JOB: key}.get, arena)
        async with payload_servers("127.0.0.1:0", servicer, arena, identity=own, with_ucx=own is None) as endpoint:
            tickets = fill_store(store, PayloadWriter(arena), key, sizes)
            facts = {"endpoint": endpoint, "raw_port": serve_raw(max(sizes)), "tickets": tickets, "writes": writes}
            print(json.dumps(facts), flush=True)
            await asyncio.to_thread(tell_processor_time)
    finally:
        arena.close()


if __name__ == "__main__":
    asyncio.run(run([int(size) for size in sys.argv[1:]]))
