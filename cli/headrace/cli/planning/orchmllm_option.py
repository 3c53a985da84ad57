"""The option `--orchmllm`: how strategy `orchmllm` balances the units, and how many ranks share a node."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.reorder_service.planning.post_balancing_options import PostBalancing

EXAMPLE = "audio=fourth,lambda=0.5,ranks-per-node=8"
HELP = (
    "how orchmllm balances: a form for each UNIT (no_padding, padded, third or fourth), lambda, tolerance of third, "
    f"ranks-per-node; like {EXAMPLE}"
)
_NUMBERS = {"lambda": ("quadratic", float), "tolerance": ("tolerance", float), "ranks-per-node": ("ranks_per_node", int)}


def post_balancing_of(text: str, units: Collection[str]) -> PostBalancing:
    """Parse the option's text for pipelines with these units; an empty text gives the defaults. Raises UserError."""
    from headrace.reorder_service.planning.post_balancing_options import PostBalancing

    forms: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    for item in text.split(",") if text else ():
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in _NUMBERS and key not in units:
            raise UserError(
                f"--orchmllm names {key!r}, which is neither one of {', '.join(_NUMBERS)} nor a unit ({', '.join(units)})"
            )
        if key in forms or (key in _NUMBERS and _NUMBERS[key][0] in numbers):
            raise UserError(f"--orchmllm names {key!r} twice")
        if key not in _NUMBERS:
            forms[key] = value
            continue
        field, number = _NUMBERS[key]
        try:
            numbers[field] = number(value)
        except ValueError as err:
            kind = "a whole number" if number is int else "a number"
            raise UserError(f"--orchmllm {key} must be {kind}, like {EXAMPLE}, got {value!r}") from err
    try:
        return PostBalancing(forms=forms, **numbers)
    except ValueError as err:
        raise UserError(f"--orchmllm: {err}") from err
