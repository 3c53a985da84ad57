"""How the command starts: interrupts, the demo's data, and processes that cannot start."""

import argparse
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli import demo, example
from cli.main import main
from cli.processes import MAX_SHORT_LIVES, Process
from headrace.errors import HeadraceError


def test_ctrl_c_while_arguments_are_read_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "add_arguments", lambda _: signal.raise_signal(signal.SIGINT))
    assert main(["demo"]) == 130


PLAN = [sys.executable, "-m", "cli.main", "plan", "-", "--num-stages", "1", "--format", "json"]


@pytest.mark.parametrize(
    ("redirect", "code", "words"),
    [
        (">/dev/full", 1, "headrace: cannot write to standard output: No space left on device\n"),
        (">&-", 0, ""),
        ("| true", 141, ""),
    ],
)
def test_output_that_cannot_be_written_ends_quietly_or_with_one_sentence(redirect: str, code: int, words: str) -> None:
    script = f"{shlex.join(PLAN)} {redirect}; exit ${{PIPESTATUS[0]}}"
    row = '{"sample_id": 1, "cost_llm": 1}\n'
    done = subprocess.run(["bash", "-c", script], input=row, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (code, words)


@pytest.mark.parametrize("arguments", [["plan"], ["plan", "x", "--seed", "y"], ["no-command"]])
def test_wrong_arguments_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("headrace")


def test_the_bundled_data_has_one_name_wherever_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "cli" / "example_data"
    installed.mkdir(parents=True)
    monkeypatch.setattr(example, "__file__", str(tmp_path / "cli" / "example.py"))
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    [source] = demo._spec(parser.parse_args([])).sources
    assert (source.path, source.name) == (str(installed), "data")
    [source] = demo._spec(parser.parse_args(["/some/where"])).sources
    assert source.name == "where"


def test_a_process_that_cannot_start_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    process = Process("preprocessor 0", ["preprocessor", "--reorder", "nonsense"], tmp_path / "log")
    for _ in range(MAX_SHORT_LIVES):
        process.wait(30)
        process.restart()
    process.wait(30)
    with pytest.raises(HeadraceError, match=r"preprocessor 0 ended 4 times .* 'nonsense' is not HOST:PORT"):
        process.restart()
