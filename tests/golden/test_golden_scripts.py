"""The golden scripts print what they say, and each is readable for itself."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.golden.script import HERE, executed, scripts, store, verbs

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


def test_every_verb_is_explained_and_used() -> None:
    used = {line.split()[0] for path in scripts() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()}
    for name in verbs():
        assert importlib.import_module(f"tests.golden.verbs.{name}").__doc__, name
        assert name in used
