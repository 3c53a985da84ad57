"""Every exit code of docs/command-line.md, as a command ends with it."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli.demo import demo
from headrace.cli.main import main
from headrace.cli.run import health
from headrace.errors import UnrecoverableError

PAGE = (Path(__file__).parents[3] / "docs" / "command-line.md").read_text(encoding="utf-8")
LISTED = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE.partition("## Ports")[0], re.MULTILINE)}
COMMAND = "import sys; from headrace.cli.main import main; sys.exit(main())"


def _done(_: pytest.MonkeyPatch) -> int:
    return main(["experiment", "--list"])


def _failed(_: pytest.MonkeyPatch) -> int:
    return main(["health", "127.0.0.1:1"])  # a port below 1024 where nobody listens


def _to_be_fixed(_: pytest.MonkeyPatch) -> int:
    return main(["plan", "/no/such/table.parquet"])


def _nodes_lost(monkeypatch: pytest.MonkeyPatch) -> int:
    def run(_: object) -> int:
        raise UnrecoverableError("all copies of layer 3 are lost")

    monkeypatch.setattr(health, "run", run)
    return main(["health"])


def _interrupted(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(demo, "add_arguments", lambda _: signal.raise_signal(signal.SIGINT))
    return main(["demo"])


def _reader_gone(_: pytest.MonkeyPatch) -> int:
    script = f"{shlex.join([sys.executable, '-c', COMMAND, 'experiment', '--list'])} | true; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(["bash", "-c", script], timeout=60, check=False).returncode


ENDS: dict[int, Callable[[pytest.MonkeyPatch], int]] = {
    0: _done,
    1: _failed,
    2: _to_be_fixed,
    3: _nodes_lost,
    130: _interrupted,
    141: _reader_gone,
}


def test_every_listed_code_is_tried() -> None:
    assert ENDS.keys() == LISTED


@pytest.mark.parametrize("code", ENDS)
def test_a_command_ends_with_it(code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ENDS[code](monkeypatch) == code
    assert "Traceback" not in capsys.readouterr().err
