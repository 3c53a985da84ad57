"""Completion is installed where each shell finds it: in a home of the test's own, once, and in words that say how to undo it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.cli.main import main


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "a home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    for variable in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR", "BASH_ENV"):
        monkeypatch.delenv(variable, raising=False)
    return folder


def installed(capsys: pytest.CaptureFixture[str], *shell: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["--install-completion", *shell])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_bash_completes_after_it_was_installed(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/bash")
    (home / ".bashrc").write_text("export KEPT=1")
    said = installed(capsys)
    script = home / ".local/share/bash-completion/completions/headrace"
    assert f"{script} is written\n{home}/.bashrc names it in its last line\n" in said
    assert f"to undo it, remove {script} and that line of {home}/.bashrc" in said
    ask = 'COMP_WORDS=(headrace do); COMP_CWORD=1; _headrace; echo "$KEPT ${COMPREPLY[*]} $(complete -p headrace)"'
    command = ["bash", "--rcfile", str(home / ".bashrc"), "-i", "-c", ask]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, start_new_session=True)
    assert done.stdout == "1 doctor complete -o default -F _headrace headrace\n", done.stderr


@pytest.mark.parametrize(
    ("shell", "script", "startup"),
    [
        ("bash", ".local/share/bash-completion/completions/headrace", ".bashrc"),
        ("zsh", ".local/share/headrace/completion.zsh", ".zshrc"),
        ("fish", ".config/fish/completions/headrace.fish", None),
    ],
)
def test_a_second_time_changes_nothing_and_what_was_there_stays(
    shell: str, script: str, startup: str | None, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if startup is not None:
        (home / startup).write_text("# mine\n")
    installed(capsys, shell)
    files = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert {str(path.relative_to(home)) for path in files} == {script, *filter(None, [startup])}
    said = installed(capsys, shell)
    assert f"{home / script} is up to date" in said
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == files
    if startup is not None:
        first, line = (home / startup).read_text().splitlines()
        assert (first, str(home / script) in line) == ("# mine", True)
    if (program := shutil.which(shell)) is not None:
        subprocess.run([program, "-n", str(home / script)], check=True, timeout=60)


def test_an_older_script_is_replaced(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = home / ".config/fish/completions/headrace.fish"
    script.parent.mkdir(parents=True)
    script.write_text("of an older release")
    assert f"{script} is written" in installed(capsys, "fish")
    assert "-a doctor" in script.read_text()


@pytest.mark.parametrize("shell", ["/bin/csh", ""])
def test_another_shell_is_told_which_there_are(
    shell: str, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", shell)
    with pytest.raises(SystemExit) as end:
        main(["--install-completion"])
    assert end.value.code == 2
    assert "completion is for bash, zsh, fish: name one" in capsys.readouterr().err
    assert list(home.iterdir()) == []


def test_a_home_that_cannot_be_written_is_told(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / ".local").write_text("no folder")
    with pytest.raises(SystemExit) as end:
        main(["--install-completion", "bash"])
    assert end.value.code == 2
    assert "cannot write" in (err := capsys.readouterr().err)
    assert os.linesep not in err.strip()
