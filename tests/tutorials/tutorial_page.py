"""The blocks of a page, and which lines that the page shows an output lacks. Knows no process."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```([\w-]*)$")
_NAMED = re.compile(r"^# ([\w./-]+\.\w+)$")
_INDENTED = "    "
_NUMBERS = "<!-- numbers may differ -->"
_TABLE_LINES = re.compile(r"[\s─━│┃┏┓┗┛┡┩└┘├┤┬┴┼╇╈]+")
_DIGEST = re.compile(r"\b[0-9a-f]{8,}\b")
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
_ANY = "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of a page, with the output that the page shows of it."""

    page: str
    """Its name, from the repository's root where it is of the repository."""
    line: int
    """Of its first line in the page, from 1 on."""
    language: str
    text: str
    expected: tuple[str, ...] = ()
    expected_line: int = 0
    """Of the first expected line in the page."""
    numbers_differ: bool = False

    @property
    def file(self) -> str:
        """The name that the block is saved under; empty for one that is run."""
        found = _NAMED.match(self.text.partition("\n")[0]) if self.language in ("python", "yaml") else None
        return found[1] if found else ""

    @property
    def is_carried_out(self) -> bool:
        """Whether the block is run or saved, not only read."""
        return bool(self.file) or self.language in ("bash", "python")

    def place(self, line: int = 1) -> str:
        """Return where a line of the block is, as editors take it; the first is 1."""
        return f"{self.page}:{self.line + line - 1}"

    def lacking(self, output: str) -> list[str]:
        """Return the expected lines that the output does not have, each with its place."""
        places = missing(self.expected, output, numbers_differ=self.numbers_differ)
        return [f"{self.page}:{self.expected_line + at}: {self.expected[at]}" for at in places]


def name_of(page: Path) -> str:
    """Return the name that a page is told by."""
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


def blocks(page: Path, *, until: str = "") -> list[Block]:
    """Return the fenced blocks of a page in order, those of `text` as the expected output of the one before. `until`: only those
    above this line. Raises ValueError for an output that belongs to nothing, and where `until` is not there."""
    lines = page.read_text().splitlines()
    lines = lines[: lines.index(until)] if until else lines
    found: list[Block] = []
    place = 0
    while place < len(lines):
        opened = _FENCE.match(lines[place])
        if opened is None:
            place += 1
            continue
        end = lines.index("```", place + 1)
        text = lines[place + 1 : end]
        if opened[1] != "text":
            code = "\n".join(text) + "\n"
            found.append(Block(page=name_of(page), line=place + 2, language=opened[1], text=code))
        elif not found or found[-1].expected:
            raise ValueError(f"{name_of(page)}:{place + 1}: an output without a block that it is of")
        else:
            differ = lines[place - 1] == _NUMBERS
            found[-1] = replace(found[-1], expected=tuple(text), expected_line=place + 2, numbers_differ=differ)
        place = end + 1
    return found


def indented_commands(page: Path, command: str) -> Iterator[Block]:
    """Yield a block for each indented line of a page that begins with this command."""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith(f"{_INDENTED}{command} "):
            yield Block(page=name_of(page), line=number, language="bash", text=line.strip() + "\n")


def headrace_commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of each headrace command in lines of a shell."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.replace(" 2>", " >"), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        for place, word in enumerate(words[:-1]):
            if word in ("headrace", "me") and words[place + 1].isalpha():
                rest = words[place + 1 :]
                end = next((at for at, other in enumerate(rest) if set(other) <= set("<>|&;()")), len(rest))
                yield rest[:end]


def missing(expected: Sequence[str], output: str, *, numbers_differ: bool) -> list[int]:
    """Return which of the expected lines the output does not have behind those before them."""
    shown = [_plain(line, numbers_differ) for line in output.splitlines()]
    place, lacking = 0, []
    for number, line in enumerate(expected):
        if line.strip() in ("", "..."):
            continue
        pattern = re.compile(".*".join(map(re.escape, _plain(line, numbers_differ).split(_ANY))))
        at = next((at for at in range(place, len(shown)) if pattern.fullmatch(shown[at])), None)
        if at is None:
            lacking.append(number)
        else:
            place = at + 1
    return lacking


def _plain(line: str, numbers_differ: bool) -> str:
    line = _TABLE_LINES.sub(" ", line).strip()
    return _NUMBER.sub("#", _DIGEST.sub("#", line)) if numbers_differ else line
