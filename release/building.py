"""The archives of a release: built twice, of other folders and under other permissions, they have the same bytes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from release.errors import ReleaseError


@dataclass(frozen=True, slots=True, kw_only=True)
class Archives:
    """The two files that are published."""

    wheel: Path
    sdist: Path


def build(sources: Path, folder: Path, epoch_s: int) -> Archives:
    """Build the source archive in `folder`, and of it, so that it is enough for that, the wheel.

    `epoch_s`: time of the files in the archives, in seconds since 1970. Raises ReleaseError where the sources cannot be built.
    """
    sdist = _build(sources, folder / "built", "sdist", epoch_s, umask=0o022)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return Archives(wheel=_build(unpacked, folder / "built", "wheel", epoch_s, umask=0o022), sdist=sdist)


def build_twice(export: Callable[[Path], None], folder: Path, epoch_s: int) -> Archives:
    """Build in `folder`, and return the archives of the first time; the second time the wheel is built of the sources.

    `export` writes the sources into a new folder. Raises ReleaseError where both times differ, or the sources cannot be built.
    """
    export(folder / "sources")
    archives = build(folder / "sources", folder, epoch_s)
    export(folder / "again" / "sources")
    for kind, first in (("sdist", archives.sdist), ("wheel", archives.wheel)):
        second = _build(folder / "again" / "sources", folder / "again" / "built", kind, epoch_s, umask=0o077)
        if digest(first) != digest(second):
            raise ReleaseError(f"two builds of {first.name} differ in {differing_member(first, second)}: nobody could check it")
    return archives


def digest(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def members(archive: Path) -> dict[str, bytes]:
    """Return the files in a wheel or source archive by name, in order."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(archive) as sdist:
        return {one.name: file.read() for one in sdist if (file := sdist.extractfile(one)) is not None}


def differing_member(first: Path, second: Path) -> str:
    """Return the name of the first file in which two archives differ; where all are the same, what else may differ."""
    ours, others = members(first), members(second)
    for name in ours | others:
        if ours.get(name) != others.get(name):
            return name
    return "the times, permissions or order of its files"


def _build(sources: Path, out: Path, kind: str, epoch_s: int, *, umask: int) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)],
        cwd=sources,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch_s)},
        capture_output=True,
        text=True,
        check=False,
        umask=umask,
    )
    if done.returncode:
        raise ReleaseError(f"hatchling cannot build the {kind}: {(done.stderr.strip().splitlines() or ['it says nothing'])[-1]}")
    (built,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built
