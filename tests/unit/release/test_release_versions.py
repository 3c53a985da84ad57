"""What names a version of its own names that of pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


@pytest.mark.parametrize(
    ("files", "version"),
    [("deploy/kubernetes/**/kustomization.yaml", r"newTag: (\S+)"), ("docs/kubernetes.md", r"headrace-\$part:(\S+)")],
)
def test_images_are_named_by_this_version(files: str, version: str) -> None:
    named = [found for file in ROOT.glob(files) for found in re.findall(version, file.read_text(encoding="utf-8"))]
    assert {found.rstrip(")") for found in named} == {VERSION}
