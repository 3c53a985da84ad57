"""data [shards=1] [rows=24] [bad=3,5] [deadly=7]: make the data set. Every source then has this many shards, of so many rows.

Rows are counted within a shard. Those in `bad` are refused when they are probed; those in `deadly` end every preprocessor that
probes or decodes them.
"""

from __future__ import annotations

from tests.golden.data_set import Data, rows_of
from tests.golden.world import World


async def run(world: World, *, shards: int = 1, rows: int = 24, bad: str = "", deadly: str = "") -> None:
    world.data = Data(shards=shards, rows=rows, bad=rows_of(bad), deadly=rows_of(deadly))
