"""How often torch.compile compiles a block anew where every microbatch has other lengths: a compilation takes seconds.

Without a GPU, an operation with the arguments of the flash kernel stands for it: the CPU's dense kernel is called for runs of
equal lengths, so that each microbatch is another program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.target import Target
from benchmarks.report import Row, at_most
from headrace.trainer.loading.device_copy import to_device
from headrace.trainer.models import block
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.block import decoder_blocks
from headrace.trainer.models.rotary import rotation

MICROBATCHES, TINY_MICROBATCHES = 50, 5
GOAL = 3


def measure(target: Target) -> Iterator[Row]:
    """Yield the compilations after the first microbatch. torch gives up at eight of one function, and no longer compiles it.

    Only the tracing counts, which decides on them: the graphs themselves are run as they are.
    """
    graphs = 0

    def counting(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    shape = target.llm_shape
    compiled = torch.compile(decoder_blocks(shape)[0].to(target.device), dynamic=True, backend=counting)
    rng, of_first = np.random.default_rng(0), 0
    count = MICROBATCHES if target.is_gpu else TINY_MICROBATCHES
    with nullcontext() if target.is_gpu else _emulated_flash():
        for number in range(count):
            lengths = rng.integers(1, 60, rng.integers(2, 9)).tolist()
            offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            positions = torch.arange(sum(lengths), device=target.device)[:, None]
            x = torch.randn(sum(lengths), shape.width, device=target.device, requires_grad=True)
            angles = rotation(positions, shape.width // shape.heads, theta=1e6)
            with torch.autocast(target.device_type, torch.bfloat16):
                compiled(x, angles, to_device(Segments.of(offsets), target.device)).sum().backward()
            of_first = graphs if number == 0 else of_first
    yield Row(
        name=f"recompilations in {count - 1} microbatches after the first",
        value=graphs - of_first,
        unit="graphs",
        goal=target.goal(at_most(GOAL)),
        detail=f"{of_first} graphs of the first",
    )


@contextmanager
def _emulated_flash() -> Iterator[None]:
    """Have blocks call an operation that takes what the flash kernel takes, and computes nothing of use."""

    @torch.library.custom_op("headrace_emulated::flash", mutates_args=())
    def flash(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:  # noqa: ARG001
        return q.clone()

    flash.register_fake(lambda q, *_: torch.empty_like(q))
    flash.register_autograd(lambda _, gradient: (gradient, None, None, None, None))
    real = block.packed_attention  # type: ignore[attr-defined]

    def attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, **_: Any) -> Tensor:
        output: Tensor = flash(q, k, v, segments.cu_seqlens, segments.longest)
        return output

    block.packed_attention = attention  # type: ignore[attr-defined]
    try:
        yield
    finally:
        block.packed_attention = real  # type: ignore[attr-defined]
