"""open RANK NUM_RANKS [replicas=0,1] [unit=llm] [resume=STEP] [generation=N] [together=0] [host=NAME]: a rank opens a session.

It then reads its plans (`told`). `replicas`: those of `unit` that it takes, as a process of a pipeline; without, rank r of n
takes every n-th from r on. `resume`: the step of the model that it has loaded. `generation`: that of the session that it
continues. `together`: 1 if it is a node of several that commit together. `host`: whose ranks read and commit over one
stream; without, the rank has one of its own.
"""

from __future__ import annotations

from headrace.v1.sessions_pb2 import OpenRequest
from tests.golden.scripted_host import Host
from tests.golden.scripted_rank import Rank
from tests.golden.world import World


async def run(
    world: World,
    rank: int,
    num_ranks: int,
    *,
    replicas: str = "",
    unit: str = "",
    resume: int = -1,
    generation: int = 0,
    together: int = 0,
    host: str = "",
) -> None:
    request = OpenRequest(
        job=world.job,
        rank=rank,
        num_ranks=num_ranks,
        replicas=map(int, filter(None, replicas.split(","))),
        unit=unit,
        together=bool(together),
        patient=True,
        resume_step=resume if resume >= 0 else None,
        generation=generation or None,
    )
    opening = world.ranks.setdefault(rank, Rank(world=world, rank=rank))
    if host and host not in world.hosts:
        world.hosts[host] = Host(world=world, name=host)
        world.hosts[host].connect()
    opening.host = world.hosts[host] if host else None
    await world.call(opening.who, opening.open(request))
