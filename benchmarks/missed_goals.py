"""`python -m benchmarks.missed_goals`: list the goals that the results in the repository miss, in README.md beside this file."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import RESULTS, number

README = Path(__file__).parent / "README.md"
BEGIN = "<!-- goals that are missed: written by `python -m benchmarks.missed_goals` -->\n"
END = "<!-- end of the goals that are missed -->\n"


def missed_goals(results: Path = RESULTS) -> Iterator[str]:
    """Yield the lines of a Markdown table: every row of the JSON files in a folder whose goal is missed, by file and section."""
    yield "| results | what | measured | goal |\n"
    yield "|---|---|---|---|\n"
    for file in sorted(results.glob("*.json")):
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
            if row["ok"] is False:
                where = re.split("[:;]", row["section"])[0]
                what = f"{where}: {row['name']}".replace("|", "\\|")
                sign, limit = row["goal"].split()
                measured, goal = f"{number(row['value'])} {row['unit']}", f"{sign} {number(float(limit))}"
                yield f"| [{file.stem}](results/{file.name}) | {what} | {measured.rstrip()} | {goal} |\n"


def with_missed_goals(text: str, results: Path = RESULTS) -> str:
    """Return the README's text with the table between its two marks made anew. Raises ValueError where a mark is missing."""
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:before]}\n{''.join(missed_goals(results))}\n{text[after:]}"


def main() -> int:
    """Write the README where its table is no longer that of the results; 0."""
    README.write_text(with_missed_goals(README.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
