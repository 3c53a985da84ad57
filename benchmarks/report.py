"""What a benchmark reports: rows of ours, a published or peer figure, and a goal, as one table and as one JSON file."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import operator
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

RESULTS = Path(__file__).parent / "results"
"""Folder of the results that the repository has."""
WIDTH = 120
"""Columns of the table where the output is no terminal."""

_SIGNS = {"<=": operator.le, ">=": operator.ge, ">": operator.gt}
_PACKAGES = ("numpy", "numba", "scipy")
_WIDEST = 36  # of a column but the first
_LONGEST_REASON = 300  # characters of an error message: those of CUDA go on for a page
_JUSTIFY: tuple[JustifyMethod, ...] = ("right", "left", "right", "right", "left")
_VERDICTS = {True: ("yes", "green"), False: ("NO", "bold red"), None: ("", "")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a row's value is to reach, in the row's unit."""

    sign: str
    """"<=", ">=" or ">"."""
    limit: float

    def __post_init__(self) -> None:
        if self.sign not in _SIGNS:
            raise ValueError(f"a goal's sign is one of {', '.join(_SIGNS)}, got {self.sign!r}")

    def met(self, value: float) -> bool:
        return bool(_SIGNS[self.sign](value, self.limit))

    def __str__(self) -> str:
        return f"{self.sign} {number(self.limit)}"


def at_most(limit: float) -> Goal:
    """The goal of a figure that is better when smaller."""
    return Goal(sign="<=", limit=limit)


def at_least(limit: float) -> Goal:
    """The goal of a figure that is better when larger."""
    return Goal(sign=">=", limit=limit)


def more_than(limit: float) -> Goal:
    """`at_least` without the limit itself."""
    return Goal(sign=">", limit=limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A figure to compare with, in the row's unit."""

    value: float
    source: str
    """Who reached it, in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured figure."""

    name: str
    value: float
    unit: str = ""
    rival: Rival | None = None
    goal: Goal | None = None
    detail: str = ""
    """What else was seen while measuring: the median, the number of repetitions."""

    @property
    def ratio(self) -> float | None:
        """Ours over the rival's."""
        return self.value / self.rival.value if self.rival and self.rival.value else None

    @property
    def ok(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        return self.goal.met(self.value) if self.goal else None


def failed(reason: str) -> Row:
    """Return the row of a check that could not be run to its end."""
    words = " ".join(reason.split())
    short = words if len(words) <= _LONGEST_REASON else f"{words[:_LONGEST_REASON]} ..."
    return Row(name="could not be measured", value=1, unit="failure", goal=at_most(0), detail=f"failed: {short}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Rows that were measured under the same conditions, which the title gives."""

    title: str
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A finished benchmark."""

    benchmark: str
    date: str
    """When it ran, ISO 8601."""
    quick: bool
    """Whether it ran shortened."""
    sections: Sequence[Section]
    device: str = ""
    """What was measured on, if not the processor."""

    @property
    def machine(self) -> dict[str, str | int]:
        """Where the figures were measured."""
        return machine() | ({"device": self.device} if self.device else {})

    @property
    def rows(self) -> list[Row]:
        return [row for section in self.sections for row in section.rows]

    @property
    def verdict(self) -> str:
        """One sentence: how many goals are met, and which are not."""
        goals = [row for row in self.rows if row.goal]
        missed = [row.name for row in goals if not row.ok]
        return f"{len(goals) - len(missed)} of {len(goals)} goals met" + (f"; missed: {'; '.join(missed)}" if missed else "")

    def to_json(self) -> dict[str, Any]:
        """`rows` as in the table; `goal` and `ok` are null for a row that is there to inform, `rival` where there is none."""
        return {
            "benchmark": self.benchmark,
            "date": self.date,
            "commit": commit(),
            "quick": self.quick,
            "machine": self.machine,
            "verdict": self.verdict,
            "rows": [
                {
                    "section": section.title,
                    "name": row.name,
                    "value": row.value,
                    "unit": row.unit,
                    "rival": row.rival and row.rival.value,
                    "rival_source": row.rival and row.rival.source,
                    "ratio": row.ratio,
                    "goal": row.goal and f"{row.goal.sign} {row.goal.limit:g}",
                    "ok": row.ok,
                    "detail": row.detail,
                }
                for section in self.sections
                for row in section.rows
            ],
        }

    def write(self, path: Path) -> None:
        """Write the JSON form. Raises ValueError for a value that is infinite or not a number, before it touches the file."""
        text = json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def show(self, console: Console | None = None) -> None:
        """Print the table; on standard output unless told otherwise."""
        out = console or Console()
        if not out.is_terminal:
            out.width = WIDTH
        lines = [[_cells(row) for row in section.rows] for section in self.sections]
        header = [Text(title, style="bold") for title in ("", "ours", "published or peer", "ratio", "goal", "ok")]
        every = [header, *itertools.chain.from_iterable(lines)]
        widths = [max(cells[column].cell_len for cells in every) for column in range(1, len(header))]
        out.print(_grid([header], widths))
        for section, of_section in zip(self.sections, lines, strict=True):
            out.print()
            out.print(Text(section.title, style="bold"))
            out.print(_grid(of_section, widths))
        where = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        out.print(f"\nratio: ours over theirs\nmeasured on {where}\n{self.verdict}", highlight=False, markup=False)


def _grid(lines: Sequence[Sequence[Text]], widths: Sequence[int]) -> Table:
    """Lines in columns of the same widths as those of every other grid; the first column takes what is left."""
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(ratio=1, overflow="fold")
    for width, justify in zip(widths, _JUSTIFY, strict=True):
        grid.add_column(width=min(width, _WIDEST), justify=justify, overflow="fold")
    for line in lines:
        grid.add_row(*line)
    return grid


def _cells(row: Row) -> list[Text]:
    name = Text(f"  {row.name}")
    if row.detail:
        name.append(f"  {row.detail}", style="dim")
    verdict, style = _VERDICTS[row.ok]
    return [
        name,
        Text(f"{number(row.value)} {row.unit}".rstrip()),
        Text(f"{number(row.rival.value)} {row.unit}".rstrip() + f" ({row.rival.source})" if row.rival else "-"),
        Text("-" if row.ratio is None else f"{row.ratio:.3g}"),
        Text(str(row.goal) if row.goal else "no goal", style="" if row.goal else "dim"),
        Text(verdict, style=style),
    ]


def number(value: float) -> str:
    """Four significant digits; from ten thousand on all digits of the whole number, in groups of three."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def commit() -> str | None:
    """The commit of the code that is measured, with "-dirty" behind it where files differ; None outside of a repository."""
    command = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def machine() -> dict[str, str | int]:
    """The computer that runs this."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def _cpu_model() -> str:
    """As the kernel names it, else as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
