"""Runs a script with Megatron-Core EMULATED on the processor: its schedules make tensors on "cuda" whatever the model is on.

python tests/frameworks/megatron_on_cpu.py SCRIPT ARGUMENTS
"""

from __future__ import annotations

import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch.overrides import TorchFunctionMode


class OnTheProcessor(TorchFunctionMode):
    """Tensors that are to be made on "cuda" are made on the processor."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


if __name__ == "__main__":
    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda: None
    CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()  # there is no GPU whose generator is put aside
    script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    with OnTheProcessor():
        runpy.run_path(script, run_name="__main__")
