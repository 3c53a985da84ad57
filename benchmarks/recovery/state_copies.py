"""How fast a node gets the state of layers that it lacks from another node: two processes on one machine, over gloo."""

from __future__ import annotations

import multiprocessing
from time import perf_counter, process_time

import torch

from benchmarks.report import Rival, Row, Section, at_least
from benchmarks.timing import progress, time_calls
from headrace.reorder_service.recovery.recovery_choice import Circumstances
from headrace.trainer.recovery.layer_transfer import Transfer, digest, move
from headrace.trainer.recovery.mesh import Meeting, Mesh

RATE_GOAL = 3.0  # GB/s of a core
PARAMETERS = 4  # of which each has a weight and two moments
ELEMENTS = 16 << 20  # of each: a matrix of 4,096 x 4,096
BYTES = PARAMETERS * 3 * ELEMENTS * 4
ROUNDS = 4


def section(*, quick: bool) -> Section:
    """Digests alone, and whole copies beside the same messages without digests."""
    progress("copies of state")
    torch.set_num_threads(1)
    part = torch.ones(ELEMENTS)
    digests = time_calls(lambda: digest([part]), budget_s=0.5 if quick else 2.0)
    digest_rate = 4 * ELEMENTS / digests.best_s / 1e9
    meeting = Meeting("127.0.0.1")
    other = multiprocessing.get_context("spawn").Process(target=_send_to, args=(meeting.address,))
    other.start()
    whole_s, cpu_s, bare_s = _receive_from(meeting.address)
    other.join()
    bare = Rival(value=BYTES / bare_s / 1e9, source="the same messages without digests")
    rows = [
        Row(
            name="digest and check",
            value=digest_rate / 2,
            unit="GB/s",
            goal=at_least(RATE_GOAL),
            detail="one core, one after the other",
        ),
        Row(
            name="from a process to another",
            value=BYTES / whole_s / 1e9,
            unit="GB/s",
            rival=bare,
            detail=f"{BYTES >> 20} MiB; {BYTES / cpu_s / 1e9:.2f} GB/s of the receiver's core",
        ),
        Row(
            name="what forecasts and choices of pipelines take it for",
            value=Circumstances().copy_bytes_per_s / 1e9,
            unit="GB/s",
            rival=Rival(value=BYTES / whole_s / 1e9, source="this measurement"),
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


def _send_to(address: str) -> None:
    """Node 1, which holds all."""
    mesh = _mesh(address, 1)
    lengths, transfers = _transfers()
    parts = [torch.full((ELEMENTS,), float(number)) for number in range(3)]
    for _ in range(ROUNDS):
        mesh.barrier()
        move(mesh, lengths, transfers, lambda _: parts)
        mesh.barrier()
        for work in [mesh.everybody.send([part], 0, k) for _ in transfers for k, part in enumerate(parts)]:
            mesh.wait_for_message(work)
    mesh.barrier()
    mesh.close()


def _receive_from(address: str) -> tuple[float, float, float]:
    """Return the least seconds of a copy, of its process, and of its messages alone."""
    mesh = _mesh(address, 0)
    lengths, transfers = _transfers()
    whole_s, cpu_s, bare_s = [], [], []
    for _ in range(ROUNDS):
        mesh.barrier()
        begin, cpu_begin = perf_counter(), process_time()
        received = move(mesh, lengths, transfers, lambda _: [])
        whole_s.append(perf_counter() - begin)
        cpu_s.append(process_time() - cpu_begin)
        del received
        mesh.barrier()
        begin = perf_counter()
        parts = [[torch.empty(ELEMENTS) for _ in range(3)] for _ in transfers]
        for work in [mesh.everybody.recv([part], 1, k) for some in parts for k, part in enumerate(some)]:
            mesh.wait_for_message(work)
        bare_s.append(perf_counter() - begin)
        del parts
    mesh.barrier()
    mesh.close()
    return min(whole_s), min(cpu_s), min(bare_s)
