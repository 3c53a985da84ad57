"""What gloo alone takes of an action: two processes that sleep, send and receive as a pipeline of an encoder and an LLM does."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from headrace.trainer.pipeline.emulated_stage import WIDTH

ROWS = 8
"""Of a message: as many as a mean microbatch of the emulated pipelines has samples."""


def overheads_s(microbatches: int, sleep_s: float, rounds: int) -> list[float]:
    """Return, for each action of both processes, the seconds in which it neither slept nor waited for the other process.

    Each process does the forward and backward of every microbatch, the encoder one forward ahead (1F1B), and sleeps `sleep_s`
    for each. Only the encoder's forwards and the LLM's backwards send, and only the others receive.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        ends, processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, Path(folder) / "store", microbatches, sleep_s, rounds)
            processes.append(context.Process(target=_measure, args=arguments))
            processes[-1].start()
            theirs.close()
            ends.append(ours)
        found = [seconds for end in ends for seconds in end.recv()]
        for process in processes:
            process.join()
    return found


def _measure(end: Connection, rank: int, store: Path, microbatches: int, sleep_s: float, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(str(store), 2), rank=rank, world_size=2)
    process = _Process(rank)
    process.run(4, 0.0)  # connects both
    end.send([seconds for _ in range(rounds) for seconds in process.run(microbatches, sleep_s)])
    dist.destroy_process_group()


class _Process:
    """The encoder (rank 0) or the LLM (rank 1)."""

    def __init__(self, rank: int) -> None:
        self._peer = 1 - rank
        groups = [dist.new_group([0, 1]) for _ in range(2)]  # one for each direction, as a pipeline has
        self._outgoing, self._incoming = groups[rank], groups[1 - rank]
        self._sent: list[dist.Work] = []

    def run(self, microbatches: int, sleep_s: float) -> list[float]:
        """The overheads of one step's actions."""
        forward, backward = (self._sending, self._receiving) if self._peer else (self._receiving, self._sending)
        ahead = [forward(sleep_s)] if self._peer else []
        found = [
            act(sleep_s)
            for number in range(microbatches)
            for act in ((forward, backward) if number < microbatches - self._peer else (backward,))
        ]
        for work in self._sent:
            work.wait()
        self._sent.clear()
        return ahead + found

    def _sending(self, sleep_s: float) -> float:
        began_s = time.monotonic()
        time.sleep(sleep_s)
        slept_s = time.monotonic() - began_s
        work = dist.isend(torch.ones(ROWS, WIDTH), self._peer, group=self._outgoing)
        assert work is not None, "this process is in the group"
        self._sent.append(work)
        return time.monotonic() - began_s - slept_s

    def _receiving(self, sleep_s: float) -> float:
        began_s = time.monotonic()
        work = dist.irecv(torch.empty(ROWS, WIDTH), self._peer, group=self._incoming)
        assert work is not None, "this process is in the group"
        posted_s = time.monotonic() - began_s
        work.wait()
        time.sleep(sleep_s)
        return posted_s
