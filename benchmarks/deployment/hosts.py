"""Hosts within this machine: network namespaces with addresses of their own, each held to a share of one core.

They are joined by a bridge, which is this machine's end, over links with delay and loss, or over plain pairs of devices.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.deployment.links import INNER, OUTER

BRIDGE = "headrace0"
BRIDGE_ADDRESS = "10.77.0.1"
SHARE = 0.25
"""Of a core, that each host has."""
_PERIOD_US = 20_000
_GROUPS = Path("/sys/fs/cgroup/cpu")
_PREFIX = "headrace-host-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One namespace with its address and its processor time."""

    name: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """The words before a command that is to run there."""
        return ["ip", "netns", "exec", self.name]

    def hold(self, pid: int) -> None:
        """Let a process, all of its threads and what it starts have SHARE of a core, together with the host's others."""
        (_GROUPS / self.name / "cgroup.procs").write_text(str(pid), encoding="utf-8")


@contextlib.contextmanager
def hosts(number: int, *, linked: bool = False) -> Iterator[Sequence[Host]]:
    """Make so many hosts, and remove them at the end, also those that a killed run has left.

    `linked`: the devices of `links` join them, as many as there are hosts; else they are joined without delay or loss.

    Raises PermissionError where this is not root with the kernel's cpu controller (cgroup v1).
    """
    if os.geteuid() != 0 or not (_GROUPS / "cpu.cfs_quota_us").exists():
        raise PermissionError(f"hosts of a share of a core need root and the cpu controller of cgroup v1 in {_GROUPS}")
    _remove()
    try:
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("address", "add", f"{BRIDGE_ADDRESS}/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        yield [_make(k, linked=linked) for k in range(number)]
    finally:
        _remove()


def _make(number: int, *, linked: bool) -> Host:
    host = Host(name=f"{_PREFIX}{number}", address=f"10.77.0.{10 + number}")
    outer = f"{OUTER}{number}"
    _ip("netns", "add", host.name)
    if linked:
        _ip("link", "set", f"{INNER}{number}", "netns", host.name, "name", "eth0")
    else:
        _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    _ip("link", "set", outer, "master", BRIDGE, "up")
    _ip("-netns", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
    _ip("-netns", host.name, "link", "set", "eth0", "up")
    _ip("-netns", host.name, "link", "set", "lo", "up")
    group = _GROUPS / host.name
    group.mkdir()
    (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US), encoding="utf-8")
    (group / "cpu.cfs_quota_us").write_text(str(round(SHARE * _PERIOD_US)), encoding="utf-8")
    return host


def _remove() -> None:
    for group in _GROUPS.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # something still runs in it
            group.rmdir()
        subprocess.run(["ip", "netns", "delete", group.name], capture_output=True, check=False)
    subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
