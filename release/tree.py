"""The commit that is released: whether nothing is changed beside it, which version it is, and its files."""

from __future__ import annotations

import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

from release.errors import ReleaseError


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A commit, which is checked out without changes."""

    name: str
    """Its full hash."""
    epoch_s: int
    """When it was committed, in seconds since 1970: the time of all files in the archives."""
    version: str
    """Of `pyproject.toml`."""


def checked_out(root: Path) -> Commit:
    """Return the commit that is checked out in a clone. Raises ReleaseError where it is no clone, or files are changed or new."""
    if not (root / ".git").exists():
        raise ReleaseError(f"{root} is no clone: a release is made from a commit, so clone the repository")
    if changed := [line[3:] for line in _git(root, "status", "--porcelain").splitlines()]:
        others = f" and {len(changed) - 1} others" if len(changed) > 1 else ""
        raise ReleaseError(
            f"what is checked out is no commit, because of {changed[0]}{others}: commit or remove what has changed"
        )
    name, epoch_s = _git(root, "log", "-1", "--format=%H %ct").split()
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return Commit(name=name, epoch_s=int(epoch_s), version=project["version"])


def check_version(version: str) -> None:
    """Raise ReleaseError for the version that `pyproject.toml` has between releases, as 0.2.0.dev0."""
    released, is_developed, _ = version.partition(".dev")
    if is_developed:
        raise ReleaseError(
            f"{version} is what is developed: raise `version` in pyproject.toml to {released}, and see the other steps of a "
            "release in CONTRIBUTING.md"
        )


def check_tags(root: Path, commit: Commit) -> None:
    """Raise ReleaseError where the version's tag is on another commit, or the commit has the tag of another version."""
    tag = f"v{commit.version}"
    tagged = _git(root, "tag", "--list", tag) and _git(root, "rev-parse", f"{tag}^{{commit}}").strip()
    if tagged and tagged != commit.name:
        raise ReleaseError(
            f"{tag} is the tag of {tagged[:8]}, and {commit.name[:8]} is checked out: raise the version, or check it out"
        )
    others = [one for one in _git(root, "tag", "--points-at", commit.name, "v*").split() if one != tag]
    if others:
        raise ReleaseError(f"this commit has the tag {others[0]}, and pyproject.toml says {commit.version}: they must agree")


def check_history(root: Path, version: str) -> None:
    """Raise ReleaseError where nothing is kept of what this version stores and sends, for its successors to read."""
    name = ".".join(version.split(".")[:2])
    if not (root / "tests" / "histories" / name).is_dir():
        raise ReleaseError(
            f"tests/histories/{name} is not there: record what {version} stores and sends by "
            f"`python -m tests.histories.record {name}`, and commit it"
        )


def export(root: Path, commit: Commit, folder: Path) -> None:
    """Write the files of the commit into a new folder."""
    folder.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit.name], cwd=root, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout
