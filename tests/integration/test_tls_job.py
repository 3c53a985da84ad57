"""A job between real processes that speak TLS only: it is the same job, and new papers need no restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import jobs, trainer
from headrace.cli.main import main
from headrace.errors import EndpointError
from headrace.identity import TLS
from headrace.ledger import ledger_sha256
from tests.papers import make_cluster_papers

pytestmark = pytest.mark.integration

STEPS = 8


def test_a_job_over_tls_is_the_same_job_and_goes_on_while_all_papers_are_renewed(
    cluster: Any,
    spec: Any,
    undisturbed: Callable[[int], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = undisturbed(STEPS)
    papers = make_cluster_papers(tmp_path / "papers")
    monkeypatch.setenv(TLS, str(papers / "client"))  # what a command below sets is undone as well
    cluster.start_reorder("--tls", str(papers / "reorder"))
    cluster.add_preprocessors(1, "--tls", str(papers / "preprocessor"))
    with jobs.Jobs(cluster.endpoint) as client:
        job = client.submit(spec("secret", steps=STEPS)).job
    with pytest.raises(EndpointError, match=f"^{cluster.endpoint} speaks TLS only: name the folder with this process's papers"):
        cluster.consume(job, tls="")

    def renew(step: trainer.Step) -> None:
        if step.index == 2:
            make_cluster_papers(papers, renew=True)

    assert cluster.consume(job, renew, transports=("flight",), tls=papers / "trainer") == list(range(STEPS))
    assert ledger_sha256(cluster.ledger(job)) == expected
    where = ["--endpoint", cluster.endpoint, "--tls", str(papers / "client")]
    for command in (["job", "show", job, *where], ["audit", job, *where], ["job", "list", *where, "--format", "json"]):
        assert main(command) == 0, capsys.readouterr()


def test_the_ranks_of_a_host_share_a_relay_to_a_service_that_speaks_tls(
    cluster: Any, spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    papers = make_cluster_papers(tmp_path / "papers")
    monkeypatch.setenv(TLS, str(papers / "trainer"))
    monkeypatch.setenv("HEADRACE_RELAY", "1")
    cluster.start_reorder("--tls", str(papers / "reorder"))
    cluster.add_preprocessors(1, "--tls", str(papers / "preprocessor"))
    assert cluster.consume(cluster.submit(spec("relayed", steps=2))) == [0, 1]
