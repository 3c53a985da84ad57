"""`python -m benchmarks.scale.telling MODE LANES`: how long telling a step's plan and places takes the event loop.

The real sessions and the real gRPC service, without a fleet and without a store: steps are planned beforehand, and their parts
are taken in BURSTS. Every HOST_RANKS ranks share a connection of benchmarks.scale.listeners, which reads and does not parse, so
that this machine is the service's as far as that goes. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np

from benchmarks.scale.workload import TOLD_MODES
from headrace.plan import Topology
from headrace.reorder_service.api.sessions import SessionsServicer, add_to_server
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.jobs.sessions import Session, Sessions
from headrace.reorder_service.loop_turns import LoopTurns
from headrace.reorder_service.planning.strategies import plan
from headrace.rpc import Server
from headrace.sample import Probe, SampleRef
from headrace.ticket import make_ticket

STAGES = 16  # of the LLM, beside one of the encoder: 17 ranks a lane
MICROBATCHES, SAMPLES, PART_SAMPLES = 16, 8, 16
STEPS = 5
BURSTS, BURST_S = 16, 0.02  # preprocessors take the parts of a step in about a third of a second
PAUSE_S = 0.5  # until the next step
OPEN_TIMEOUT_S, TOLD_TIMEOUT_S = 120.0, 60.0


class Service:
    """Stands in for the reorder service and its job, as far as the real servicer of sessions asks for them."""

    has_stopped, num_relays = False, 0

    def __init__(self, sessions: Sessions) -> None:
        self.name, self.sessions, self.service, self.turns = "scale", sessions, self, LoopTurns()

    def find_session(self, session_id: str) -> tuple[Service, Session]:
        return self, next(session for session in self.sessions.by_rank.values() if session.id == session_id)


def open_sessions(mode: str, lanes: int) -> Sessions:
    """Open the sessions of all ranks of a job. `mode`: of TOLD_MODES. `lanes`: replicas of the LLM."""
    sessions, ranks = Sessions("scale"), lanes * (STAGES + 1)
    for rank in range(ranks):
        if mode == "nodes":
            sessions.open(rank, 1, lanes, together=True)
        else:
            encoders = lanes - (mode == "one lane")  # which has another number of encoder replicas, so that all lanes are one
            of_encoder = range(lanes) if mode == "one lane" else [rank]
            sessions.open(rank, ranks, lanes, of_encoder if rank < encoders else [(rank - encoders) // STAGES % lanes])
    return sessions


def make_step(index: int, lanes: int) -> PlannedStep:
    """Return a step that is planned, and cut into parts that no preprocessor has taken."""
    rng, count = np.random.default_rng(index), lanes * MICROBATCHES * SAMPLES
    ids = np.arange(index * count, (index + 1) * count)
    topology = Topology(replicas=lanes, microbatches=MICROBATCHES, stages={"vision": 1, "llm": STAGES})
    planned = plan("entrain", ids, {"vision": rng.lognormal(0, 1, count), "llm": rng.lognormal(0, 0.8, count)}, topology, index)
    step = PlannedStep(index=index, refs=[SampleRef(sample_id=i, shard=i // 1000, row=i % 1000) for i in ids.tolist()])
    step.probes = dict.fromkeys(ids.tolist(), Probe(name="", num_tokens=1, num_targets=1))
    step.sample_ids = ids
    step.cut(planned, part_samples=PART_SAMPLES, ticket=lambda part: make_ticket("scale", f"uid/1/{part}", b"k" * 32))
    return step


class LongestTurn:
    """Measures how long the event loop works at a time, in CPU seconds of its thread: what others do does not count."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        while True:
            began_s = time.thread_time()
            await asyncio.sleep(0.001)
            self.longest_s = max(self.longest_s, time.thread_time() - began_s)


async def _tell(sessions: Sessions, step: PlannedStep) -> None:
    sessions.tell_step(step)
    parts = list(step.parts.values())
    for burst in range(BURSTS):
        for number, part in enumerate(parts[burst::BURSTS]):
            part.lease, part.endpoint = f"preprocessor-{number % 256}-abc-{number}", f"10.0.12.{number % 256}:7100"
            sessions.tell_location(part)
        await asyncio.sleep(BURST_S)
    await asyncio.sleep(PAUSE_S)


async def _run(mode: str, lanes: int) -> dict[str, Any]:
    steps = [make_step(index, lanes) for index in range(1 + STEPS)]
    sessions, turns = open_sessions(mode, lanes), LongestTurn()
    servicer = SessionsServicer(Service(sessions))  # type: ignore[arg-type]
    server = Server("127.0.0.1:0", {"headrace.v1.Sessions": lambda grpc_server: add_to_server(servicer, grpc_server)})
    await server.start()
    command = [sys.executable, "-m", "benchmarks.scale.listeners", server.endpoint]
    listeners = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    assert listeners.stdin is not None
    listeners.stdin.write(json.dumps([session.id for session in sessions.by_rank.values()]).encode() + b"\n")
    deadline_s = time.monotonic() + OPEN_TIMEOUT_S
    while not all(session.streaming for session in sessions.by_rank.values()):
        assert time.monotonic() < deadline_s, "not every rank listens"
        await asyncio.sleep(0.1)
    await _tell(sessions, steps[0])  # connections and allocators are warm then
    watching, began_s = asyncio.create_task(turns.watch()), time.thread_time()
    for step in steps[1:]:
        await _tell(sessions, step)
    for session in list(sessions.by_rank.values()):
        session.tell_end("")
    async with asyncio.timeout(TOLD_TIMEOUT_S):
        printed, _ = await listeners.communicate()  # each has heard all
    loop_s = time.thread_time() - began_s
    watching.cancel()
    await server.stop(0.0)
    heard = [received / len(steps) for received in json.loads(printed)]
    return {
        "ranks": len(sessions.by_rank),
        "samples": len(steps[0].sample_ids),
        "loop_s": loop_s / STEPS,
        "turn_s": turns.longest_s,
        "host_bytes": max(heard),
        "all_bytes": sum(heard),
    }


if __name__ == "__main__":
    assert sys.argv[1] in TOLD_MODES, sys.argv[1]
    print(json.dumps(asyncio.run(_run(sys.argv[1], int(sys.argv[2])))), flush=True)
