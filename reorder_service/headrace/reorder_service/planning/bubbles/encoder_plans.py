"""How encoders are divided among the GPUs of an LLM's pipelines (Optimus, sections 4.1, 4.4 and 4.5).

An encoder pipeline has a divisor of the LLM's stages and of its tensor-parallel ranks. So GPUs of one pipeline of the LLM hold a
whole number of encoder pipelines: each takes neighbouring stages of the LLM and, in each of them, some of the tensor-parallel
ranks. All encoders are divided alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.reorder_service.planning.batch import Ints
from headrace.reorder_service.planning.bubbles.layer_kernels import Encoder
from headrace.reorder_service.planning.bubbles.llm_timeline import LlmPlan

STATE_BYTES = 6
"""Bytes of a learning parameter on its GPU: bf16 weight and fp32 gradient; a distributed optimizer's state is not in it."""
FROZEN_BYTES = 2
"""Bytes of a parameter that does not learn: bf16."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderPlan:
    """One way to divide the encoders."""

    stages: int
    tensor: int
    pipelines: int
    """Encoder pipelines on the GPUs of one pipeline of the LLM (m)."""
    replicas: int
    """Data-parallel pipelines of the encoders on all GPUs."""
    states_bytes: float
    """What a GPU holds of the LLM's and the encoders' parameters and gradients, and of the LLM's activations, in the mean."""
    overhead_bytes: float
    """What of it is there because the encoders have more replicas than the LLM."""

    def groups(self, llm: LlmPlan) -> Ints:
        """Return (m,) which of the groups of neighbouring stages each pipeline is on."""
        per_stage = llm.tensor // self.tensor
        return np.arange(self.pipelines) // per_stage

    def llm_stages(self, llm: LlmPlan) -> Ints:
        """Return (m, stages) the stage of the LLM on whose GPUs a stage of each encoder pipeline is."""
        return self.groups(llm)[:, None] * self.stages + np.arange(self.stages)

    def gpus(self, llm: LlmPlan) -> Ints:
        """Return (m, stages, tensor) the GPUs of each encoder pipeline, as LLM stage * LLM's tensor-parallel ranks + rank."""
        rank = (np.arange(self.pipelines) % (llm.tensor // self.tensor))[:, None] * self.tensor + np.arange(self.tensor)
        return self.llm_stages(llm)[..., None] * llm.tensor + rank[:, None, :]


def encoder_plans(encoders: Sequence[Encoder], llm: LlmPlan, memory_bytes: float) -> list[EncoderPlan]:
    """Return every plan that fits into a GPU's memory, with the fewest encoder pipelines first.

    Activations that encoders keep while they run ahead depend on the schedule; who makes one checks them (`bubble_planner`).

    Raises ValueError if there is no encoder, none of their profiles fits the LLM's plan, or no plan fits into memory.
    """
    if not encoders:
        raise ValueError("name at least one encoder")
    plans = sorted(_divisions(encoders, llm), key=lambda plan: (plan.pipelines, -plan.tensor))
    if not plans:
        raise ValueError(
            f"no number of tensor-parallel ranks that divides the LLM's {llm.tensor} has a profile of every encoder; "
            "profile the encoders for one"
        )
    fitting = [plan for plan in plans if plan.states_bytes <= memory_bytes]
    if not fitting:
        least = min(plan.states_bytes for plan in plans)
        raise ValueError(
            f"LLM and encoders need {least / _GIB:.1f} GiB on every GPU, which have {memory_bytes / _GIB:.1f}; "
            "give the LLM more stages or tensor-parallel ranks"
        )
    return fitting


def _divisions(encoders: Sequence[Encoder], llm: LlmPlan) -> Iterator[EncoderPlan]:
    fewest_layers = min(encoder.layers for encoder in encoders)
    learning = sum(0 if encoder.frozen else encoder.weights for encoder in encoders)
    frozen = sum(encoder.weights for encoder in encoders) - learning
    encoder_bytes = STATE_BYTES * learning + FROZEN_BYTES * frozen
    llm_bytes = STATE_BYTES * llm.weights * llm.replicas / llm.gpus + llm.activation_bytes
    for stages in _divisors(llm.stages):
        for tensor in _divisors(llm.tensor):
            if stages > fewest_layers or any(tensor not in encoder.layer for encoder in encoders):
                continue
            replicas = llm.gpus // (stages * tensor)
            yield EncoderPlan(
                stages=stages,
                tensor=tensor,
                pipelines=replicas // llm.replicas,
                replicas=replicas,
                states_bytes=llm_bytes + encoder_bytes * replicas / llm.gpus,
                overhead_bytes=encoder_bytes * (replicas - llm.replicas) / llm.gpus,
            )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
