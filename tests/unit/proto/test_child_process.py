"""How a process has ended is told in words, and with the end of a log that nobody can look into any more."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from headrace.child_process import LAST_LINES, how_ended, last_words


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("sys.exit(3)", "ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 1)", f"was ended by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_an_end_is_told_by_exit_code_or_signal(end: str, words: str) -> None:
    done = subprocess.run([sys.executable, "-S", "-c", f"import os, signal, sys; {end}"], check=False, timeout=60)
    assert how_ended(done.returncode) == words


def test_the_last_line_comes_first_and_then_what_led_to_it() -> None:
    assert last_words(["Traceback:", "", "  line 3", "ValueError: x"]) == "ValueError: x\n  Traceback:\n    line 3"
    assert last_words([""]) == "no word of it"
    assert len(last_words(map(str, range(100))).splitlines()) == 1 + LAST_LINES
