"""A trainer rank that trains nothing, as a process: `python -m tests.chaos.rank ENDPOINT RANK NUM_RANKS`.

Each line on stdin and stdout is a JSON value. It is told {"job", "transport"}, or true: commit. It says {"fetched": step,
"sample_ids"} and waits to be told to commit, then {"committed": step}, and in the end {"ended": job} or {"error": what}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from headrace import trainer
from headrace.errors import HeadraceError
from headrace.observability.logs import configure_logging


def main(endpoint: str, rank: int, num_ranks: int) -> None:
    """Jobs, one after the other, until stdin ends."""
    configure_logging("rank")
    torch.set_num_threads(1)
    while order := sys.stdin.readline():
        request = json.loads(order)
        if request is True:  # of a job that has failed here since
            continue
        try:
            _consume(endpoint, rank, num_ranks, **request)
        except HeadraceError as err:
            _say(job=request["job"], error=f"{type(err).__name__}: {err}")


def _consume(endpoint: str, rank: int, num_ranks: int, job: str, transport: str) -> None:
    options: dict[str, Any] = {"transports": (transport,), "prefetch_parts": 2}  # little lies ready: what breaks is felt
    with trainer.connect(endpoint, job=job, rank=rank, num_ranks=num_ranks, **options) as loader:
        for step in loader:
            ids = [i for microbatch in step for i in microbatch.data.sample_ids.tolist()]
            _say(job=job, fetched=step.index, sample_ids=ids)
            if not sys.stdin.readline():
                return
            loader.commit(step, loss=float(step.index))
            _say(job=job, committed=step.index)
    _say(job=job, ended=True)


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
