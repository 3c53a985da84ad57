"""The blocks of a page, and whether an output has the lines that the page shows. Knows no process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```([\w-]*)$")
_NAMED = re.compile(r"^# ([\w./-]+\.\w+)$")
_NUMBERS = "<!-- numbers may differ -->"
_TABLE_LINES = re.compile(r"[\s─━│┃┏┓┗┛┡┩└┘├┤┬┴┼╇╈]+")
_DIGEST = re.compile(r"\b[0-9a-f]{8,}\b")
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
_ANY = "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page, with the output that the page shows of it."""

    language: str
    text: str
    line: int
    """Of the page, from 1 on: the fence's."""
    expected: tuple[str, ...] = ()
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


def blocks(page: Path, *, until: str = "") -> list[Block]:
    """Return the blocks of a page in order, those of `text` as the expected output of the one before. `until`: only those above
    this line. Raises ValueError for an output that belongs to nothing, and where `until` is not there."""
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
            found.append(Block(language=opened[1], text="\n".join(text) + "\n", line=place + 1))
        elif not found or found[-1].expected:
            raise ValueError(f"{page.name}:{place + 1}: an output without a block that it is of")
        else:
            former, differ = found[-1], lines[place - 1] == _NUMBERS
            found[-1] = Block(
                language=former.language, text=former.text, line=former.line, expected=tuple(text), numbers_differ=differ
            )
        place = end + 1
    return found


def missing(expected: Sequence[str], output: str, *, numbers_differ: bool) -> list[str]:
    """Return the expected lines that the output does not have behind those before them."""
    shown = [_plain(line, numbers_differ) for line in output.splitlines()]
    place, lacking = 0, []
    for line in expected:
        if line.strip() in ("", "..."):
            continue
        pattern = re.compile(".*".join(map(re.escape, _plain(line, numbers_differ).split(_ANY))))
        at = next((number for number in range(place, len(shown)) if pattern.fullmatch(shown[number])), None)
        if at is None:
            lacking.append(line)
        else:
            place = at + 1
    return lacking


def _plain(line: str, numbers_differ: bool) -> str:
    line = _TABLE_LINES.sub(" ", line).strip()
    return _NUMBER.sub("#", _DIGEST.sub("#", line)) if numbers_differ else line
