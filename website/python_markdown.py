"""Markdown as code hosts read it (CommonMark with tables), rewritten so that Python-Markdown reads the same.

Python-Markdown wants four columns for what belongs to a list item and an empty line in front of lists and tables, and takes a
`\\|` in code as two characters.
"""

from __future__ import annotations

import re

_ITEM = re.compile(r" *(?P<marker>[*+-]|\d+[.)]) +(?=\S)")
_TABLE_RULE = re.compile(r" *\|?( *:?-+:? *\|)+( *:?-+:?)? *$")
_FENCE = re.compile(r" *(`{3,})[^`]*$")
_ENDS_LIST = re.compile(r"#{1,6} |>")
_CODE = re.compile(r"`[^`]+`")


def for_python_markdown(text: str) -> str:
    """Return a page for Python-Markdown that was written for a code host."""
    return _Rewriting().rewritten(text)


class _Rewriting:
    """One pass over the lines of a page."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.columns: list[int] = []
        """Where the content of each open list item begins, the outermost first."""
        self.is_code = False
        """Whether the line before is one of indented code."""

    def rewritten(self, text: str) -> str:
        fence = ""
        for line in text.splitlines():
            if fence:
                self._keep(line)
                fence = "" if line.strip().startswith(fence) and not line.strip().strip("`") else fence
            elif not line.strip():
                self.lines.append("")
            elif opening := _FENCE.match(line):
                fence = opening.group(1)
                self._close(line)
                if self.columns:
                    self._separate()
                self._keep(line)
            else:
                self._text(line)
        return "\n".join(self.lines) + "\n"

    def _text(self, line: str) -> None:
        if self._after_blank() or self.is_code:
            self._close(line)
            self.is_code = _indent(line) >= 4 + (self.columns[-1] if self.columns else 0)
            if self.is_code:
                self._keep(line)
                return
        item = _ITEM.match(line)
        if item and self._begins_item(item.group("marker")):
            inside = bool(self.columns)
            self._close(line)
            if not inside:
                self._separate()
            self.lines.append("    " * len(self.columns) + line.lstrip())
            self.columns.append(item.end())
            return
        if _ENDS_LIST.match(line):
            self._close(line)
        if _TABLE_RULE.match(line) and len(self.lines) > 1 and self.lines[-2].strip():
            self.lines.insert(-1, "")
        if line.lstrip().startswith("|"):
            line = _CODE.sub(lambda code: code.group().replace("\\|", "|"), line)
        self._keep(line)

    def _begins_item(self, marker: str) -> bool:
        """Whether a marker begins a list item where it stands: within a paragraph a number other than 1 does not."""
        return bool(self.columns) or self._after_blank() or marker in "*+-" or marker[:-1] == "1"

    def _after_blank(self) -> bool:
        return not self.lines or not self.lines[-1].strip()

    def _close(self, line: str) -> None:
        """Close the list items to which a line does not belong."""
        while self.columns and _indent(line) < self.columns[-1]:
            self.columns.pop()

    def _separate(self) -> None:
        if not self._after_blank():
            self.lines.append("")

    def _keep(self, line: str) -> None:
        """Append a line of the innermost open item, with four columns for each that is open."""
        if not self.columns:
            self.lines.append(line)
            return
        indent = min(_indent(line), self.columns[-1])
        self.lines.append(("    " * len(self.columns) + line[indent:]).rstrip())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
