"""Speed of one stage of a 7B LLM: matrix products alone, the stage's steps beside the device's peak, and how long it idles.

The steps are whole ones of the pipeline runtime: forward and backward of eight microbatches, clipping, AdamW.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.idle_share import idle_percent
from benchmarks.gpu.isolated_check import skipped
from benchmarks.gpu.stage_alone import StageAlone, process_group, stage_alone
from benchmarks.gpu.target import Target
from benchmarks.report import Rival, Row, at_least, at_most
from headrace.model_shape import LLM_SHAPES, TransformerShape

MICROBATCHES, TINY_MICROBATCHES = 8, 2
LENGTHS, TINY_LENGTHS = (4096, 2048, 1024, 1000, 24), (24, 16, 1)
"""Tokens of the samples of a microbatch: 8,192 in all."""
SMALL_VOCAB = 1024
MFU_GOAL, IDLE_GOAL_PERCENT = 0.45, 5.0
WARM_UP, STEPS, PROFILED_STEPS = 2, 4, 2


def measure(target: Target) -> Iterator[Row]:
    """Yield the rates of a matrix product and of stages, and the share of time in which the device has nothing to do.

    The last stage has half of the layers, so that its head of a real vocabulary finds room.
    """
    matrices = matrix_flops_per_s(target)
    peak, of_peak = peak_of(target, matrices)
    yield Row(
        name="matrix product, bf16",
        value=matrices / 1e12,
        unit="TFLOP/s",
        rival=Rival(value=peak / 1e12, source=of_peak) if target.peak_flops_per_s else None,
    )
    shape = target.llm_shape
    half = replace(shape, layers=max(1, shape.layers // 2))
    vocab_size = LLM_SHAPES["qwen2-7b"].vocab if target.is_gpu else SMALL_VOCAB
    with process_group(target.device):
        yield from _middle_rows(target, shape, peak)
        _release(target)
        last = f"the last stage: {half.layers} layers and a head of {vocab_size:,} tokens"
        yield _mfu_row(last, _built(target, half, vocab_size), half, target, peak)
        _release(target)
        yield _compiled_row("layers alone, compiled", shape, SMALL_VOCAB, target, peak)
        _release(target)
        yield _compiled_row(f"{last}, compiled", half, vocab_size, target, peak)
        _release(target)
        name = "layers alone, FlashAttention 3"
        try:
            torch.nn.attention.activate_flash_attention_impl("FA3")
        except Exception as err:  # whatever a package that is not there raises
            yield skipped(name, f"{type(err).__name__}: {' '.join(str(err).split())[:120]}")
        else:
            yield _mfu_row(name, _built(target, shape, SMALL_VOCAB), shape, target, peak)


def _middle_rows(target: Target, shape: TransformerShape, peak: float) -> Iterator[Row]:
    alone = _built(target, shape, SMALL_VOCAB)
    yield _mfu_row("a stage in the middle: layers alone", alone, shape, target, peak)
    share = idle_percent(lambda: [alone.run() for _ in range(PROFILED_STEPS)], target)
    yield Row(name="idle share of the device", value=share, unit="%", goal=target.goal(at_most(IDLE_GOAL_PERCENT)))


def peak_of(target: Target, matrices: float) -> tuple[float, str]:
    """Return the FLOP/s that MFU is relative to, and where they come from: the data sheet, else `matrices`, as measured."""
    published = target.peak_flops_per_s
    return (published, "data sheet, dense") if published else (matrices, "a large matrix product, measured")


def matrix_flops_per_s(target: Target) -> float:
    """Return the FLOP/s of a large square matrix product in bfloat16."""
    size = 8192 if target.is_gpu else 128
    a, b = (torch.randn(size, size, device=target.device, dtype=torch.bfloat16) for _ in range(2))
    seconds = [_timed(lambda: [a @ b for _ in range(10)], target) / 10 for _ in range(4)]
    return 2 * size**3 / min(seconds)


def model_flops(num_weights: int, lengths: Sequence[int], shape: TransformerShape) -> float:
    """Return the operations of forward and backward: 6 for each token and weight, and 6 l^2 width a layer for the attention in a
    segment of l tokens, of which causal attention needs half the matrix (PaLM: Chowdhery et al. 2022, appendix B)."""
    return 6 * sum(lengths) * num_weights + 6 * shape.layers * shape.width * sum(length**2 for length in lengths)


def _built(target: Target, shape: TransformerShape, vocab_size: int, **of_unit: Any) -> StageAlone:
    lengths = [LENGTHS] * MICROBATCHES if target.is_gpu else [TINY_LENGTHS] * TINY_MICROBATCHES
    return stage_alone(shape, lengths, vocab_size=vocab_size, device=target.device, dtype=torch.bfloat16, **of_unit)


def _compiled_row(name: str, shape: TransformerShape, vocab_size: int, target: Target, peak: float) -> Row:
    if not target.is_gpu:
        return skipped(f"MFU, {name}", "what torch compiles for a CPU takes a minute and says nothing of a GPU")
    return _mfu_row(name, _built(target, shape, vocab_size, compile=True), shape, target, peak)


def _mfu_row(name: str, alone: StageAlone, shape: TransformerShape, target: Target, peak: float) -> Row:
    for _ in range(WARM_UP):
        alone.run()
    seconds = median(_timed(alone.run, target) for _ in range(STEPS))
    lengths = [length for one in alone.batch for length in one.cu_seqlens.diff().tolist()]
    flops = model_flops(alone.num_weights, lengths, shape)
    memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most" if target.is_gpu else ""
    return Row(
        name=f"MFU, {name}",
        value=flops / seconds / peak,
        unit="of the peak",
        goal=target.goal(at_least(MFU_GOAL)),
        detail=f"{shape.layers} layers, {1e3 * seconds:.0f} ms a step, {alone.num_tokens / seconds:,.0f} tokens/s{memory}",
    )


def _timed(run: Callable[[], object], target: Target) -> float:
    target.synchronize()
    began_s = time.perf_counter()
    run()
    target.synchronize()
    return time.perf_counter() - began_s


def _release(target: Target) -> None:
    if target.is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
