"""Runs a script with torchtitan EMULATED on the processor: torchtitan itself knows accelerators only.

python tests/frameworks/torchtitan_on_cpu.py SCRIPT ARGUMENTS

The processor is given out as torchtitan's accelerator, what it asks of an accelerator's memory is answered with nothing, and
models have causal attention without masks in place of flex attention, which is not trained on processors.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def give_out_the_processor() -> None:
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda device=None: "EMULATED"
    cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 30)
    cpu.current_device = lambda: 0
    cpu.memory_stats = lambda device=None: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
    torch.distributed.set_timeout = lambda timeout, group: None  # what torchtitan 0.3 calls and torch 2.13 does not have
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    llama3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()


if __name__ == "__main__":
    give_out_the_processor()
    script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
