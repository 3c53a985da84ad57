"""An empty environment, outside the repository and without anybody's settings, in which the wheel must run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from release.errors import ReleaseError

DEMO_TIMEOUT_S = 1200.0  # it compiles the planner first
INSTALL_TIMEOUT_S = 3600.0  # of gigabytes, where torch comes with CUDA
STEPS = 3
ENVIRONMENT, HOME = "venv", "home"
"""Names of the folders of the environment and of its user."""


def install(wheel: Path, folder: Path) -> None:
    """Make an environment in a new `folder`, and install a wheel without extras in it. Raises ReleaseError where pip cannot."""
    (folder / HOME).mkdir(parents=True)
    _run([sys.executable, "-m", "venv", str(folder / ENVIRONMENT)], INSTALL_TIMEOUT_S)
    pip = folder / ENVIRONMENT / "bin" / "pip"
    _run([str(pip), "install", "--quiet", "--disable-pip-version-check", str(wheel)], INSTALL_TIMEOUT_S)


def variables(folder: Path) -> dict[str, str]:
    """Return the variables of somebody who has nothing but what `install` has made in `folder`, and what a system has."""
    return {"PATH": f"{folder / ENVIRONMENT / 'bin'}:/usr/bin:/bin", "HOME": str(folder / HOME)}


def try_out(wheel: Path, version: str, folder: Path) -> str:
    """Install a wheel in a new `folder`, and run the demo in it; return what `headrace --version` said.

    Raises ReleaseError where a command fails, or says something else than it must.
    """
    install(wheel, folder)
    headrace, home, alone = folder / ENVIRONMENT / "bin" / "headrace", folder / HOME, variables(folder)
    said = _run([str(headrace), "--version"], DEMO_TIMEOUT_S, home, alone).strip()
    if not said.startswith(f"headrace {version}, "):
        raise ReleaseError(f"`headrace --version` says {said!r} of the wheel of {version}")
    told = _run([str(headrace), "demo", "--steps", str(STEPS)], DEMO_TIMEOUT_S, home, alone)
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
