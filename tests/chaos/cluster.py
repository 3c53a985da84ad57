"""A standing cluster, a wire between any two of its parts, and the faults that strike them."""

from __future__ import annotations

import queue
import signal
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

from headrace import rpc
from headrace.cli.example import example_data
from headrace.errors import HeadraceError
from headrace.jobs_client import JobsClient
from headrace.reorder_service.store.embedded_redis import server_binary
from headrace.spec import JobSpec, parse_spec
from headrace.v1 import jobs_pb2
from tests.chaos.faults import Fault, Kind
from tests.chaos.processes import RankProcess, Standing
from tests.chaos.standing_cluster import COUNT, START_TIMEOUT_S, WHOLE_TIMEOUT_S, StandingCluster
from tests.wire import NEAR, Wire, free_ports

BUDGET_MIB = 64


def job_spec(name: str, steps: int) -> JobSpec:
    """The bundled example in small steps of eight parts, two of which share a lease, with cheap images."""
    return parse_spec(
        {
            "name": name,
            "sources": [{"path": str(example_data()), "name": "data"}],
            "steps": steps,
            "global_batch": 16,
            "part_samples": 4,
            "topology": {"replicas": COUNT, "microbatches": 4},
            "image": {"max_pixels": 112 * 112},
        }
    )


_WAYS: dict[Kind, tuple[Callable[[Any], None], Callable[[Any], None]]] = {
    Kind.KILL: (methodcaller("kill"), methodcaller("start")),
    Kind.HANG: (methodcaller("signal", signal.SIGSTOP), methodcaller("signal", signal.SIGCONT)),
    Kind.CUT: (methodcaller("cut"), methodcaller("mend")),
    Kind.SILENCE: (methodcaller("silence"), methodcaller("mend")),
}
"""How a fault begins and ends, for each process or wire that it strikes."""


class Cluster(StandingCluster):
    """One Redis, and two of everything else."""

    def __init__(self, keep: Path | None = None) -> None:
        super().__init__(keep)
        self.heard: queue.Queue[tuple[int, Any]] = queue.Queue()
        """What ranks say: (number, message)."""
        self._wires: dict[tuple[str, int, int], list[Wire]] = {}
        """(link without its leader, number, reorder service): those between them; of payload, one service stands for all."""
        self.redis: Standing
        self.ranks: list[RankProcess] = []

    # -- life cycle ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        ports = iter(free_ports(1 + COUNT + 2 * COUNT))
        redis = f"127.0.0.1:{next(ports)}"
        (self.folder / "redis").mkdir(exist_ok=True)
        settings = ["--port", redis.partition(":")[2], "--dir", str(self.folder / "redis"), "--save", ""]
        settings += ["--appendonly", "yes", "--appendfsync", "always"]
        self.redis = self._standing("redis", [server_binary(), *settings], ready="Ready to accept")
        self.await_(self.redis.is_ready, START_TIMEOUT_S, "Redis has to start")
        self._endpoints = [f"127.0.0.1:{next(ports)}" for _ in range(COUNT)]
        self.endpoint = ",".join(self._endpoints)
        for number, endpoint in enumerate(self._endpoints):
            store = f"redis://{self._wire('redis', 0, number, redis)}/0"
            self.reorders.append(self._headrace(f"reorder-{number}", "reorder", "--listen", endpoint, "--store", store))
            self.await_(self.is_led, START_TIMEOUT_S, "a reorder service has to lead")
        for number in range(COUNT):
            grpc_port, flight_port = next(ports), next(ports)
            for port in (grpc_port, flight_port):
                self._wire("payload", number, 0, f"127.0.0.1:{port}", (NEAR, port))
            near = ["--reorder", self._wired("preprocessor", number), "--advertise", f"{NEAR}:{grpc_port}"]
            here = ["--listen", f"127.0.0.1:{grpc_port}", "--flight-port", str(flight_port)]
            size = ["--threads", "1", "--budget-mib", str(BUDGET_MIB)]
            self.preprocessors.append(self._headrace(f"preprocessor-{number}", "preprocessor", *near, *here, *size))
        for number in range(COUNT):
            log = self.folder / f"rank-{number}.log"
            self.ranks.append(RankProcess(number, COUNT, self._wired("rank", number), log, self.heard))
            self.processes.append(self.ranks[-1])

    def _wired(self, link: str, number: int) -> str:
        """The reorder services, each behind a wire."""
        return ",".join(self._wire(link, number, n, endpoint) for n, endpoint in enumerate(self._endpoints))

    def _wire(self, link: str, number: int, reorder: int, far: str, listen: tuple[str, int] = ("127.0.0.1", 0)) -> str:
        wire = Wire(far, listen=listen)
        self._wires.setdefault((link, number, reorder), []).append(wire)
        return f"127.0.0.1:{wire.port}"

    def _end(self) -> None:
        super()._end()
        for wires in self._wires.values():
            for wire in wires:
                wire.stop()

    # -- faults -------------------------------------------------------------------------------------------------------

    def strike(self, fault: Fault) -> Callable[[], None]:
        """Let it happen. What ends it."""
        begin, end = _WAYS[fault.kind]
        things = self._victims(fault) if fault.kind in (Kind.KILL, Kind.HANG) else self._between(fault)
        for thing in things:
            begin(thing)

        def ended() -> None:
            for thing in things:
                end(thing)

        return ended

    def heal(self) -> None:
        """End whatever is wrong."""
        for wires in self._wires.values():
            for wire in wires:
                wire.mend()
        for process in self.processes:
            process.signal(signal.SIGCONT)
            process.start()

    def _victims(self, fault: Fault) -> list[Standing]:
        match fault.target:
            case "preprocessor":
                return [self.preprocessors[fault.number]]
            case "preprocessors":
                return self.preprocessors
            case "leader":
                return [self.reorders[self._leader()]]
            case "reorders":
                return self.reorders
            case "rank":
                return [self.ranks[fault.number]]
        return [self.redis]

    def _between(self, fault: Fault) -> list[Wire]:
        if fault.target == "rank-preprocessor":
            return self._wires["payload", fault.number, 0]
        if fault.target == "leader-redis":
            return self._wires["redis", 0, self._leader()]
        return self._wires[fault.target.partition("-")[0], fault.number, self._leader()]

    def _leader(self) -> int:
        """The first one where none leads at present."""
        leads = [rpc.is_serving(endpoint, "headrace.v1.Jobs", timeout_s=0.3) for endpoint in self._endpoints]
        return leads.index(True) if True in leads else 0

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def await_whole(self, job: str) -> None:
        """Until all processes run and work together again, and `job` has ended. Raises TimeoutError."""

        def is_whole() -> bool:
            for process in self.processes:
                process.look_after()
            if not all(process.is_ready() for process in self.processes):
                return False
            try:
                with JobsClient(self.endpoint) as client:
                    status = client.show(job)
            except HeadraceError:
                return False
            return len(status.preprocessors) == COUNT and status.state not in (
                jobs_pb2.JOB_STATE_INDEXING,
                jobs_pb2.JOB_STATE_RUNNING,
            )

        self.await_(is_whole, WHOLE_TIMEOUT_S, f"all have to work together again after {job}")
