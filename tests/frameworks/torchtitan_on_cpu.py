"""Runs a script with torchtitan EMULATED on the processor: where there is no GPU it asks torch.cuda for one all the same.

python tests/frameworks/torchtitan_on_cpu.py SCRIPT ARGUMENTS
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


class ProcessorAsDevice:
    """The functions of `torch.cuda` that torchtitan calls, for the processor."""

    set_device = synchronize = empty_cache = reset_peak_memory_stats = staticmethod(lambda *_: None)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    get_device_name = staticmethod(lambda _: "EMULATED")
    get_device_properties = staticmethod(lambda _: SimpleNamespace(total_memory=1 << 40, name="EMULATED"))

    @staticmethod
    def memory_stats(_: Any) -> dict[str, int]:
        """As `torch.cuda.memory_stats` has them, all 0."""
        names = ("active_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms")
        return dict.fromkeys(names, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def divide_behind_sums(module: FSDPModule, factor: float) -> None:
    """As `FSDPModule.set_gradient_divide_factor`; gloo has no sum that multiplies before."""
    set_gradient_divide_factor(module, factor)
    module.set_force_sum_reduction_for_comms(True)


set_gradient_divide_factor = FSDPModule.set_gradient_divide_factor

if __name__ == "__main__":
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", ProcessorAsDevice()
    FSDPModule.set_gradient_divide_factor = divide_behind_sums
    if not hasattr(dist, "set_timeout"):  # of a later torch: it shortens the timeout behind the first step
        dist.set_timeout = lambda timeout, group=None: None
    sys.stderr = sys.stdout  # where it logs the losses
    print("EMULATED: torchtitan on the processor", flush=True)
    script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
