"""Scripts that complete commands: bash's is run, and every shell's has all commands and options."""

from __future__ import annotations

import subprocess

import pytest

from headrace.cli.main import COMMANDS, main

ASKS = """
try() {
    COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMPREPLY=()
    _headrace
    echo "${COMPREPLY[*]}"
}
"""


def printed(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main(["--completion", shell])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_bash_completes_commands_options_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    questions = {
        "headrace do": "doctor",
        "headrace job s": "submit show",
        "headrace doctor --o": "--only",
        "headrace doctor --only ''": "installation stack",
        "headrace doctor --only stack --format j": "json",
        "headrace preprocessor --end": "--endpoint",
        "headrace train --endpoint ''": "",  # bash names files then
        "headrace --completion f": "fish",
    }
    asked = "".join(f"try {question}\n" for question in questions)
    script = printed("bash", capsys) + ASKS + asked
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert dict(zip(questions, done.stdout.splitlines(), strict=True)) == questions
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_every_command_is_completed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = set(printed(shell, capsys).replace("|", " ").replace("/", " ").replace(")", " ").split())
    assert set(COMMANDS) <= words


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--completion", "csh"])
    assert end.value.code == 2
    assert "choose from 'bash', 'zsh', 'fish'" in capsys.readouterr().err
