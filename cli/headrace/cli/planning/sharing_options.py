"""The options that say which units run on the LLM's ranks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, get_args

from headrace.cli.planning import option_values
from headrace.errors import UserError
from headrace.execution_spec import NESTED, SharingOrder, UnitExecution, check_sharing, check_units
from headrace.plan import LLM, Topology

if TYPE_CHECKING:
    from headrace.reorder_service.planning.sharing import Sharing


def add_sharing_arguments(how: argparse._ArgumentGroup) -> None:
    """Add --on-llm, --tp, --sharing and --pieces."""
    how.add_argument("--on-llm", default="", metavar="UNIT,...", help="units on the LLM's ranks, each on all of them")
    how.add_argument("--tp", default="", metavar="UNIT=N,...", help="slices of units, with --on-llm (default: 1 each)")
    how.add_argument(
        "--sharing",
        choices=get_args(SharingOrder),
        default=NESTED,
        help="with --on-llm, nested: encoders run where the LLM waits; colocated: in front of it and behind (default: nested)",
    )
    how.add_argument(
        "--pieces", default="", metavar="UNIT=N,...", help="actions into which passes of units --on-llm are cut (default: 1 each)"
    )


def sharing_of(args: argparse.Namespace, topology: Topology, own_replicas: Mapping[str, int]) -> Sharing | None:
    """Return which units are on the LLM's ranks; None if none are.

    own_replicas: of the units that have another number than the LLM. Raises UserError.
    """
    from headrace.reorder_service.planning.sharing import Sharing

    guests = option_values.parse_units("--on-llm", args.on_llm, topology.stages)
    widths, pieces = (_counts(flag, text, topology) for flag, text in (("--tp", args.tp), ("--pieces", args.pieces)))
    if not guests:
        if widths or pieces or args.sharing != NESTED:
            raise UserError("--tp, --sharing and --pieces go with --on-llm: name there which units are on the LLM's ranks")
        return None
    for unit in topology.stages:
        if unit in widths and unit not in (*guests, LLM):
            raise UserError(f"--tp is for {LLM!r} and the units of --on-llm: take {unit}={widths[unit]} away")
    slices = {unit: widths.get(unit, 1) for unit in topology.stages}
    places = {unit: own_replicas.get(unit, topology.replicas) * slices[unit] * n for unit, n in topology.stages.items()}
    units = {unit: UnitExecution(on=LLM if unit in guests else None, pieces=pieces.get(unit, 1)) for unit in topology.stages}
    try:
        check_units(units, topology.stages, args.chunks, args.schedule)
        check_sharing(units, args.sharing, places)
    except ValueError as err:
        raise UserError(f"--on-llm: {err}") from err
    return Sharing(
        order=args.sharing,
        slices={unit: slices[unit] for unit in topology.stages if unit in guests or unit == LLM},
        pieces=pieces,
    )


def _counts(flag: str, text: str, topology: Topology) -> dict[str, int]:
    """Return what a flag says of the units that it names. Raises UserError."""
    counts = option_values.parse_counts(flag, text) if text else {}
    option_values.parse_units(flag, ",".join(counts), topology.stages)
    return counts
