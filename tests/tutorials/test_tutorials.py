"""What docs/tutorials and docs/orchestrate.md say happens."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cli.main import _parse
from tests.tutorials.tutorial_page import ROOT, blocks, headrace_commands
from tests.tutorials.tutorial_session import run_page

ORCHESTRATE = ROOT / "docs" / "orchestrate.md"  # it is read in a clone
PAGES = [*sorted((ROOT / "docs" / "tutorials").glob("*.md")), ORCHESTRATE]


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_does_what_it_says(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path, in_clone=page == ORCHESTRATE)


@pytest.mark.integration
def test_the_first_steps_of_a_data_engineer_do_what_they_say(tmp_path: Path) -> None:
    run_page(ROOT / "docs" / "tutorials" / "data-engineer.md", tmp_path, until="## Look before anything runs")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_headrace_takes_every_command(page: Path) -> None:
    """Also in `make test`, which runs none of them: an option that was renamed shows here."""
    commands = [found for block in blocks(page) if block.language == "bash" for found in headrace_commands(block.text)]
    assert len(commands) > 5
    for command in commands:
        _parse(command)


def test_a_block_is_run_saved_or_compared(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\n# a/b.py\nx = 1\n```\n\n```bash\nls\n```\n\n<!-- numbers may differ -->\n```text\nb 17.5\n...\nc…d\n```\n"
    )
    saved, run = blocks(page)
    assert (saved.file, saved.text, saved.place()) == ("a/b.py", "# a/b.py\nx = 1\n", "page.md:2")
    assert (run.file, run.text, run.expected, run.numbers_differ) == ("", "ls\n", ("b 17.5", "...", "c…d"), True)
    assert run.lacking("b  3\nother\ncXYd\n") == []
    assert run.lacking("cXYd\nb 3\n") == ["page.md:14: c…d"]
    assert replace(run, numbers_differ=False).lacking("b 3\ncXYd\n") == ["page.md:12: b 17.5"]


@pytest.mark.parametrize(
    ("language", "lines", "sentence"),
    [
        ("bash", ["true", "false || true", "x=1", "test $x = 2"], "page.md:6: exit code 1 of test $x = 2\n"),
        ("bash", ["f() { return 3; }", "f | cat", "f"], "page.md:5: exit code 3 of "),
        ("bash", ["exit 1"], "page.md:3 ends the shell"),
        ("python", ["x = 1", "", "print(y)"], "page.md:5: exit code 1 of this Python"),
        ("bash", ["echo a"], "page.md:3 does not print\npage.md:7: b\nbut\na\n"),
    ],
)
def test_what_goes_wrong_is_told_with_page_and_line(language: str, lines: list[str], sentence: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("\n".join(["# Page", f"```{language}", *lines, "```", "```text", "a", "b", "```", ""]))
    with pytest.raises(AssertionError, match=rf"^{re.escape(sentence)}"):
        run_page(page, tmp_path, in_clone=page == ORCHESTRATE)
