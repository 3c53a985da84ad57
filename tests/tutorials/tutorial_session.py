"""One bash, in which the blocks of a page run one after the other, with all that they leave running."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from release.trial import variables
from tests.tutorials.tutorial_page import ROOT, Block, blocks
from tests.wire import free_ports

EMPTY_ENVIRONMENT = "HEADRACE_TEST_EMPTY_ENVIRONMENT"
"""Variable that names a folder of `tests.tutorials.empty_environment`: pages are for somebody who has nothing else. Without it
they are for a developer, whose environment is that of the tests."""
PORTS = (6379, 7070, 7071, 7079, 7100, 7101, 9090, 9091, 9100, 9101, 29500)
"""That the pages name."""
COLUMNS = "100"  # of the tables that the pages show
BLOCK_S = 400.0  # the longest that one block may take on a machine that others use
END_S = 20.0  # until what still runs is killed
_FAILED = "@failed@"
_DONE = "@done@"
_LINE_OF_PYTHON = re.compile(r'^  File "<stdin>", line (\d+)', re.MULTILINE)


class Session:
    """A bash of its own process group in a folder of its own. What a block starts and leaves running is ended with it."""

    def __init__(self, folder: Path, ports: Sequence[int] = PORTS, *, in_clone: bool = False) -> None:
        """`folder`: where its own is made, which is empty. `ports`: those of the page in whose place are free ones. `in_clone`:
        whether `examples` are there, as in a clone."""
        self._folder = folder / "work"
        self._blocks = folder / "blocks"
        for made in (self._folder, self._blocks):
            made.mkdir()
        if in_clone:
            (self._folder / "examples").symlink_to(ROOT / "examples")
        self._ports = dict(zip(map(str, ports), map(str, free_ports(len(ports))), strict=True))
        self._count = 0
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=self._folder,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        self._say(f"trap 'echo \"{_FAILED} $? $LINENO $BASH_COMMAND\"' ERR")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End all that runs: in order, and what has not ended after some seconds at once."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._say("trap - ERR; kill $(jobs -p) 2> /dev/null; wait; exit")
            self._bash.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGKILL)
        self._bash.wait()
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        with contextlib.suppress(OSError):  # what was not taken by bash before it ended
            self._bash.stdin.close()
        self._reading.join(END_S)
        assert not self._reading.is_alive(), "what the page has started outlives its bash, and holds its output open"
        self._bash.stdout.close()

    def run(self, block: Block) -> str:
        """Save a block's file, or run it, and return what it writes. Raises AssertionError where a command fails or the output
        lacks a line that the page shows."""
        self._count += 1
        script = self._blocks / f"{self._count}.{block.language}"
        script.write_text(_replaced(block.text, self._ports))
        if block.file:
            self._say(f"mkdir -p $(dirname {block.file}) && cp {script} {block.file}")
        elif block.language == "bash":
            self._say(f"source {script} < /dev/null")
        else:
            self._say(f"python - < {script}")
        output, failures = self._heard(block)
        output = _replaced(output, {given: named for named, given in self._ports.items()})
        assert not failures, "\n".join([*(_failure(block, *failure, output) for failure in failures), output])
        lacking = block.lacking(output)
        assert not lacking, "\n".join([f"{block.place()} does not print", *lacking, "but", output])
        return output

    def _heard(self, block: Block) -> tuple[str, list[tuple[str, ...]]]:
        """Return what bash writes until the block is over, and of each command that failed exit code, line and words."""
        self._say(f"printf '\\n{_DONE} {self._count}\\n'")
        deadline, lines, failures = time.monotonic() + BLOCK_S, list[str](), list[tuple[str, ...]]()
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{block.place()} takes more than {BLOCK_S:g} s\n{''.join(lines)}") from None
            if line is None:
                raise AssertionError(f"{block.place()} ends the shell\n{''.join(lines)}")
            if line == f"{_DONE} {self._count}\n":
                return "".join(lines), failures
            if line.startswith(_FAILED):
                failed = tuple(line.removeprefix(_FAILED).split(maxsplit=2))
                failures += [failed] if not failed[-1].startswith("source /") else []  # once, by its own line
            else:
                lines.append(line)

    def _say(self, line: str) -> None:
        assert self._bash.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which whoever reads what it writes is told
            self._bash.stdin.write(line + "\n")
            self._bash.stdin.flush()

    def _read(self) -> None:
        assert self._bash.stdout is not None
        for line in self._bash.stdout:
            self._lines.put(line)
        self._lines.put(None)


def run_page(page: Path, folder: Path, *, until: str = "", in_clone: bool = False) -> None:
    """Run the blocks of a page in a new session. `until`: those above this line. `in_clone`: where `examples` are. Raises
    AssertionError for the first that does not do what the page says."""
    with Session(folder, in_clone=in_clone) as session:
        for block in blocks(page, until=until):
            if block.is_carried_out:
                session.run(block)


def _environment() -> dict[str, str]:
    """Nothing of Headrace's is set, and its commands are found."""
    if folder := os.environ.get(EMPTY_ENVIRONMENT):
        return variables(Path(folder)) | {"COLUMNS": COLUMNS, "LANG": "C.UTF-8"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "PYTEST_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
    return kept | {"PATH": path, "COLUMNS": COLUMNS, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _failure(block: Block, code: str, line: str, command: str, output: str) -> str:
    """Return in a line what failed where: of bash it is told, of Python it is read from the traceback in the output."""
    found = [line] if block.language == "bash" else _LINE_OF_PYTHON.findall(output)
    place = block.place(int(found[-1])) if found else block.place()
    return f"{place}: exit code {code} of {command if block.language == 'bash' else 'this Python'}"


def _replaced(text: str, names: Mapping[str, str]) -> str:
    return text if not names else re.sub(rf"\b(?:{'|'.join(names)})\b", lambda found: names[found[0]], text)
