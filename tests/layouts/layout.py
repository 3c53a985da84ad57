"""A layout: one way of laying out a data set on disk, how its writer writes it, and how its writer's own reader reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import Peer
from tests.layouts.plain import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One layout. `write` and `read` import the writer's library and run in its environment only."""

    name: str
    """Also the folder that it is stored in."""
    writer: Peer
    """The library, which is installed in an environment of its own."""
    what: str
    """What is in it, for the table of the documentation."""
    write: Callable[[Path], None]
    """Writes the data set into an empty folder."""
    read: Callable[[Path], Iterable[Sample]]
    """Reads it with the writer's own reader, in any order."""
    path: str = ""
    """What a source names below the folder: a file, a glob or a split; "" is the folder itself."""
    mapping: Mapping[str, Any] = field(default_factory=dict)
    """The mapping without which the layout is refused."""
    refused_because: str = ""
    """Why it is right to refuse it without a mapping; "" for a layout that is to be read."""
