"""`make test-deploy` leaves out what is not installed, but not what it is asked for by name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.kubernetes_documents import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(("part", "status"), [("", 0), ("skypilot", 1)], ids=["any", "by name"])
def test_a_part_that_is_not_here_is_left_out_unless_it_is_named(part: str, status: int) -> None:
    env = {name: value for name, value in os.environ.items() if name != "SKYPILOT_PYTHON"}
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "slow", "-rs"]
    done = subprocess.run(
        [*command, "tests/deploy/test_skypilot.py"],
        env={**env, "HEADRACE_DEPLOY_PART": part},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "SKYPILOT_PYTHON names no Python with SkyPilot" in done.stdout
    assert ("PART=skypilot was asked for, and cannot be run" in done.stdout) is bool(part)
