"""Preprocessors on a real Ray cluster: one of its nodes is killed in mid-run, and no sample is lost or repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace.ray
from headrace import trainer
from headrace.cli.example import example_data
from headrace.cli.main import main
from headrace.errors import UserError
from headrace.jobs import JobState
from headrace.ledger import ledger_sha256
from tests.frameworks.conftest import needs
from tests.frameworks.ray_nodes import PREPROCESSOR, Driver, RayNodes, driving, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 16
"""Of 16 samples each, fewer than an epoch has."""
DATA = ("--data-root", str(example_data()))
PLAIN = ("--allow-plaintext",)
"""Preprocessors listen on the machine's address in the network, which asks for TLS else."""
QUICK = ("--interval", "1.5", "--cool-down", "1")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    needs("ray")
    with RayNodes(tmp_path_factory.mktemp("ray")) as cluster:
        for _ in range(3):
            cluster.add()
        yield cluster


@pytest.fixture(autouse=True)
def expected(undisturbed: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ledger's hash of a job with which nothing went wrong, by services that ask for no token. Those of the tests do."""
    undisturbed_hash: str = undisturbed(STEPS)
    monkeypatch.setenv("HEADRACE_CLUSTER_TOKEN", "known-to-the-driver-and-passed-on")
    return undisturbed_hash


def num_connected(cluster: Any, job: str) -> int:
    with cluster.client() as client:
        return len(client.show(job).preprocessors)


def test_a_node_killed_in_mid_run_costs_no_sample_and_is_replaced(
    cluster: Any, spec: Any, expected: str, nodes: RayNodes, tmp_path: Path
) -> None:
    cluster.start_reorder()
    waits_s: list[float] = []
    killed: list[str] = []
    job = cluster.submit(spec("on-ray", steps=STEPS))
    with driving(nodes, cluster.endpoint, tmp_path / "driver.log", "--min", "2", "--max", "2", *PLAIN, *DATA) as driver:
        driver.until(" started preprocessor=", count=2)

        def kill_a_node(step: trainer.Step) -> None:
            waits_s.append(step.data_wait_s)
            if step.index == 5:
                killed.append(nodes.hosts(PREPROCESSOR)[0])
                nodes.kill(killed[0])

        assert cluster.consume(job, kill_a_node) == list(range(STEPS))
        print(f"longest wait for a step after the kill: {max(waits_s[6:]):.2f} s; before: {max(waits_s[1:6]):.2f} s")
        ledger = cluster.ledger(job)
        assert ledger_sha256(ledger) == expected
        assert set(Counter(name for entry in ledger for name in entry.samples).values()) == {1}
        driver.until(" lost preprocessor=")
        driver.until(" started preprocessor=3 ")
        until(lambda: num_connected(cluster, job) == 2, driver.log.read_text)
        assert killed[0] not in nodes.hosts(PREPROCESSOR)
        nodes.add()  # in its place, for the next test
    assert nodes.hosts(PREPROCESSOR) == [], "the driver has ended what it has started"


def test_trainers_that_wait_get_more_and_fewer_once_their_job_has_ended(
    cluster: Any, spec: Any, nodes: RayNodes, tmp_path: Path
) -> None:
    cluster.start_reorder()
    job = cluster.submit(spec("hungry", epochs=100, image={"max_pixels": 200_000}))
    limits = ("--min", "1", "--max", "3", *QUICK)
    with driving(nodes, cluster.endpoint, tmp_path / "driver.log", *limits, *PLAIN, *DATA) as driver:
        driver.until(" started preprocessor=1 ")
        with cluster.consumed(job):
            driver.until(" started preprocessor=2 ")
            until(lambda: num_connected(cluster, job) >= 2, driver.log.read_text)
        with cluster.client() as client:
            client.cancel(job)
        until(lambda: len(nodes.hosts(PREPROCESSOR)) == 1, driver.log.read_text)
        assert driver.lines(" ending preprocessor=")


def test_a_preprocessor_that_cannot_start_is_told_with_its_reason(cluster: Any, nodes: RayNodes, tmp_path: Path) -> None:
    cluster.start_reorder()
    driver = Driver(nodes, cluster.endpoint, tmp_path / "driver.log", *PLAIN, "--data-root", str(tmp_path / "nowhere"))
    driver.until("headrace preprocessor: preprocessors end as soon as they are started")
    assert driver.exit_code() == 2
    assert "nowhere" in driver.lines("headrace preprocessor: preprocessors end")[0]


def test_a_job_is_submitted_from_python_with_its_preprocessors_over_tls_and_by_tokens_with_roles(
    cluster: Any, spec: Any, expected: str, nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, papers, trainers = (tmp_path / name for name in ("tokens", "papers", "trainers"))
    assert main(["tokens", str(tokens)]) == main(["certs", str(papers)]) == 0
    with (tokens / "submit").open("a") as file:
        file.write((tokens / "preprocess").read_text())
    trainers.mkdir()
    (trainers / "train").write_text((tokens / "train").read_text())
    monkeypatch.delenv("HEADRACE_CLUSTER_TOKEN")
    cluster.start_reorder("--tls", str(papers / "reorder"), "--tokens", str(tokens))
    monkeypatch.setenv("HEADRACE_TLS", str(papers / "trainer"))
    monkeypatch.setenv("HEADRACE_CLUSTER_TOKEN_FILE", str(tokens / "preprocess"))
    doors = ("--tls", str(papers / "preprocessor"), "--tokens", str(trainers))
    nowhere = (*doors, "--data-root", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="nowhere"):
        headrace.ray.submit(spec("refused"), endpoint=cluster.endpoint, address=nodes.address, options=nowhere)
    asked = {
        "endpoint": cluster.endpoint,
        "address": nodes.address,
        "min": 2,
        "max": 2,
        "options": ("--budget-mib", "64", *doors, *DATA),
    }
    with headrace.ray.submit(spec("from-python", steps=STEPS), **asked, log=tmp_path / "driver.log") as run:
        assert run.status.state in (JobState.INDEXING, JobState.RUNNING)
        assert cluster.consume(run.job, token=(trainers / "train").read_text().strip()) == list(range(STEPS))
        assert ledger_sha256(cluster.ledger(run.job)) == expected
        run.check()
    assert nodes.hosts(PREPROCESSOR) == []
    assert " ending " in run.log.read_text()
