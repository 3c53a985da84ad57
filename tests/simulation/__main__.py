from tests.simulation import determinism
determinism.install()
import time, sys, logging
if "-v" in sys.argv: logging.basicConfig(level=logging.DEBUG)
from tests.simulation.simulation_run import undisturbed
t=determinism._real["monotonic"]
for i in range(3):
    b=t()
    found, world, trainers = undisturbed(0)
    print(len(found), found[:1], world.loop.time(), world.loop.num_callbacks, world.network.num_messages, world.store.num_requests, t()-b, trainers.errors, world.loop.errors[:3], [s.errors for s in world.servers])
