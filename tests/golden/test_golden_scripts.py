"""The golden scripts print what they say, and each is readable for itself."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.golden.__main__ import main
from tests.golden.script import HERE, ScriptError, executed, scripts, store, verbs

REMEDY = "where the change is meant, `python -m tests.golden --rewrite` writes it into the script"


@pytest.fixture(scope="module")
def store_url() -> Iterator[str]:
    with store() as url:
        yield url


@pytest.mark.parametrize("path", scripts(), ids=lambda path: str(path.relative_to(HERE)))
def test_a_script_prints_what_it_says(path: Path, store_url: str) -> None:
    assert executed(path, store_url).splitlines() == path.read_text(encoding="utf-8").splitlines(), REMEDY


@pytest.mark.parametrize("path", scripts(), ids=lambda path: str(path.relative_to(HERE)))
def test_a_script_begins_with_what_it_tells(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_what_a_script_prints_now_is_written_into_it_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mended.txt"
    path.write_text("# Nobody is here.\nstate\n----\nsomebody is\n", encoding="utf-8")
    assert main([str(path)]) == 1
    assert main([str(path), "--rewrite"]) == 0
    assert path.read_text(encoding="utf-8") == "# Nobody is here.\nstate\n----\nservice without jobs\n"
    assert main([str(path)]) == 0
    assert "-somebody is\n+service without jobs\n" in capsys.readouterr().out


def test_a_command_that_cannot_be_run_is_named(tmp_path: Path, store_url: str) -> None:
    path = tmp_path / "wrong.txt"
    path.write_text("# Nobody answers.\nanswer p1\n", encoding="utf-8")
    with pytest.raises(ScriptError, match="answer p1: KeyError: 'p1'"):
        executed(path, store_url)


def test_every_verb_is_explained_and_used() -> None:
    used = {line.split()[0] for path in scripts() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()}
    for name in verbs():
        assert importlib.import_module(f"tests.golden.verbs.{name}").__doc__, name
        assert name in used
