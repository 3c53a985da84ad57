"""All stored layouts with what their own readers read of them, and with what Headrace makes of them."""

from __future__ import annotations

import json
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.layouts.catalogue import LAYOUTS, WRITERS
from tests.layouts.layout import Layout
from tests.layouts.verdict import Verdict, judge

STORED = Path(__file__).parents[1] / "data" / "layouts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The stored layouts, unpacked."""

    folder: Path
    """Has a folder for each layout."""
    expected: Mapping[str, list[Any]]
    """What a layout's own reader reads, by its name."""
    libraries: Mapping[str, str]
    """Name and version of the library, by its module."""


def unpack(folder: Path) -> Store:
    """Unpack all stored layouts into `folder`."""
    expected: dict[str, list[Any]] = {}
    libraries: dict[str, str] = {}
    for writer in WRITERS:
        document = json.loads((STORED / f"{writer.module}.json").read_text(encoding="utf-8"))
        expected |= document["layouts"]
        libraries[writer.module] = document["library"]
        with tarfile.open(STORED / f"{writer.module}.tar.xz") as packed:
            packed.extractall(folder, filter="data")
    return Store(folder=folder, expected=expected, libraries=libraries)


def verdicts_of(layout: Layout, store: Store) -> tuple[Verdict, Verdict]:
    """Return the verdicts on a layout without a mapping and with its own; they are one where it needs none."""
    folder, expected = store.folder / layout.name, store.expected[layout.name]
    alone = judge(layout, folder, expected, {})
    return alone, judge(layout, folder, expected, layout.mapping) if layout.mapping else alone


def judged() -> tuple[list[tuple[Layout, Verdict, Verdict]], Mapping[str, str]]:
    """Return all layouts with their verdicts, and the libraries' versions."""
    with tempfile.TemporaryDirectory() as temporary:
        store = unpack(Path(temporary))
        return [(layout, *verdicts_of(layout, store)) for layout in LAYOUTS], store.libraries
