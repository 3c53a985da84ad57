"""One run: a job from its submission to its last commit, in a world with faults, and what the checkers say of it."""

from __future__ import annotations

import json

from headrace import rpc
from headrace.spec import JobSpec
from headrace.v1 import jobs_pb2, jobs_pb2_grpc
from tests.simulation.data_set import job_spec
from tests.simulation.fibers import in_fiber, sleep
from tests.simulation.trainers import Trainers
from tests.simulation.world import World


def ledger(world: World, job: str) -> list[tuple[tuple[str, ...], float]]:
    """(samples, loss) of each committed step, as the store has them."""
    entries = [json.loads(entry) for entry in world.store.redis.data.get(f"headrace:{{{job}}}:ledger", [])]
    return [(tuple(entry["samples"]), entry["loss"]) for entry in entries]


def submit(world: World, spec: JobSpec) -> None:
    """Have a tool submit a job, which tries until a service takes it."""

    def ask() -> None:
        while True:
            try:
                with rpc.channel(world.endpoint) as channel:
                    stub = jobs_pb2_grpc.JobsStub(channel)
                    rpc.call(stub.Submit, jobs_pb2.SubmitRequest(spec_json=spec.to_json()), world.endpoint)
                return
            except Exception:
                sleep(0.5)

    world.new_process("tool").spawn(in_fiber(ask))


def undisturbed(seed: int = 0) -> tuple[list[tuple[tuple[str, ...], float]], World, Trainers]:
    world = World(seed)
    with world.running():
        for actor in (*world.services, *world.preprocessors):
            actor.start()
        spec = job_spec("job")
        submit(world, spec)
        trainers = Trainers(world, "job", 2, step_s=(1.0, 1.0), together=False)
        trainers.start()
        world.run_until(lambda: trainers.are_done, 300.0)
        found = ledger(world, "job")
        world.close()
    return found, world, trainers
