"""docs/layouts.md: what becomes of every layout, as the tests find it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from tests.layouts.layout import Layout
from tests.layouts.verdict import Outcome, Verdict

DOCUMENT = Path(__file__).parents[2] / "docs" / "layouts.md"
_HEAD = """# Layouts that have been tried

Each was written with the library that is named, read with that library's own reader, and read with Headrace; "right" means that
both gave the same samples, media included. What is refused is refused in one sentence, by the reason in the table;
[data.md](data.md) has the rules. No layout may be read otherwise than by its own reader: that fails the tests.

This file is made by `make layouts-table` from [tests/layouts](../tests/layouts/__init__.py), and checked there.
"""


def render(verdicts: Sequence[tuple[Layout, Verdict, Verdict]], libraries: Mapping[str, str]) -> str:
    """Return the document for layouts with their verdicts, without and with the mapping of the layout.

    `libraries`: the name and version of each writer's library, by its module.
    """
    texts = [_HEAD, _summary(verdicts)]
    for writer, group in groupby(verdicts, key=lambda item: item[0].writer):
        texts.append(f"\n## {writer.title} ({libraries[writer.module]})\n\n| layout | verdict | mapping |\n|---|---|---|\n")
        texts += [row(*item) for item in group]
    return "".join(texts)


def row(layout: Layout, alone: Verdict, mapped: Verdict) -> str:
    """Return the line of one layout."""
    place = f" (`PATH/{layout.path}`)".replace("/#", "#") if layout.path else ""
    mapping = f"`{json.dumps(dict(layout.mapping))}`" if layout.mapping and mapped.outcome is Outcome.RIGHT else ""
    return f"| {layout.what}{place} | {_told(layout, alone, mapped)} | {mapping} |\n"


def _told(layout: Layout, alone: Verdict, mapped: Verdict) -> str:
    if alone.outcome is Outcome.RIGHT or mapped.outcome is Outcome.RIGHT:
        return "right" if alone.outcome is Outcome.RIGHT else "right with the mapping"
    why = f": {layout.refused_because}" if layout.refused_because else ""
    return f"refused ({alone.reason}){why}"


def _summary(verdicts: Sequence[tuple[Layout, Verdict, Verdict]]) -> str:
    kinds: Counter[str] = Counter()
    for layout, alone, mapped in verdicts:
        if alone.outcome is Outcome.RIGHT:
            kinds["right"] += 1
        elif mapped.outcome is Outcome.RIGHT:
            kinds["mapped"] += 1
        elif layout.refused_because:
            kinds["refusable"] += 1
        else:
            kinds["unread"] += 1
    return (
        f"\nOf {kinds.total()} layouts {kinds['right']} are right without a word of configuration, {kinds['mapped']} with a "
        f"mapping, {kinds['refusable']} are refused because they are nothing to train on, {kinds['unread']} are refused though "
        "they could be read, and none is read wrongly.\n"
    )
