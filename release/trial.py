"""An empty environment, outside the repository and without anybody's settings, in which the wheel must run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from release.errors import ReleaseError

DEMO_TIMEOUT_S = 1200.0  # it compiles the planner first
INSTALL_TIMEOUT_S = 3600.0  # of gigabytes, where torch comes with CUDA
STEPS = 3


def try_out(wheel: Path, version: str, folder: Path) -> str:
    """Install a wheel without extras in a new `folder`, and run the demo in it; return what `headrace --version` said.

    Raises ReleaseError where a command fails, or says something else than it must.
    """
    home = folder / "home"
    home.mkdir(parents=True)
    _run([sys.executable, "-m", "venv", str(folder / "venv")], INSTALL_TIMEOUT_S)
    commands = folder / "venv" / "bin"
    _run([str(commands / "pip"), "install", "--quiet", "--disable-pip-version-check", str(wheel)], INSTALL_TIMEOUT_S)
    alone = {"PATH": f"{commands}:/usr/bin:/bin", "HOME": str(home)}
    said = _run([str(commands / "headrace"), "--version"], DEMO_TIMEOUT_S, home, alone).strip()
    if not said.startswith(f"headrace {version}, "):
        raise ReleaseError(f"`headrace --version` says {said!r} of the wheel of {version}")
    told = _run([str(commands / "headrace"), "demo", "--steps", str(STEPS)], DEMO_TIMEOUT_S, home, alone)
    if f"{STEPS} of {STEPS}" not in told:
        raise ReleaseError(f"`headrace demo --steps {STEPS}` ended without all of its steps: {told.strip()}")
    return said


def _run(command: list[str], timeout_s: float, folder: Path | None = None, environment: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ReleaseError(f"`{' '.join(command)}` has not ended within {timeout_s:.0f} s") from None
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it says nothing"]
        raise ReleaseError(f"`{' '.join(command)}` ended with {done.returncode}: {last[0]}")
    return done.stdout
