"""join NAME [slots=4] [answers=all] [speed=0] [restarts=0] [instance=NAME]: a preprocessor connects.

`answers`: the kinds of orders that it carries out by itself, of list, index, probe, decode, or all, or none; it keeps the others
until `answer` or `fail`. `speed`: samples a second, one order after the other; 0: all at once. `restarts`: seconds after which it
comes back where a sample has killed it; 0: never. `instance`: which process it is.
"""

from __future__ import annotations

from tests.golden.scripted_preprocessor import KINDS, Preprocessor
from tests.golden.world import World


async def run(
    world: World,
    name: str,
    *,
    slots: int = 4,
    answers: str = "all",
    speed: float = 0.0,
    restarts: float = 0.0,
    instance: str = "",
) -> None:
    kinds = KINDS.values() if answers == "all" else [] if answers == "none" else answers.split(",")
    joining = Preprocessor(
        world=world,
        name=name,
        slots=slots,
        answers=frozenset(kinds),
        speed=speed,
        restarts_s=restarts,
        instance=instance,
    )
    joining.connect()
    await world.settle()
    if joining.is_connected:
        world.preprocessors[name] = joining
