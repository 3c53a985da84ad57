"""A job goes on while the processes of an older release are replaced by those of this one, one after the other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace import rpc, trainer
from headrace.ledger import ledger_sha256
from tests.integration.conftest import Cluster
from tests.redis_server import RedisServer
from tests.wire import free_ports

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
STEPS = 8
ENDING_S = 10.0
PATIENCE_S = 240.0  # an older release compiles its planner first

COMMAND = """
import sys
from {commands}.main import main
import headrace.rpc
print(headrace.rpc.__file__, sys.modules["{commands}.main"].__file__, file=sys.stderr, flush=True)
sys.exit(main())
"""
TRAINER = """
import json, sys
import headrace.rpc, {trainer} as trainer
print(headrace.rpc.__file__, trainer.__file__, file=sys.stderr, flush=True)
with trainer.connect(sys.argv[1], job=sys.argv[2]) as loader:
    for step in loader:
        for microbatch in step:
            pass
        print(json.dumps({{"fetched": step.index, "state": loader.state_dict()}}), flush=True)
        sys.stdin.readline()
        loader.commit(step, loss=float(step.index))
"""


@dataclass(frozen=True, kw_only=True)
class Release:
    """An older release, as it is in the history of the repository."""

    commit: str
    source_roots: tuple[str, ...]
    commands: str
    """Package of its commands."""
    trainer: str
    """Module with `connect`."""
    may_overlap: bool
    """Whether its reorder service goes on while one of this release stands by with the same store."""


PORTIONS = ("proto", "preprocessor", "reorder_service", "trainer", "cli")
RELEASES = {
    "0.1": Release(commit="84a2ab9", source_roots=(".", "proto"), commands="cli", trainer="trainer", may_overlap=False),
    "0.2.dev2": Release(
        commit="11c7968", source_roots=PORTIONS, commands="headrace.cli", trainer="headrace.trainer", may_overlap=True
    ),
}


class OldRelease:
    """Processes of an older release, which run its sources with this interpreter."""

    def __init__(self, release: Release, sources: Path, stack: ExitStack) -> None:
        self.release = release
        self._sources, self._stack = sources, stack
        self._path = os.pathsep.join(str(sources / root) for root in release.source_roots)

    def start(self, code: str, *arguments: str, log: Path) -> subprocess.Popen[str]:
        """Run a script, which is killed at the end of the test, and whose errors go to `log`."""
        script = code.format(commands=self.release.commands, trainer=self.release.trainer)
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", script, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYTHONPATH": self._path},
            )
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process

    def ran(self, log: Path) -> bool:
        """Whether the modules that a process said it has are of the older release."""
        return all(Path(file).is_relative_to(self._sources) for file in log.read_text().splitlines()[0].split())


@pytest.fixture(params=RELEASES)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OldRelease]:
    release = RELEASES[request.param]
    find = ["git", "cat-file", "-e", release.commit]
    if shutil.which("git") is None or subprocess.run(find, cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("the history of the repository is not here, as in a source archive")
    sources = tmp_path / "sources"
    sources.mkdir()
    archive = subprocess.run(["git", "archive", release.commit, *PORTIONS], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(sources)], input=archive, check=True)
    with ExitStack() as stack:
        yield OldRelease(release, sources, stack)


class OldTrainer:
    """The only rank of a job."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.state: dict[str, Any] = {}
        """Its latest state, before the commit of the step that it has."""

    def fetch(self) -> int:
        """The index of the next step, whose data it has."""
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        self.state = said["state"]
        return int(said["fetched"])

    def commit(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def end(process: subprocess.Popen[str]) -> None:
    """Have a process end in order, and kill it where it does not, as whoever runs a cluster does."""
    process.terminate()
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def test_a_job_goes_on_while_services_preprocessors_and_trainers_are_replaced(
    old: OldRelease, cluster: Cluster, store: RedisServer, undisturbed: Callable[[int], str], spec: Any, tmp_path: Path
) -> None:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    cluster.endpoint = ",".join(addresses)
    logs = {name: tmp_path / f"old-{name}.log" for name in ("reorder", "submit", "preprocessor", "trainer")}

    leader = old.start(COMMAND, "reorder", "--listen", addresses[0], "--store", store.url, log=logs["reorder"])
    assert leader.stdout is not None
    assert "listening on" in leader.stdout.readline()
    rpc.await_reorder_service(addresses[0])
    said = {"global_batch": 16, "topology": {"replicas": 2, "microbatches": 2}, "image": {"max_pixels": 112 * 112}}
    document = {"name": "rolling", "sources": [{"path": spec("any").sources[0].path}], "steps": STEPS, **said}
    (tmp_path / "job.yaml").write_text(json.dumps(document))
    submit = old.start(COMMAND, "job", "submit", str(tmp_path / "job.yaml"), "--endpoint", addresses[0], log=logs["submit"])
    assert submit.wait(PATIENCE_S) == 0, logs["submit"].read_text()
    serving = ("--reorder", cluster.endpoint, "--listen", "127.0.0.1:0", "--threads", "1", "--budget-mib", "64")
    preprocessor = old.start(COMMAND, "preprocessor", *serving, log=logs["preprocessor"])
    rank = OldTrainer(old.start(TRAINER, cluster.endpoint, "rolling", log=logs["trainer"]))
    steps = []

    def go_on(count: int) -> None:
        for _ in range(count):
            steps.append(rank.fetch())
            rank.commit()

    go_on(2)

    if not old.release.may_overlap:
        end(leader)
    cluster.endpoint, endpoint = addresses[1], cluster.endpoint
    cluster.start_reorder(addresses[1], store.url)
    cluster.endpoint = endpoint
    if old.release.may_overlap:
        go_on(1)
        end(leader)
    go_on(4 - len(steps))
    assert len(cluster.ledger("rolling")) >= 3, "all but perhaps the last, whose commit is on its way"

    cluster.add_preprocessors(1)
    end(preprocessor)
    go_on(2)
    assert rank.fetch() == 6
    end(rank.process)
    assert steps == list(range(6))

    with trainer.connect(cluster.endpoint, job="rolling") as loader:
        loader.load_state_dict(rank.state)
        for step in loader:
            list(step)
            loader.commit(step)
            steps.append(step.index)
    assert steps == list(range(STEPS))
    assert ledger_sha256(cluster.ledger("rolling")) == undisturbed(STEPS)
    assert all(old.ran(log) for log in logs.values())
