"""Read the limits of the control groups that this process is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_V1_MOUNTS = {"cpu": ("cpu", "cpu,cpuacct"), "memory": ("memory",)}  # names of the controllers' folders below /sys/fs/cgroup


def limits(controller: str, unified: str, legacy: tuple[str, ...], root: Path) -> Iterator[list[str]]:
    """Yield the words in a controller's files, for the process's group and each group above it; none for a missing file.

    `unified`: the file of cgroup v2. `legacy`: the files of v1, whose words follow each other. `root`: where /proc and /sys are.
    """
    groups = root / "sys" / "fs" / "cgroup"
    for line in _read(root / "proc" / "self" / "cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers:
            yield from _words(groups, path, unified)
        elif controller in controllers.split(","):
            mount = next((groups / name for name in _V1_MOUNTS[controller] if (groups / name).is_dir()), groups)
            yield from _words(mount, path, *legacy)


def _words(mount: Path, path: str, *names: str) -> Iterator[list[str]]:
    for group in _with_parents(mount, path):
        yield [word for name in names for word in _read(group / name).split()]


def _with_parents(mount: Path, path: str) -> list[Path]:
    """Return the group and all groups above it. A container sees its own at the mount itself; the path is often the host's."""
    group = mount / path.strip("/")
    return [mount, *(one for one in (group, *group.parents) if mount in one.parents)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
