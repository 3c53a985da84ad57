"""The ranks of a host share one stream to the reorder service, which one of them holds, whatever becomes of that one."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace import trainer
from headrace.cli.main import EXIT_USER_ERROR
from headrace.errors import NotFoundError, UserError
from headrace.trainer.loading.relay import is_relayed, num_callers
from tests.chaos.rank import main as be_rank

pytestmark = pytest.mark.integration

RELAYING = "relaying for the ranks of this host"
NUM_RANKS = 3


def run_rank(pipe: Connection, endpoint: str, rank: int, log: str, environment: dict[str, str]) -> None:
    """In a fork of a process that has imported torch: that rank, which hears and speaks by the pipe."""
    os.environ.update(environment)
    tempfile.tempdir = None  # as was found in another environment
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)

    def say(**message: Any) -> None:
        pipe.send(message)

    be_rank(endpoint, rank, NUM_RANKS, pipe.recv, say)


class Rank:
    """A process of tests.chaos.rank. It has the environment of this process."""

    def __init__(self, endpoint: str, job: str, rank: int, log: Path) -> None:
        self.rank, self.log = rank, log
        log.touch()
        context = multiprocessing.get_context("forkserver")
        self._pipe, its = context.Pipe()
        arguments = (its, endpoint, rank, str(log), dict(os.environ))
        self._process = context.Process(target=run_rank, args=arguments, daemon=True)
        self._process.start()
        its.close()
        self._pipe.send({"job": job, "transport": "flight"})

    def hear(self) -> dict[str, Any]:
        said: dict[str, Any] = self._pipe.recv()
        assert "error" not in said, said
        return said

    def commit(self) -> None:
        self._pipe.send(True)

    @property
    def is_relay(self) -> bool:
        return RELAYING in self.log.read_text()

    def send(self, sent: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, sent)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of a host of its own, whose ranks share a relay: its path is short, as a socket's must be."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("HEADRACE_RELAY", "1")
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", None)
        yield Path(folder)


@pytest.fixture
def forking() -> None:
    """What forks is there before a test changes the environment and the temporary folder, which later tests do not have."""
    forkserver.ensure_running()


@pytest.fixture
def start(forking: None, temporary: Path, tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    """Starts a rank of that host."""
    ranks: list[Rank] = []

    def start_rank(endpoint: str, job: str, rank: int) -> Rank:
        ranks.append(Rank(endpoint, job, rank, tmp_path / f"{job}-{rank}-{len(ranks)}.log"))
        return ranks[-1]

    yield start_rank
    for rank in ranks:
        rank.end()


def test_the_ranks_of_a_host_share_one_relay_and_another_takes_its_place_when_it_is_killed(
    cluster: Any, spec: Any, start: Callable[..., Rank]
) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(1)
    job = cluster.submit(spec("relayed", steps=6, topology={"replicas": NUM_RANKS, "microbatches": 1}))
    ranks = [start(cluster.endpoint, job, rank) for rank in range(NUM_RANKS)]
    seen: dict[int, list[int]] = {}
    for step in range(3):
        for rank in ranks:
            said = rank.hear()
            assert said["fetched"] == step
            seen.setdefault(step, []).extend(said["sample_ids"])
            rank.commit()
        for rank in ranks:
            assert rank.hear()["committed"] == step
    (relay,) = [rank for rank in ranks if rank.is_relay]
    relay.send(signal.SIGKILL)
    ranks[relay.rank] = start(cluster.endpoint, job, relay.rank)
    for rank in ranks:
        assert rank.hear()["fetched"] == 3
        rank.commit()
    for step in (3, 4, 5):
        for rank in ranks:
            assert rank.hear()["committed"] == step
        if step < 5:
            for rank in ranks:
                assert rank.hear()["fetched"] == step + 1
                rank.commit()
    assert all(rank.hear().get("ended") for rank in ranks)
    assert [entry.step for entry in cluster.ledger(job)] == list(range(6))
    assert sum(rank.is_relay for rank in ranks) == 1


@pytest.mark.slow
def test_ranks_go_without_a_relay_that_hangs(cluster: Any, spec: Any, start: Callable[..., Rank]) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(1)
    topology = {"replicas": NUM_RANKS, "microbatches": 1}
    other, job = cluster.submit(spec("other", steps=2, topology=topology)), cluster.submit(spec("job", steps=1))
    relay = start(cluster.endpoint, other, 0)
    assert relay.hear()["fetched"] == 0
    assert relay.is_relay
    relay.send(signal.SIGSTOP)
    with trainer.connect(cluster.endpoint, job=job) as loader:
        for step in loader:
            list(step)
            loader.commit(step)
    assert len(cluster.ledger(job)) == 1
    relay.send(signal.SIGCONT)


@pytest.mark.slow
def test_what_the_service_refuses_is_refused_in_the_same_words(calm: Any, spec: Any, start: Callable[..., Rank]) -> None:
    job = calm.submit(spec("refused", steps=2))
    with pytest.raises(UserError, match=r"2 replica\(s\) for 3 ranks"):
        trainer.connect(calm.endpoint, job=job, rank=2, num_ranks=3).open()
    with pytest.raises(NotFoundError, match="no job 'nobody'"):
        trainer.connect(calm.endpoint, job="nobody").open()


RELAYING_PROCESS = """
import sys
from headrace.trainer.loading.relay import RelayPlace, _SERVING
for endpoint in sys.argv[1:]:
    assert RelayPlace(endpoint, "").is_answering()
print(len(_SERVING), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def relaying(*endpoints: str) -> Iterator[int]:
    """A process that asks for the host's relay of each endpoint; yields of how many it is the relay. It is killed at the end."""
    command = [sys.executable, "-c", RELAYING_PROCESS, *endpoints]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.slow
def test_of_relays_that_are_over_no_file_is_left_when_another_one_begins(temporary: Path) -> None:
    def sockets() -> set[str]:
        return {path.name for path in (temporary / f"headrace-{os.getuid()}").iterdir()} - {"locks"}

    with relaying("host:1", "host:2") as count:
        assert count == 2
        killed = sockets()
        assert len(killed) == 2
        with relaying("host:3") as count:
            assert count == 1
            (third,) = sockets() - killed
            assert killed < sockets(), "they are served"
            with relaying("host:1", "host:3") as count:
                assert count == 0, "both have a relay"
    with relaying("host:1") as count:
        assert count == 1
        assert third not in sockets()
        assert len(sockets()) == 1


@pytest.mark.parametrize("make", [lambda path: path.mkdir(mode=0o755), Path.touch, lambda path: path.symlink_to("/tmp")])
def test_what_is_no_folder_that_only_this_user_can_use_is_not_used(temporary: Path, make: Callable[[Path], None]) -> None:
    make(temporary / f"headrace-{os.getuid()}")
    with pytest.raises(UserError, match="not a folder that only this user can use: remove it, or set HEADRACE_RELAY=0"):
        trainer.connect("127.0.0.1:1", job="job")


@pytest.mark.parametrize(
    ("asked", "local", "relayed"), [("", "8", True), ("", "1", False), ("", "", False), ("1", "", True), ("0", "8", False)]
)
def test_ranks_share_a_relay_where_a_launcher_has_started_several_or_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: str, local: str, relayed: bool
) -> None:
    monkeypatch.setenv("HEADRACE_RELAY", asked)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert is_relayed() == relayed


@pytest.mark.parametrize(("asked", "local", "callers"), [("", "8", 13), ("0", "8", 100), ("1", "", 100), ("", "", 100)])
def test_ranks_spread_their_tries_over_a_time_for_the_streams_that_they_have_together(
    monkeypatch: pytest.MonkeyPatch, asked: str, local: str, callers: int
) -> None:
    monkeypatch.setenv("HEADRACE_RELAY", asked)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert num_callers(100) == callers


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_RELAY", "yes")
    with pytest.raises(UserError, match="HEADRACE_RELAY is 'yes'"):
        is_relayed()


@pytest.mark.slow
def test_it_is_refused_before_a_job_is_submitted(calm: Any, spec: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_RELAY", "2")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(json.loads(spec("never-submitted").to_json())))
    command = [sys.executable, "-m", "headrace.cli", "train", "--endpoint", calm.endpoint, "--submit", str(tmp_path / "job.yaml")]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    assert refused.returncode == EXIT_USER_ERROR
    assert "HEADRACE_RELAY is '2'" in refused.stderr
    with calm.client() as client:
        assert "never-submitted" not in {status.job for status in client.jobs()}
