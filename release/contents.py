"""What is in the archives: every file of the package, the example with its licences, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from release.building import Archives, members
from release.errors import ReleaseError

PORTIONS = ("proto", "preprocessor", "reorder_service", "trainer", "cli")
DATA = {"examples/data": "headrace/cli/example_data", "deploy": "headrace/cli/deploy"}
"""Folder of the repository -> where the wheel has it."""
BESIDE = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore", "PKG-INFO")
MAX_WHEEL_BYTES = 10_000_000


def check_contents(archives: Archives, sources: Path, version: str) -> None:
    """Raise ReleaseError where an archive has a file too many or too few, or the wheel is too large."""
    info = f"headrace-{version}.dist-info"
    of_info = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    _compare(archives.wheel, set(wheel_files(sources)) | of_info)
    _compare(archives.sdist, {f"headrace-{version}/{name}" for name in (*sdist_files(sources), *BESIDE)})
    size = archives.wheel.stat().st_size
    if size > MAX_WHEEL_BYTES:
        raise ReleaseError(f"{archives.wheel.name} has {size / 1e6:.1f} MB, and {MAX_WHEEL_BYTES / 1e6:.0f} MB are the most")


def wheel_files(sources: Path) -> Iterator[str]:
    """Yield the names that files of the sources have in the wheel."""
    for portion in PORTIONS:
        yield from (f"headrace/{name}" for name in _files(sources / portion / "headrace"))
    for folder, place in DATA.items():
        yield from (f"{place}/{name}" for name in _files(sources / folder))


def sdist_files(sources: Path) -> Iterator[str]:
    """Yield the names that files of the sources have in the source archive, below its only folder."""
    for folder in (*(f"{portion}/headrace" for portion in PORTIONS), *DATA):
        yield from (f"{folder}/{name}" for name in _files(sources / folder))


def _files(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(path.relative_to(folder))


def _compare(archive: Path, expected: set[str]) -> None:
    found = set(members(archive))
    for names, problem in ((expected - found, "lacks"), (found - expected, "has, for no reason,")):
        if names:
            others = f" and {len(names) - 1} others" if len(names) > 1 else ""
            raise ReleaseError(f"{archive.name} {problem} {min(names)}{others}: see [tool.hatch.build] in pyproject.toml")
