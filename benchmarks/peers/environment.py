"""A virtual environment for each peer, in `.peers/`: its own packages first, behind them those that Headrace has.

So torch is installed once, a peer takes seconds, and no peer's requirements touch another's or ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.peers import Peer
from benchmarks.timing import progress

FOLDER = Path(__file__).parents[2] / ".peers"
INSTALL_TIMEOUT_S = 600.0
_PINNED = "torch==2.13.*"  # of ours, which no peer is to replace by another build
_DONE = ".installed"


class NotInstalledError(Exception):
    """A peer cannot be installed here. The message says why."""


def python_of(peer: Peer) -> Path:
    """The interpreter of a peer's environment, which is made where it is not there or was made of something else.

    Raises NotInstalledError.
    """
    folder = FOLDER / peer.module
    python, done = folder / "bin" / "python", folder / _DONE
    made_of = "\n".join([sys.executable, str(peer.with_dependencies), *peer.requirements, *peer.stubs, *peer.stubs.values()])
    if not (python.exists() and done.exists() and done.read_text(encoding="utf-8") == made_of):
        progress(f"peers: installing {peer.title} into {folder}")
        venv.create(folder, clear=True, symlinks=True, with_pip=False)
        _share_ours(folder, peer.stubs)
        _install(python, peer.requirements, peer.with_dependencies)
        done.write_text(made_of, encoding="utf-8")
    return python


def variables() -> dict[str, str]:
    """Return the environment variables of a peer: what it starts by itself finds the benchmarks too."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def _share_ours(folder: Path, stubs: Mapping[str, str]) -> None:
    """Put our packages behind those of the environment: what it installs itself comes first."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    ours = sysconfig.get_path("purelib")
    (packages / "headrace-environment.pth").write_text(f"import site; site.addsitedir({ours!r})\n", encoding="utf-8")
    for path, content in stubs.items():
        (packages / path).parent.mkdir(parents=True, exist_ok=True)
        (packages / path).write_text(content, encoding="utf-8")


def _install(python: Path, requirements: Sequence[str], with_dependencies: bool) -> None:
    options = ["--quiet", "--disable-pip-version-check", "--prefer-binary", *([] if with_dependencies else ["--no-deps"])]
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, *requirements]
    if with_dependencies:
        command.append(_PINNED)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as err:
        raise NotInstalledError(f"not within {INSTALL_TIMEOUT_S:.0f} s") from err
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstalledError(errors[-1].removeprefix("ERROR: ") if errors else done.stderr.strip()[-300:])
