"""What a check runs on, and how large its work is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from benchmarks.report import Goal
from headrace.model_shape import LLM_SHAPES, TransformerShape

EMULATED = "EMULATED on the CPU, tiny shapes:"
"""What every section's title begins with where there is no GPU."""
DENSE_BF16_FLOPS_PER_S = {
    "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "H800": 989e12, "H20": 148e12, "GH200": 989e12, "B200": 2250e12,
    "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10": 125e12, "RTX 4090": 165e12,
}  # fmt: skip
"""Peak of matrix products in bfloat16 without sparsity by a part of the device's name, from the manufacturer's data sheets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A GPU, with others beside it or not, or the CPU in its place."""

    device_type: str
    """"cuda" or "cpu"."""
    num_gpus: int

    @classmethod
    def here(cls, *, cpu: bool = False) -> Self:
        """Return the GPUs of this machine, or the CPU where torch finds none, or `cpu` asks for it."""
        found = torch.cuda.device_count() if torch.cuda.is_available() and not cpu else 0
        return cls(device_type="cuda" if found else "cpu", num_gpus=found)

    @property
    def is_gpu(self) -> bool:
        return self.device_type == "cuda"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")

    @property
    def name(self) -> str:
        """The device in words, with the build of torch."""
        if not self.is_gpu:
            return f"no GPU, {EMULATED.removesuffix(':')}; torch {torch.__version__}"
        properties = torch.cuda.get_device_properties(0)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        return f"{self.num_gpus} x {properties.name} ({memory}), torch {torch.__version__}, CUDA {torch.version.cuda}"

    def title(self, text: str) -> str:
        """Return a section's title, which says so where nothing was measured on a GPU."""
        return text if self.is_gpu else f"{EMULATED} {text}"

    def goal(self, goal: Goal) -> Goal | None:
        """Return the goal of a figure that means something on a GPU only; None on the CPU."""
        return goal if self.is_gpu else None

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.is_gpu:
            torch.cuda.synchronize()

    @property
    def peak_flops_per_s(self) -> float | None:
        """Peak of the device's matrix products in bfloat16; None if it is not known."""
        return peak_flops_per_s(torch.cuda.get_device_name(0)) if self.is_gpu else None

    @property
    def llm_shape(self) -> TransformerShape:
        """The layers of the stage that is measured: a quarter of Qwen2-7B, or as much of it as fits; tiny ones on the CPU."""
        if not self.is_gpu:
            return TransformerShape(layers=2, width=64, heads=4, kv_heads=2, mlp=128, gated=True)
        memory = torch.cuda.get_device_properties(0).total_memory
        whole = LLM_SHAPES["qwen2-7b"]
        layers = 7 if memory > 70e9 else 3 if memory > 35e9 else 1
        sizes = {name: getattr(whole, name) for name in ("width", "heads", "kv_heads", "mlp", "gated")}
        return TransformerShape(layers=layers, **sizes)


def peak_flops_per_s(name: str) -> float | None:
    """Return the peak of a device by its name; None for one that DENSE_BF16_FLOPS_PER_S does not know."""
    matches = [part for part in DENSE_BF16_FLOPS_PER_S if part in name]
    return DENSE_BF16_FLOPS_PER_S[max(matches, key=len)] if matches else None
