"""Processes that do what `headrace profile` measures, so that cores, caches and memory are as busy as ranks that share them will
have them."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.child_process import how_ended, last_words
from headrace.cli.costs.profile_measuring import MEASURING
from headrace.errors import UserError
from headrace.processes import POLL_S, Process, ProcessGroup

START_TIMEOUT_S = 600.0  # many beside each other load torch at the same time


@contextmanager
def companions(args: argparse.Namespace, count: int) -> Iterator[None]:
    """Have so many processes measure the same, over and over, for the block. Raises UserError where one of them ends."""
    if not count:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="headrace-profile-") as folder, ProcessGroup() as group:
        for number in range(count):
            name = f"companion {number}"
            group.add(Process(name, _arguments(args, Path(folder) / f"{number}.json"), Path(folder) / f"{number}.log"))
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while waiting := [process for process in group.processes if MEASURING not in process.last_lines(1)]:
            _check(group)
            if time.monotonic() > deadline_s:
                raise UserError(f"{waiting[0].name} of --beside measures nothing after {START_TIMEOUT_S:.0f} s: name fewer")
            time.sleep(POLL_S)
        yield
        _check(group)


def _check(group: ProcessGroup) -> None:
    for process in group.processes:
        if (code := process.exit_code()) is not None:
            words = last_words(process.log.read_text(encoding="utf-8", errors="replace").splitlines())
            raise UserError(f"a process that --beside asks for {how_ended(code)}: {words}")


def _arguments(args: argparse.Namespace, out: Path) -> list[str]:
    given = ["profile", args.model, "--as-companion", "--out", str(out), "--tokens", args.tokens, "--tp", args.tp]
    given += ["--precision", args.precision, "--device", "cpu"]
    for flag in ("vision", "audio", "llm", "units", "spec", "vocab", "threads"):
        if (value := getattr(args, flag)) is not None:
            given += [f"--{flag}", str(value)]
    return given
