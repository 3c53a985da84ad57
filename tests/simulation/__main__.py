from tests.simulation import determinism
determinism.install()
import sys, logging
if "-v" in sys.argv: logging.basicConfig(level=logging.DEBUG, format="%(message)s")
else: logging.disable(logging.CRITICAL)
from tests.simulation.simulation_run import run
from tests.simulation.fault_plan import *
t=determinism._real["monotonic"]
b=t(); sim=0
for seed in range(int(sys.argv[1]), int(sys.argv[2])):
    setting=draw_setting(seed)
    out=run(seed, setting, draw_faults(seed, setting))
    sim+=out.simulated_s
    if out.violations or len(sys.argv)>3:
        print("seed", seed, setting); 
        for f in out.faults: print("   ", f)
        print("   ->", out.violations[:3], out.simulated_s, out.digest)
print(sim, t()-b, sim/(t()-b))
