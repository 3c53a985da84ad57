"""Compiled loops where nothing can be written: a container with a read-only root, an installation of somebody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LOOPS = """
from headrace.jit import kernel

@kernel
def double(x):
    return 2 * x

@kernel
def doubled_below(count):
    total, first = 0, 0
    for i in range(count):
        total += double(first) + double(5)
        first += 1
    return total
"""
RUN = "import loops; print(loops.double(21), sum(loops.double.stats.cache_hits.values()))"
WITHOUT_OVERRIDE = ["setpriv", "--bounding-set", "-dac_override"] if os.geteuid() == 0 else []
"""Root writes where nobody may, unless it is told not to."""


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    """A folder with a module, which becomes read-only with all that is in it."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "loops.py").write_text(LOOPS)
    yield tmp_path / "installed"
    for folder in (tmp_path, *tmp_path.rglob("*")):
        folder.chmod(0o755)


def run(installed: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Doubles 21 in a process of its own; stdout: the result, and how many kernels came from a cache."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    clean |= {"HOME": str(installed)} | environment
    command = [*WITHOUT_OVERRIDE, sys.executable, "-B", "-c", RUN]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=installed, env=clean)


def test_constants_make_no_variants(installed: Path) -> None:
    code = "import loops; print(loops.doubled_below(3), [str(kinds) for kinds in loops.double.signatures])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False, cwd=installed)
    assert done.stdout == "36 ['(int64,)']\n", done.stderr


def make_read_only(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555)


def test_what_is_compiled_already_is_read_where_nothing_can_be_written(installed: Path) -> None:
    filled = str(installed / "filled")
    assert run(installed, NUMBA_CACHE_DIR=filled).stdout == "42 0\n"
    make_read_only(installed)
    done = run(installed, NUMBA_CACHE_DIR=filled)
    assert (done.stdout, done.stderr) == ("42 1\n", ""), done.stderr


def test_without_a_folder_to_write_to_it_compiles_and_says_so(installed: Path) -> None:
    make_read_only(installed)
    done = run(installed)
    assert done.stdout == "42 0\n"
    assert done.stderr.startswith("machine code is compiled at every start")
    assert done.stderr.count("\n") == 1, "one line, however many loops there are"


def test_where_the_installation_alone_is_read_only_it_is_kept_in_the_cache_of_the_user(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    make_read_only(installed)
    home = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "home" / "cache")}
    assert [(done.stdout, done.stderr) for done in (run(installed, **home) for _ in range(2))] == [("42 0\n", ""), ("42 1\n", "")]
    assert list((tmp_path / "home" / "cache" / "numba").rglob("loops.double*.nbc"))


def test_where_it_can_be_written_it_is_kept_beside_the_source(installed: Path) -> None:
    assert [run(installed).stdout for _ in range(2)] == ["42 0\n", "42 1\n"]
