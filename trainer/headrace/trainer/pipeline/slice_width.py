"""How many slices the layers of a unit can be cut into."""

from __future__ import annotations

import math

from headrace.errors import UserError
from headrace.model_shape import TransformerShape


def check_width(unit: str, shape: TransformerShape, tp: int) -> None:
    """Raise UserError unless a unit of that shape can be cut into `tp` slices of equally many heads and inner channels."""
    divided = {"heads": shape.heads, "kv_heads": shape.kv_heads, "mlp": shape.mlp}
    for name, number in divided.items():
        if number % tp:
            raise UserError(
                f"tp {tp} of unit {unit!r} does not divide its {name} {number}: "
                f"set its tp to a divisor of {math.gcd(*divided.values())}"
            )
