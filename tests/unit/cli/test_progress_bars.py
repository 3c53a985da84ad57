"""Long commands show how far they are: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import inspect
import time
from importlib import import_module

import pytest

from headrace.cli import progress_bar
from headrace.cli.demo import display
from headrace.cli.main import COMMANDS, main
from headrace.cli.progress_bar import ProgressBar, working

SHOWN_BY = {
    "demo": ("demo.display", "class Display"),
    "train": ("planning.emulate", "ProgressBar"),  # every other way to train logs each step
    "export": ("run.export", "working"),
    "scale": ("scale.scaling_loop", "def say"),  # a line for each decision
    "audit": ("watch.audit", "ProgressBar"),
    "top": ("watch.top", "Live"),
    "inspect": ("costs.survey", "ProgressBar"),
    "compare": ("planning.compare", "ProgressBar"),
    "orchestrate": ("orchestrate.orchestrate", "ProgressBar"),
    "profile": ("costs.profile_measuring", "progress_of_shares"),
    "plan": ("planning.plan", "working"),
    "simulate": ("planning.simulate", "ProgressBar"),
    "simulate-failures": ("failures.simulate_failures", "ProgressBar"),
    "experiment": ("experiment.experiment", "working"),
    "bench": ("bench.bench", "_say"),  # a line before each measurement
    "doctor": ("doctor.doctor", "_progress"),
}
SHORT = {"reorder", "preprocessor", "tokens", "job", "replay", "certs", "health"}
"""Services, which log, and what takes a moment."""


def test_every_command_is_short_or_shows_progress() -> None:
    assert SHOWN_BY.keys() | SHORT == COMMANDS.keys()
    for command, (module, name) in SHOWN_BY.items():
        assert name in inspect.getsource(import_module(f"headrace.cli.{module}")), command


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress_bar, "PLAIN_INTERVAL_S", 0.0)
    arguments = ["--mtbf", "10m", "--hours", "0.2", "--nodes", "6", "--no-picture", "--format", "json"]
    assert main(["simulate-failures", *arguments]) == 0
    assert "policies simulated: 1 of " in capsys.readouterr().err


def test_nothing_is_said_of_what_takes_a_moment(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar() as bar, working("reading"):
        bar.begin("samples", 2)
        bar.advance(2)
    assert capsys.readouterr() == ("", "")


def test_what_nobody_can_foretell_is_said_to_go_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress_bar, "PLAIN_INTERVAL_S", 0.001)
    said, deadline_s = "", time.monotonic() + 60
    with working("reading"):
        while "reading: 0 s so far" not in said and time.monotonic() < deadline_s:
            said += capsys.readouterr().err
    assert "reading: 0 s so far" in said


@pytest.mark.parametrize("terminal", [False, True], ids=["log", "terminal"])
def test_a_demo_says_what_it_waits_for(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "TICK_S" if terminal else "WAITING_INTERVAL_S", 0.001)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    said, deadline_s = "", time.monotonic() + 60
    with display.Display() as shown, shown.waiting(lambda: "reorder service: compiling"):
        while "0 s: reorder service: compiling" not in said and time.monotonic() < deadline_s:
            said += capsys.readouterr().err
    assert "0 s: reorder service: compiling" in said


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes whatever it writes to for a terminal then
    with ProgressBar() as bar:
        bar.begin("samples", 4)
        bar.advance(3)
        print("result")
    with working("reading"):
        pass
    out, err = capsys.readouterr()
    assert (out, "samples" in err, "3/4" in err, "reading" in err) == ("result\n", True, True, True)
