"""fail NAME SENTENCE [count=1] [damaged=3,5]: a preprocessor reports that it cannot carry out its oldest orders, so many of them.

`damaged`: the rows that it cannot decode, where that is why.
"""

from __future__ import annotations

from tests.golden.data_set import rows_of
from tests.golden.world import World


async def run(world: World, name: str, sentence: str, *, count: int = 1, damaged: str = "") -> None:
    preprocessor = world.preprocessors[name]
    for lease in list(preprocessor.orders)[:count]:
        preprocessor.fail(lease, sentence, rows_of(damaged))
