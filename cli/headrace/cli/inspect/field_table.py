"""The fields and tar extensions of a data set: how many samples have each, and what it is used as."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.costs.survey import Look
from headrace.preprocessor.records.field_use import Use
from headrace.preprocessor.records.names_used import names_given
from headrace.printable import printable
from headrace.spec import JobSpec

MAX_FIELD_ROWS = 40  # of the table; JSON has all of them
_EMPHASIS = {Use.UNCLAIMED: "bold", Use.UNUSED: "dim"}


@dataclass(slots=True)
class _Seen:
    """What was seen under one name."""

    kinds: Counter[str] = field(default_factory=Counter)
    uses: Counter[str] = field(default_factory=Counter)


class FieldTally:
    """Counts what samples have, and which names of their mappings they have."""

    def __init__(self, spec: JobSpec) -> None:
        self._sources = spec.sources
        self._seen: dict[tuple[int, str, bool], _Seen] = {}
        self._samples: Counter[int] = Counter()
        self._found: dict[int, set[str]] = {}

    def add(self, look: Look) -> None:
        """Count one sample; one whose record cannot be read counts for nothing."""
        if not look.fields:
            return
        self._samples[look.source] += 1
        self._found.setdefault(look.source, set()).update(look.named)
        for item in look.fields:
            seen = self._seen.setdefault((look.source, item.name, item.kind == "member"), _Seen())
            seen.kinds[item.kind] += 1
            seen.uses[item.use] += item.kind != "null"

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each name, by source, in the order in which they were first seen, in its public JSON form.

        samples      how many have it, and not null
        types        samples by type: text, number, bytes, {bytes, path}, object, list of ..., null, member
        used_as      samples by use: text, images, audios, ignored, note, refused, not used, unknown
        """
        return [
            {
                "source": self._sources[source].name,
                "name": name,
                "samples": seen.kinds.total() - seen.kinds["null"],
                "types": dict(seen.kinds.most_common()),
                "used_as": {use: count for use, count in seen.uses.most_common() if count},
            }
            for (source, name, _), seen in sorted(self._seen.items(), key=lambda item: item[0][0])
        ]

    def unfound(self) -> dict[str, list[str]]:
        """Return the names in the mapping of each source that no sample has, without sources that lack none."""
        lacking = {
            source: sorted(names_given(self._sources[source].mapping) - found) for source, found in sorted(self._found.items())
        }
        return {self._sources[source].name: names for source, names in lacking.items() if names}

    def complaint(self) -> str | None:
        """Return a sentence on the first source whose mapping names nothing that its samples have; None where there is none."""
        for number, found in sorted(self._found.items()):
            source = self._sources[number]
            names = sorted(names_given(source.mapping))
            if names and not found:
                there = ", ".join(dict.fromkeys(name for of, name, _ in self._seen if of == number)) or "nothing"
                return (
                    f"the mapping of source {source.name!r} names {', '.join(names)}, and none of the {self._samples[number]:,} "
                    f"samples that were looked at has any of it; they have {printable(there)[:400]}"
                )
        return None


def print_fields(console: Console, rows: list[dict[str, Any]], unfound: dict[str, list[str]]) -> None:
    """Print the table of fields, and a line on the names that no sample has."""
    many = len({row["source"] for row in rows}) > 1
    table = Table(*["source"] * many, "field", "type", box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("samples", justify="right")
    table.add_column("used as")
    for row in rows[:MAX_FIELD_ROWS]:
        cells = [row["source"], row["name"]] if many else [row["name"]]
        style = next((_EMPHASIS[use] for use in _EMPHASIS if use in row["used_as"]), None)
        table.add_row(
            *(Text(printable(cell)) for cell in cells),
            _listed(row["types"]),
            f"{row['samples']:,}",
            _listed(row["used_as"]) or "-",
            style=style,
        )
    if rows:
        console.print(table)
    if len(rows) > MAX_FIELD_ROWS:
        console.print(f"and {len(rows) - MAX_FIELD_ROWS:,} more fields, which --format json lists")
    for source, names in unfound.items():
        line = f"warning: no sample that was looked at has {', '.join(names)}, which the mapping of {source} names"
        console.print(printable(line), style="bold", markup=False, highlight=False, soft_wrap=True)


def _listed(counts: dict[str, int]) -> str:
    """Return one name alone, or several with their counts."""
    if len(counts) < 2:
        return "".join(counts)
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())
