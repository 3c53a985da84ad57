"""A preprocessor opens what its operator allowed, and a job that wants more is told by what flag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.jobs_client import state_name

pytestmark = pytest.mark.integration

NEAR = "http://169.254.169.254/"


def states(cluster: Any) -> dict[str, str]:
    with cluster.client() as client:
        return {status.job: state_name(status) for status in client.jobs()}


def test_a_job_that_nobody_may_read_fails_by_the_name_of_the_flag(cluster, spec, tmp_path: Path) -> None:
    """One preprocessor that may read its data is enough."""
    (tmp_path / "allowed").mkdir()
    cluster.start_reorder()
    cluster.add_preprocessors(1, "--data-root", str(tmp_path / "allowed"), "--allow-url", NEAR)
    status = cluster.wait_for_state(cluster.submit(spec("refused", steps=1)), "failed")
    assert f"is not for this process to read: it may read below {tmp_path}/allowed; " in status.message
    assert "start the preprocessor with --data-root DIR" in status.message
    wanted = {
        "outside": ("/etc", "/etc is not for this process to read"),
        "foreign": ("sftp://10.0.0.7/a.tar", "sftp://10.0.0.7/a.tar is not for this process to fetch"),
        "near": (f"{NEAR}latest/a.tar", "a loopback or link-local address, from which jobs may fetch nothing"),
    }
    before = states(cluster)
    for name, (path, sentence) in wanted.items():
        assert sentence in cluster.wait_for_state(cluster.submit(spec(name, sources=[{"path": path}])), "failed").message
        assert cluster.ledger(name) == []
    assert states(cluster) == before | dict.fromkeys(wanted, "failed"), "other jobs stay as they were"
    told = (tmp_path / "reorder.log").read_text().splitlines()
    refused = cluster.preprocessors[0].log.read_text().splitlines()
    for name, (_, sentence) in wanted.items():
        assert any(f"submitted job={name} " in line and "peer=ipv4:127.0.0.1:" in line for line in told), told
        assert any("order failed preprocessor=" in line and f"job={name} " in line and sentence in line for line in told), told
        assert any(f"refused to open job={name} reorder={cluster.endpoint} " in line and sentence in line for line in refused)
    cluster.add_preprocessors(1)
    cluster.wait_for_preprocessors()
    assert cluster.consume(cluster.submit(spec("taken", steps=1))) == [0]
