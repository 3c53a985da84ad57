"""Fixtures of tests/integration for the loops of examples/integrations, each of which needs the extra `integrations`."""

from __future__ import annotations

import importlib.util

import pytest

from tests.frameworks.library_loops import loop
from tests.integration.conftest import calm, cluster, spec, undisturbed

__all__ = ["calm", "cluster", "loop", "spec", "undisturbed"]


def needs(library: str, remedy: str = "make test-integrations") -> None:
    """Skip the test where a library is not installed."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: {remedy}")
