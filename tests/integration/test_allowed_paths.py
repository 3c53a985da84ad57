"""A preprocessor opens what its operator allowed, and a job that wants more is told by what flag."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.integration


def test_a_job_that_nobody_may_read_fails_by_the_name_of_the_flag(cluster, spec, tmp_path: Path) -> None:
    """One preprocessor that may read its data is enough."""
    (tmp_path / "allowed").mkdir()
    cluster.start_reorder()
    cluster.add_preprocessors(1, "--data-root", str(tmp_path / "allowed"))
    status = cluster.wait_for_state(cluster.submit(spec("refused", steps=1)), "failed")
    assert f"is not for this process to read: it may read below {tmp_path}/allowed; " in status.message
    assert "start the preprocessor with --data-root DIR" in status.message
    cluster.add_preprocessors(1)
    cluster.wait_for_preprocessors()
    assert cluster.consume(cluster.submit(spec("taken", steps=1))) == [0]
