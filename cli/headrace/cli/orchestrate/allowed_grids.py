"""--dp, --tp and --pp of `headrace orchestrate`: which numbers of replicas, slices and stages the searches may take."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.reorder_service.planning.orchestration.demand import Demand

Numbers = tuple[int, ...]


def allowed_demand(demand: Demand, *, dp: str, tp: str, pp: str) -> Demand:
    """Return the demand with only those grids that the options allow. Raises UserError for what no unit can have.

    dp, tp, pp: `UNIT=N:N,...`, or `N,...` for all units; empty where anything is allowed.
    """
    most = min(demand.cluster.num_gpus, demand.global_batch)
    replicas = _numbers("--dp", dp, {unit.name: range(1, most + 1) for unit in demand.units})
    slices = _numbers("--tp", tp, {unit.name: tuple(unit.forward_s) for unit in demand.units})
    stages = _numbers("--pp", pp, {unit.name: range(1, unit.layers // demand.chunks + 1) for unit in demand.units})
    units = tuple(
        dataclasses.replace(
            unit,
            forward_s={width: unit.forward_s[width] for width in slices.get(unit.name, tuple(unit.forward_s))},
            kept_bytes={width: unit.kept_bytes[width] for width in slices.get(unit.name, tuple(unit.forward_s))},
            only_dp=replicas.get(unit.name),
            only_pp=stages.get(unit.name),
        )
        for unit in demand.units
    )
    return dataclasses.replace(demand, units=units)


_WHY = {
    "--dp": "the GPUs and the samples of a step",
    "--tp": "a node, the heads and the channels",
    "--pp": "the layers",
}


def _numbers(flag: str, text: str, possible: Mapping[str, Sequence[int]]) -> dict[str, Numbers]:
    """Return by unit, of those that are named, the numbers that an option allows, ascending. Raises UserError.

    possible: by unit, what it can have. A list for all units leaves each those of its numbers that it can have.
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    of_all = bool(items) and not any("=" in item for item in items)
    if of_all:
        items = [f"{name}={':'.join(items)}" for name in possible]
    found: dict[str, Numbers] = {}
    for item in items:
        name, _, listed = item.partition("=")
        if name not in possible or name in found:
            raise UserError(f"{flag} names each of {', '.join(possible)} once at most, got {item!r}")
        numbers = sorted({int(number) if number.isdecimal() else 0 for number in listed.split(":")})
        may = possible[name]
        if of_all and 0 not in numbers:
            numbers = [number for number in numbers if number in may] or numbers
        if not set(numbers) <= set(may):
            shown = f"{may.start} to {may.stop - 1}" if isinstance(may, range) else ":".join(map(str, may))
            raise UserError(f"{flag} {item}: {_WHY[flag]} of {name} allow {shown}")
        found[name] = tuple(numbers)
    return found
