"""A small cluster of real processes, and a consumer that trains nothing: what the services promise, without a model."""

from __future__ import annotations

import functools
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace import processes, rpc, trainer
from headrace.cli.example import example_data
from headrace.jobs_client import JobsClient
from headrace.ledger import LedgerEntry, ledger_sha256
from headrace.processes import Process, ProcessGroup
from headrace.spec import JobSpec, parse_spec
from tests.chaos_trainer.cluster import NURSERY
from tests.nursery.forked_commands import HOOK, ForkedCommands
from tests.redis_server import RedisServer
from tests.wire import free_ports


@dataclass
class Cluster:
    """One reorder service and some preprocessors, each a process."""

    group: ProcessGroup
    folder: Path
    endpoint: str = ""
    reorder: Process | None = None
    """The one that was started last."""
    preprocessors: list[Process] = field(default_factory=list)

    def start_reorder(self, *options: str, listen: str = "", store: str = "") -> None:
        """`listen`: none: where nobody else will, so that it can be started there again."""
        arguments = [
            "reorder",
            "--listen",
            listen or f"127.0.0.1:{free_ports(1)[0]}",
            "--store",
            store or f"embedded:{self.folder / 'store'}",
            *options,
        ]
        self.reorder = self.group.add(Process("reorder", arguments, self.folder / "reorder.log"))
        self.endpoint = self.reorder.endpoint()

    def start_reorders(self, store: str, count: int = 2) -> list[Process]:
        """Several on one store; `endpoint` names them all. The first one leads."""
        services, endpoints = [], []
        for number, port in enumerate(free_ports(count)):
            arguments = ["reorder", "--listen", f"127.0.0.1:{port}", "--store", store]
            services.append(self.group.add(Process("reorder", arguments, self.folder / f"reorder-{number}.log")))
            endpoints.append(services[-1].endpoint())
            if number == 0:
                rpc.await_reorder_service(endpoints[0])
        self.endpoint = ",".join(endpoints)
        return services

    def add_preprocessors(self, count: int, *options: str, listen: str = "127.0.0.1:0", budget_mib: int = 64) -> None:
        for _ in range(count):
            log = self.folder / f"preprocessor-{len(self.preprocessors)}.log"
            arguments = ["preprocessor", "--reorder", self.endpoint, "--listen", listen, "--threads", "1"]
            process = Process("preprocessor", [*arguments, "--budget-mib", str(budget_mib), *options], log)
            self.preprocessors.append(self.group.add(process))

    def client(self) -> JobsClient:
        return JobsClient(self.endpoint)

    def submit(self, spec: JobSpec) -> str:
        with self.client() as client:
            return client.submit(spec)

    def consume(self, job: str, on_step: Callable[[trainer.Step], None] | None = None, **options: Any) -> list[int]:
        """Consume and commit every step of this rank; the step numbers."""
        steps = []
        with trainer.connect(self.endpoint, job=job, **options) as loader:
            for step in loader:
                for _ in step:
                    pass
                if on_step is not None:
                    on_step(step)
                loader.commit(step, loss=float(step.index))
                steps.append(step.index)
        return steps

    @contextmanager
    def consumed(self, job: str, steps: int = 3) -> Iterator[None]:
        """A context in which a thread consumes the job, from when so many steps are committed on. The job must be longer."""
        ended = threading.Event()

        def stop_at_the_end(_: trainer.Step) -> None:
            if ended.is_set():
                raise InterruptedError

        def consume() -> None:
            with pytest.raises(InterruptedError):
                self.consume(job, stop_at_the_end)

        consumer = threading.Thread(target=consume)
        consumer.start()
        try:
            with self.client() as client:
                while client.show(job).committed_steps < steps:
                    ended.wait(0.05)  # polls a real service
            yield
        finally:
            ended.set()
            consumer.join()

    def ledger(self, job: str) -> list[LedgerEntry]:
        with self.client() as client:
            return list(client.ledger(job))

    def wait_for_state(self, job: str, state: str, timeout_s: float = 100.0) -> Any:
        from headrace.jobs_client import state_name

        deadline = time.monotonic() + timeout_s
        with self.client() as client:
            while state_name(status := client.show(job)) != state:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"job {job} is {state_name(status)}, not {state}: {status.message}")
                time.sleep(0.05)  # polls a real service
        return status

    def wait_for_preprocessors(self, timeout_s: float = 100.0) -> None:
        """Until all that were added have joined, as the status of a job of one step shows."""
        deadline = time.monotonic() + timeout_s
        with self.client() as client:
            job = client.submit(make_spec("first", steps=1))
            while (num_joined := len(client.show(job).preprocessors)) < len(self.preprocessors):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{num_joined} of {len(self.preprocessors)} preprocessors have joined")
                time.sleep(0.05)  # polls a real service


@pytest.fixture(scope="session", autouse=True)
def forked_commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCommands]:
    """Services and trainers are forks of a process that has imported what they import, which takes them seconds each. Those with
    variables of the environment that are read at an import are started as ever, as are all of a test that sets a PYTHONPATH."""
    forked = ForkedCommands(tmp_path_factory.mktemp("nursery"), NURSERY)
    start_command = processes.start_command
    read_late = processes.torchrun_environments(1, 1)[0].keys()
    path = os.environ.get("PYTHONPATH")

    def fork(arguments: Sequence[str], log: Path, environment: Mapping[str, str], prefix: Sequence[str]) -> Any:
        is_late = HOOK in environment or all(name in read_late or name.startswith("HEADRACE_") for name in environment)
        if prefix or not is_late or os.environ.get("PYTHONPATH") != path:
            return start_command(arguments, log, environment, prefix)
        return forked.start(arguments, log, environment)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start_command", fork)
        yield forked
    forked.close()


@pytest.fixture
def headrace(forked_commands: ForkedCommands) -> Callable[..., subprocess.CompletedProcess[str]]:
    """(*arguments, timeout_s) -> what becomes of a user's `headrace` command, and what it says: a fork too."""
    return forked_commands.run


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    server = RedisServer(folder)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ProcessGroup() as group:
        yield Cluster(group=group, folder=tmp_path)


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with two preprocessors that no test disturbs: each brings jobs with names of their own."""
    with ProcessGroup() as group:
        cluster = Cluster(group=group, folder=tmp_path_factory.mktemp("calm"))
        cluster.start_reorder()
        cluster.add_preprocessors(2, "--ucx")
        yield cluster


@pytest.fixture(scope="session")
def undisturbed(calm: Cluster) -> Callable[[int], str]:
    """(steps) -> the ledger's hash of a job of that length with which nothing went wrong."""

    @functools.cache
    def ledger_hash(steps: int) -> str:
        job = calm.submit(make_spec(f"undisturbed-{steps}", steps=steps))
        calm.consume(job)
        return ledger_sha256(calm.ledger(job))

    return ledger_hash


def make_spec(name: str, **fields: Any) -> JobSpec:
    """The bundled example, small batches, cheap images."""
    document: dict[str, Any] = {
        "name": name,
        "sources": [{"path": str(example_data())}],
        "global_batch": 16,
        "topology": {"replicas": 2, "microbatches": 2},
        "image": {"max_pixels": 112 * 112},
    }
    return parse_spec(document | fields)


@pytest.fixture
def spec() -> Callable[..., JobSpec]:
    return make_spec
