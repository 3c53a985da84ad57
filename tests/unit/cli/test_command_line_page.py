"""docs/command-line.md says what the command does."""

from __future__ import annotations

import re
from pathlib import Path

from headrace.cli import main
from headrace.cli.endpoint import DEFAULT_ENDPOINT, ENDPOINT

PAGE = (Path(__file__).parents[3] / "docs" / "command-line.md").read_text()


def test_every_exit_code_is_listed() -> None:
    codes = {value for name, value in vars(main).items() if name.startswith("EXIT_")} | {0}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE.partition("## Ports")[0], re.MULTILINE)} == codes


def test_the_endpoint_is_that_of_the_code() -> None:
    assert f"`{ENDPOINT}`, and else {DEFAULT_ENDPOINT}." in PAGE
