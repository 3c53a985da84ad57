"""What gloo alone takes of an action: two processes that sleep, send and receive as a pipeline of an encoder and an LLM does.

They have the pipeline runtime's ends of channels, and as it does they call the backend directly and post each receive one action
ahead.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.cli.planning.emulated_ranks import HANG_FACTOR, START_S
from headrace.trainer.pipeline.channels import ChannelEnd, ChannelRanks, group_end
from headrace.trainer.pipeline.emulated_stage import WIDTH
from headrace.trainer.starting import GROUP_TIMEOUT

_END_S = 10.0  # time limit for a process that has answered, to end


def overheads_s(microbatches: int, rows: int, sleep_s: float, rounds: int) -> list[float]:
    """Return, for each action of both processes, the seconds in which it neither slept nor waited for the other process.

    Each process does the forward and backward of every microbatch, the encoder one forward ahead (1F1B), and sleeps `sleep_s`
    for each. Only the encoder's forwards and the LLM's backwards send, and only the others receive. rows: of every message.
    Raises RuntimeError if a process ends or takes far longer than it sleeps.
    """
    context = multiprocessing.get_context("spawn")
    deadline_s = time.monotonic() + START_S + HANG_FACTOR * rounds * 2 * microbatches * sleep_s
    ends, processes = [], []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        try:
            for rank in range(2):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (theirs, rank, Path(folder) / "store", microbatches, rows, sleep_s, rounds)
                processes.append(context.Process(target=_measure, args=arguments, daemon=True))
                processes[-1].start()
                theirs.close()
                ends.append(ours)
            return [seconds for end in ends for seconds in answer(end, deadline_s)]
        finally:
            for process, end in zip(processes, ends, strict=False):
                process.join(_END_S if end.closed else 0.0)
                process.kill()
                process.join(_END_S)


def answer(end: Connection, deadline_s: float) -> list[float]:
    """Return what a process has measured, and close this end of its pipe. Raises RuntimeError as `overheads_s`."""
    if not end.poll(max(0.0, deadline_s - time.monotonic())):
        raise RuntimeError("two processes over gloo alone have not ended in time: the machine may be too busy to measure on")
    try:
        found: list[float] = end.recv()
    except EOFError as err:
        raise RuntimeError("one of two processes over gloo alone ended early; above is why") from err
    end.close()
    return found


def _measure(end: Connection, rank: int, store: Path, microbatches: int, rows: int, sleep_s: float, rounds: int) -> None:
    os.dup2(2, 1)  # gloo prints messages of its own on standard output
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=GROUP_TIMEOUT)
    process = _Process(rank, rows)
    process.run(4, 0.0)  # connects both
    end.send([seconds for _ in range(rounds) for seconds in process.run(microbatches, sleep_s)])
    dist.destroy_process_group()


class _Process:
    """The encoder (rank 0) or the LLM (rank 1)."""

    def __init__(self, rank: int, rows: int) -> None:
        self._rank, self._rows = rank, rows
        ends = [group_end(ChannelRanks(sender, 1 - sender, sender), rank, torch.device("cpu")) for sender in range(2)]
        self._outgoing, self._incoming = (cast(ChannelEnd, ends[number]) for number in (rank, 1 - rank))  # it is at both

    def run(self, microbatches: int, sleep_s: float) -> list[float]:
        """Return the overheads of one step's actions."""
        does_send = [False, True] * microbatches if self._rank else [True, *[True, False] * (microbatches - 1), False]
        expected, sent, found = deque[tuple[dist.Work, Tensor]](), list[dist.Work](), list[float]()
        for number, sends in enumerate(does_send):
            began_s = time.monotonic()
            ahead = does_send[number + 1 : number + 2] if number else does_send[:2]
            expected.extend(self._expect() for other_sends in ahead if not other_sends)
            posted_s = time.monotonic()
            if not sends:
                expected.popleft()[0].wait()
            time.sleep(sleep_s)
            computed_s = time.monotonic()
            if sends:
                sent.append(self._send())
            found.append(posted_s - began_s + time.monotonic() - computed_s)
        for work in sent:
            work.wait()
        return found

    def _expect(self) -> tuple[dist.Work, Tensor]:
        tensor = torch.empty(self._rows, WIDTH)
        return self._incoming.backend.recv([tensor], self._incoming.peer, self._incoming.tag), tensor

    def _send(self) -> dist.Work:
        return self._outgoing.backend.send([torch.ones(self._rows, WIDTH)], self._outgoing.peer, self._outgoing.tag)
