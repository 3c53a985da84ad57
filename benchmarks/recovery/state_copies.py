"""How fast a node gets the state of layers that it lacks from another node: two processes on one machine, over loopback."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter, process_time

import torch

from benchmarks.report import Rival, Row, Section, at_least
from benchmarks.timing import progress, time_calls
from headrace.reorder_service.recovery.recovery_choice import Circumstances
from headrace.trainer.pipeline.huge_pages import empty_in_huge_pages
from headrace.trainer.recovery.layer_transfer import CHUNK_BYTES, Transfer, move, new_digest
from headrace.trainer.recovery.mesh import Meeting, Mesh

RATE_GOAL = 3.0  # GB/s of a core
PARAMETERS = 4  # of which each has a weight and two moments
ELEMENTS = 4 << 20  # of each: a matrix of 2,048 x 2,048
BYTES = PARAMETERS * 3 * ELEMENTS * 4
ROUNDS, QUICK_ROUNDS = 20, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """GB/s of the receiver in its best round: of time, and of its process's time on a core."""

    of_time: float
    of_core: float


def section(*, quick: bool) -> Section:
    """Whole copies beside what the connection could do at best, beside gloo's messages, and digests alone."""
    progress("copies of state")
    torch.set_num_threads(1)
    chunk = torch.ones(CHUNK_BYTES // 4)
    digests = time_calls(lambda: new_digest(chunk.numpy().data), budget_s=0.2 if quick else 0.5, most=10_000)
    digest_rate = CHUNK_BYTES / digests.best_s / 1e9
    meeting, rounds = Meeting("127.0.0.1"), QUICK_ROUNDS if quick else ROUNDS
    other = multiprocessing.get_context("spawn").Process(target=_send_to, args=(meeting.address, rounds))
    other.start()
    rates = _receive_from(meeting.address, rounds)
    other.join()
    copy, limit, messages = rates["copy"], rates["stream"], rates["gloo"]
    limits = "the socket alone, into 1 MiB that is used again"
    rows = [
        Row(
            name="from a process to another, of the receiver's core",
            value=copy.of_core,
            unit="GB/s",
            rival=Rival(value=limit.of_core, source=limits),
            goal=at_least(RATE_GOAL),
            detail=f"{BYTES >> 20} MiB with digest and check, into new memory; the best of {rounds}",
        ),
        Row(
            name="from a process to another",
            value=copy.of_time,
            unit="GB/s",
            rival=Rival(value=limit.of_time, source=limits),
            detail="the same; each of the two processes has a core if nothing else runs",
        ),
        Row(
            name="gloo's messages into huge pages without digests, of the receiver's core",
            value=messages.of_core,
            unit="GB/s",
            detail=f"{messages.of_time:.2f} GB/s from a process to another",
        ),
        Row(name="digest and check", value=digest_rate / 2, unit="GB/s", detail="one core, one after the other, in its cache"),
        Row(
            name="what forecasts and choices of pipelines take it for",
            value=Circumstances().copy_bytes_per_s / 1e9,
            unit="GB/s",
            rival=Rival(value=copy.of_time, source="this measurement"),
        ),
    ]
    return Section(title="State of layers that a node gets from another one, on two cores, over the loopback device", rows=rows)


def _mesh(address: str, rank: int) -> Mesh:
    torch.set_num_threads(1)
    mesh = Mesh(address, "copies", rank, 2, "127.0.0.1")
    mesh.connect()
    return mesh


def _transfers() -> tuple[dict[str, tuple[int, ...]], list[Transfer]]:
    names = [f"layer.{number}" for number in range(PARAMETERS)]
    return dict.fromkeys(names, (ELEMENTS,) * 3), [Transfer(name=name, source=1, target=0) for name in names]


def _send_to(address: str, rounds: int) -> None:
    """Node 1, which holds all."""
    mesh = _mesh(address, 1)
    lengths, transfers = _transfers()
    parts = [torch.full((ELEMENTS,), float(number)) for number in range(3)]
    with mesh.streams([0], []) as streams:
        for _ in range(rounds):
            mesh.barrier()
            move(mesh, lengths, transfers, lambda _: parts)
            mesh.barrier()
            for _ in transfers:
                for part in parts:
                    streams.to[0].send(part.view(torch.uint8).numpy().data)
            mesh.barrier()
            for work in [mesh.everybody.send([part], 0, k) for _ in transfers for k, part in enumerate(parts)]:
                mesh.wait_for_message(work)
    mesh.barrier()
    mesh.close()


def _receive_from(address: str, rounds: int) -> Mapping[str, Rates]:
    """Node 0, in whose process each way to receive has its turn in every round."""
    mesh = _mesh(address, 0)
    lengths, transfers = _transfers()
    used_before = torch.ones(CHUNK_BYTES // 4).view(torch.uint8).numpy().data
    seconds: dict[str, list[tuple[float, float]]] = {}
    with mesh.streams([], [1]) as streams:

        def receive_bytes() -> None:
            for _ in range(BYTES // CHUNK_BYTES):
                streams.of[1].receive(used_before)

        def receive_messages() -> None:
            parts = [[empty_in_huge_pages(ELEMENTS) for _ in range(3)] for _ in transfers]
            for work in [mesh.everybody.recv([part], 1, k) for some in parts for k, part in enumerate(some)]:
                mesh.wait_for_message(work)

        ways: dict[str, Callable[[], object]] = {
            "copy": lambda: move(mesh, lengths, transfers, lambda _: []),
            "stream": receive_bytes,
            "gloo": receive_messages,
        }
        for _ in range(rounds):
            for way, receive in ways.items():
                mesh.barrier()
                begin_s, cpu_begin_s = perf_counter(), process_time()
                received = receive()
                seconds.setdefault(way, []).append((perf_counter() - begin_s, process_time() - cpu_begin_s))
                del received  # beside the clock
    mesh.barrier()
    mesh.close()
    best = {way: [min(some) for some in zip(*taken, strict=True)] for way, taken in seconds.items()}
    return {way: Rates(of_time=BYTES / time_s / 1e9, of_core=BYTES / cpu_s / 1e9) for way, (time_s, cpu_s) in best.items()}
