"""The processes of light clients, and the job that they take part in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

from benchmarks.scale.workload import MICROBATCHES, RANK_SAMPLES, WINDOW
from headrace.child_process import with_parent_death_signal
from headrace.spec import JobSpec, parse_spec


class Client:
    """A process of light clients. It leaves a core of this machine to the service: real ones run on other machines."""

    def __init__(self, module: str, *arguments: object) -> None:
        command = with_parent_death_signal([sys.executable, "-m", module, *map(str, arguments)], signal.SIGKILL)
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if others := sorted(os.sched_getaffinity(0))[1:]:
            os.sched_setaffinity(self._popen.pid, others)

    def wait_open(self) -> None:
        assert self._popen.stdout is not None
        if (line := self._popen.stdout.readline().strip()) != "open":
            raise RuntimeError(f"light ranks said {line!r} instead of 'open'")

    def result(self, text: str = "", *, end: bool = False) -> Any:
        """Wait for its end, and return the JSON that it has printed. `text`: for its standard input. `end`: whether to end it."""
        if end:
            self._popen.terminate()
        printed = self._popen.communicate(text)[0]
        if not printed:
            raise RuntimeError(f"light clients ended with {self._popen.returncode}")
        return json.loads(printed)

    def begin(self, at_s: float) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{at_s}\n")
        self._popen.stdin.flush()


def job_spec(ranks: int, steps: int) -> JobSpec:
    """Return the spec of a job with a replica a rank."""
    document = {
        "name": "scale",
        "sources": [{"path": "memory://shards"}],
        "global_batch": ranks * RANK_SAMPLES,
        "window": WINDOW,
        "window_bytes": 1 << 40,  # nothing is decoded
        "topology": {"replicas": ranks, "microbatches": MICROBATCHES},
        "steps": steps,
    }
    return parse_spec(document)
