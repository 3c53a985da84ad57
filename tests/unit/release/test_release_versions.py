"""What names a version of its own names that of pyproject.toml, which is no release's between two of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[3]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


@pytest.mark.parametrize(
    ("files", "version"),
    [("deploy/kubernetes/**/kustomization.yaml", r"newTag: (\S+)"), ("docs/kubernetes.md", r"headrace-\$part:(\S+)")],
)
def test_images_are_named_by_this_version(files: str, version: str) -> None:
    named = [found for file in ROOT.glob(files) for found in re.findall(version, file.read_text(encoding="utf-8"))]
    assert {found.rstrip(")") for found in named} == {VERSION}


def test_what_follows_a_release_is_not_taken_for_it() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased = changelog.partition("## [Unreleased]")[2].partition("## [")[0].strip()
    newest = max(map(Version, re.findall(r"^## \[(\d[^\]]*)\]", changelog, re.MULTILINE)))
    assert Version(VERSION) >= newest
    assert Version(VERSION).is_devrelease or not unreleased, "a build of these sources would be taken for a release"
