"""A trainer rank that trains nothing, as a process: `python -m tests.chaos.rank ENDPOINT RANK NUM_RANKS`.

Each line on stdin and stdout is a JSON value. It is told {"job", "transport"}, or true: commit. It says {"fetched": step,
"sample_ids"} and waits to be told to commit, then {"committed": step}, and in the end {"ended": job} or {"error": what}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from headrace import trainer
from headrace.errors import HeadraceError
from headrace.observability.logs import configure_logging

Hear = Callable[[], Any]
"""() -> what it is told next; None: nothing any more."""
Say = Callable[..., None]


def main(endpoint: str, rank: int, num_ranks: int, hear: Hear, say: Say) -> None:
    """Jobs, one after the other, until there is nothing more to hear."""
    configure_logging("rank")
    torch.set_num_threads(1)
    while (request := hear()) is not None:
        if request is True:  # of a job that has failed here since
            continue
        try:
            _consume(endpoint, rank, num_ranks, hear, say, **request)
        except HeadraceError as err:
            say(job=request["job"], error=f"{type(err).__name__}: {err}")


def _consume(endpoint: str, rank: int, num_ranks: int, hear: Hear, say: Say, *, job: str, transport: str) -> None:
    options: dict[str, Any] = {"transports": (transport,), "prefetch_parts": 2}  # little lies ready: what breaks is felt
    with trainer.connect(endpoint, job=job, rank=rank, num_ranks=num_ranks, **options) as loader:
        for step in loader:
            ids = [i for microbatch in step for i in microbatch.data.sample_ids.tolist()]
            say(job=job, fetched=step.index, sample_ids=ids)
            if hear() is None:
                return
            loader.commit(step, loss=float(step.index))
            say(job=job, committed=step.index)
    say(job=job, ended=True)


def _hear() -> Any:
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), _hear, _say)
