"""The disaggregated layouts that Headrace's search judges, out of the whole space that it has estimated.

They are the fastest few of every number of microbatches, those of the Pareto front of estimated seconds and memory, and the
fastest of the rest. All of them fit the memory by the estimate; where too few do, those that exceed it least come behind.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.plan import LLM
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.orchestration.candidate import Candidate
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import fullest_of_layouts, usable_bytes
from headrace.reorder_service.planning.orchestration.layout_space import Layouts, layouts

_LOOKED_AT, _ENOUGH = 4000, 1000
"""Layouts, the fastest first, of which the memory is estimated: at most, and where enough of them fit."""
_ROOM = 0.8
"""Of the memory, by the estimate's means: real microbatches differ, and the fullest is about a quarter fuller."""
_OF_EACH_COUNT = 3
"""Layouts of every number of microbatches that are taken, each with another grid of the LLM."""
_LOOKED_AT_OF_COUNT = 100
"""Layouts of a number of microbatches, the fastest first, among which these are looked for."""


def shortlisted(demand: Demand, most: int, search: str) -> tuple[list[Candidate], int]:
    """Return at most so many candidates, and the number of layouts that they were chosen from. search: who finds them."""
    space = list(layouts(demand)) or list(layouts(demand, fitting=False))
    if not space:
        return [], 0
    seconds = np.concatenate([part.step_s for part in space])
    part_of = np.repeat(np.arange(len(space)), [part.step_s.size for part in space])
    row_of = np.concatenate([np.arange(part.step_s.size) for part in space])
    room = _ROOM * usable_bytes(demand.cluster)
    front, rest, tight = _fastest(demand, space, (seconds, part_of, row_of), room, most)
    starts = np.cumsum([0, *(part.step_s.size for part in space)])
    of_counts = [int(start) + row for start, part in zip(starts, space, strict=False) for row in _of_count(demand, part, room)]
    of_counts.sort(key=lambda place: float(seconds[place]))
    chosen = list(dict.fromkeys([*of_counts[: most // 2], *front[: most // 2], *rest]))[:most]
    chosen += tight[: most - len(chosen)]
    return [space[part_of[place]].candidate(int(row_of[place]), search) for place in chosen], seconds.size


def _fastest(
    demand: Demand, space: Sequence[Layouts], columns: tuple[Floats, Ints, Ints], room: float, most: int
) -> tuple[list[int], list[int], list[int]]:
    """Return places in the space: those on the front of seconds and bytes, at most so many others, and what has no room, the
    leanest first.

    columns: (m,) seconds of all layouts, their parts of the space and their rows there. room: bytes.
    """
    seconds, part_of, row_of = columns
    least = np.inf
    front: list[int] = []
    rest: list[int] = []
    tight: list[tuple[float, int]] = []
    fastest = _first(seconds, _LOOKED_AT)
    memories = _memories(demand, space, part_of[fastest], row_of[fastest])
    for looked_at, (place, memory) in enumerate(zip(fastest.tolist(), memories.tolist(), strict=True)):
        if memory > room:
            tight.append((memory, place))
        elif memory < least:
            least = memory
            front.append(place)
        elif len(rest) < most:
            rest.append(place)
        elif looked_at >= _ENOUGH:
            break
    return front, rest, [place for _, place in sorted(tight, key=lambda pair: pair[0])]


def _of_count(demand: Demand, part: Layouts, room: float) -> list[int]:
    """Return the rows of the fastest few layouts of one number of microbatches that fit so many bytes.

    Where the largest sample determines the step, thousands with another number may be as fast by the estimate.
    """
    fastest = _first(part.step_s, _LOOKED_AT_OF_COUNT)
    memories = _memories(demand, [part], np.zeros_like(fastest), fastest)
    of_grids: dict[tuple[int, int, int], int] = {}
    for row in fastest[memories <= room].tolist():
        of_grids.setdefault((int(part.dp[LLM][row]), int(part.tp[LLM][row]), int(part.pp[LLM][row])), row)
    return list(of_grids.values())[:_OF_EACH_COUNT]


def _first(seconds: Floats, most: int) -> Ints:
    """Return the places of the least of (m,) seconds, at most so many, in rising order; of equal ones the first."""
    if seconds.size > most:
        among = np.flatnonzero(seconds <= np.partition(seconds, most)[most])
        return among[np.argsort(seconds[among], kind="stable")[:most]]
    return np.argsort(seconds, kind="stable")


def _memories(demand: Demand, space: Sequence[Layouts], parts: Ints, rows: Ints) -> Floats:
    """Return the bytes of the fullest GPU of layouts, given by their (m,) parts of the space and rows there."""
    memories = np.empty(parts.size)
    for part in np.unique(parts).tolist():
        own, layouts_of = parts == part, space[part]
        columns = (
            {unit: values[rows[own]] for unit, values in one.items()} for one in (layouts_of.dp, layouts_of.tp, layouts_of.pp)
        )
        memories[own] = fullest_of_layouts(demand, layouts_of.microbatches, *columns)
    return memories
