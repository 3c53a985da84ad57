"""What docs/tutorials and docs/orchestrate.md say happens."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.main import _parse
from tests.tutorials.tutorial_page import blocks, missing
from tests.tutorials.tutorial_session import run_page

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs" / "tutorials").glob("*.md")), ROOT / "docs" / "orchestrate.md"]


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_does_what_it_says(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path)


@pytest.mark.integration
def test_the_first_steps_of_a_data_engineer_do_what_they_say(tmp_path: Path) -> None:
    run_page(ROOT / "docs" / "tutorials" / "data-engineer.md", tmp_path, until="## Look before anything runs")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_headrace_takes_every_command(page: Path) -> None:
    """Also in `make test`, which runs none of them: an option that was renamed shows here."""
    lines = [line for block in blocks(page) if block.language == "bash" for line in block.text.replace("\\\n", " ").splitlines()]
    commands = [found for line in lines for found in _commands(line)]
    assert len(commands) > 5
    for command in commands:
        _parse(command)


def _commands(line: str) -> Iterator[list[str]]:
    """Yield the arguments of each headrace command in a line of a shell."""
    lexer = shlex.shlex(line.replace(" 2>", " >"), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    for place, word in enumerate(words[:-1]):
        if word in ("headrace", "me") and words[place + 1].isalpha():
            rest = words[place + 1 :]
            end = next((at for at, other in enumerate(rest) if set(other) <= set("<>|&;()")), len(rest))
            yield rest[:end]


def test_a_block_is_run_saved_or_compared(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\n# a/b.py\nx = 1\n```\n\n```bash\nls\n```\n\n<!-- numbers may differ -->\n```text\nb 17.5\n...\nc…d\n```\n"
    )
    saved, run = blocks(page)
    assert (saved.file, saved.text) == ("a/b.py", "# a/b.py\nx = 1\n")
    assert (run.file, run.text, run.expected, run.numbers_differ) == ("", "ls\n", ("b 17.5", "...", "c…d"), True)
    assert missing(run.expected, "b  3\nother\ncXYd\n", numbers_differ=True) == []
    assert missing(run.expected, "cXYd\nb 3\n", numbers_differ=True) == ["c…d"]
    assert missing(run.expected, "b 3\ncXYd\n", numbers_differ=False) == ["b 17.5"]
