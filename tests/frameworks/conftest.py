"""Fixtures of tests/integration for the loops of examples/integrations, each of which needs the extra `integrations`."""

from __future__ import annotations

from tests.integration.conftest import calm, spec, undisturbed

__all__ = ["calm", "spec", "undisturbed"]
