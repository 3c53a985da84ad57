"""The list of what is installed (`make sbom`) has every package that Headrace takes here, in the version that is pinned."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LISTING = Path(sys.executable).parent / "cyclonedx-py"
NEVER_PINNED = {"setuptools", "async-timeout"}
"""By pip-compile: torch takes the former, to build extensions; redis the latter, before Python 3.11.3."""
OF_CUDA = ("cuda-", "nvidia-", "triton")
"""What a torch that is built with CUDA pins itself, in the versions that it needs."""


def pins() -> dict[str, Version]:
    """Of constraints.txt, those that hold on this machine."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pinned = Requirement(line)
            if pinned.marker is None or pinned.marker.evaluate():
                (version,) = pinned.specifier
                found[canonicalize_name(pinned.name)] = Version(version.version)
    return found


def taken(name: str, extras: Iterable[str]) -> set[str]:
    """What a package takes on this machine, and what that takes. Raises PackageNotFoundError where one is not installed."""
    found: set[tuple[str, str]] = set()

    def follow(name: str, extra: str) -> None:
        if (name, extra) in found:
            return
        found.add((name, extra))
        for line in requires(name) or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                for further in ("", *needed.extras):
                    follow(canonicalize_name(needed.name), further)

    for extra in extras:
        follow(name, extra)
    return {found_name for found_name, _ in found} - {name}


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Version]:
    """Versions of all components of the list. Its form is not compared with the schema here, which takes 25 s."""
    path = tmp_path_factory.mktemp("sbom") / "sbom.json"
    options = ["--pyproject", str(ROOT / "pyproject.toml"), "--of", "JSON", "--output-file", str(path)]
    subprocess.run([LISTING, "environment", "--no-validate", *options, sys.executable], check=True, capture_output=True)
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["bomFormat"] == "CycloneDX"
    assert document["metadata"]["component"]["name"] == "headrace"
    return {canonicalize_name(one["name"]): Version(one["version"]) for one in document["components"]}


def test_every_package_that_is_taken_is_pinned_and_listed(listed: dict[str, Version]) -> None:
    needed = taken("headrace", ["", "dev"])
    assert len(needed) > 100
    assert sorted(name for name in needed - set(pins()) - NEVER_PINNED if not name.startswith(OF_CUDA)) == []
    assert sorted(needed - set(listed)) == []


def test_what_is_listed_has_the_pinned_version(listed: dict[str, Version]) -> None:
    """A build of torch is called like its release (2.13.0+cpu)."""
    pinned = pins()
    others = {name: str(version) for name, version in listed.items() if Version(version.public) != pinned.get(name, version)}
    assert others == {}, "run `make setup` again"


def test_a_package_that_is_not_installed_would_be_seen() -> None:
    with pytest.raises(PackageNotFoundError):
        taken("headrace-that-is-not-installed", [""])
