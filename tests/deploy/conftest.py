"""`make test-deploy` leaves out what is not installed. A part that is asked for by name, `PART=slurm`, has to be here."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

PART = os.environ.get("HEADRACE_DEPLOY_PART", "")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Have a test fail that would be skipped, if its part is named."""
    report = yield
    if report.skipped and PART:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome, report.longrepr = "failed", f"PART={PART} was asked for, and cannot be run: {why}"
    return report
