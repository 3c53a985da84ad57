"""When the GPUs of one pipeline of the LLM run its kernels in a step, and when they need an encoder's output (Optimus, figure 8).

All GPUs of a stage's tensor-parallel group do the same at the same time, so a stage stands for them. Time counts from the start
of the data-parallel all-gather of weights, with which the LLM's step begins. Behind a stage's last backward comes the
reduce-scatter of its gradients. The step ends when that is over on every stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.reorder_service.planning.batch import Floats
from headrace.reorder_service.planning.bubbles.adjusted_warm_up import (
    BACKWARD,
    FORWARD,
    TimedActions,
    adjusted_actions,
    megatron_actions,
)
from headrace.reorder_service.planning.bubbles.layer_kernels import LayerKernels, Passes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LlmPlan:
    """How the LLM is divided and what its parts take.

    Raises ValueError for a number below 1, layers that cannot be dealt evenly to the chunks of all stages, or a negative time.
    """

    replicas: int
    """Data-parallel pipelines."""
    stages: int
    tensor: int
    """Tensor-parallel ranks of a stage."""
    microbatches: int
    """Per pipeline and step."""
    layers: int
    layer: Passes
    """One microbatch's pass through one layer with so many tensor-parallel ranks."""
    chunks: int = 1
    """Model chunks (virtual stages) of each stage."""
    all_gather_s: float = 0.0
    """Data-parallel exchange of weights in front of the step, as far as nothing hides it."""
    reduce_scatter_s: float = 0.0
    """Data-parallel exchange of gradients behind it, likewise."""
    hop_s: float = 0.0
    """From the end of a stage's chunk until the next stage may start on it."""
    weights: int = 0
    """Number of parameters."""
    activation_bytes: float = 0.0
    """Most activations that a GPU keeps of the LLM at any time."""

    def __post_init__(self) -> None:
        counts = (self.replicas, self.stages, self.tensor, self.microbatches, self.layers, self.chunks)
        if min(counts) < 1:
            raise ValueError(f"an LLM's replicas, stages, tensor, microbatches, layers and chunks count from 1, got {counts}")
        if self.layers % (self.stages * self.chunks):
            raise ValueError(
                f"{self.layers} layers cannot be dealt evenly to {self.stages} stages of {self.chunks} chunks; "
                "take a divisor of the layers"
            )
        if min(self.all_gather_s, self.reduce_scatter_s, self.hop_s) < 0 or min(self.weights, self.activation_bytes) < 0:
            raise ValueError("an LLM's plan has no negative seconds, weights or bytes")

    @property
    def gpus(self) -> int:
        """Number of GPUs of all pipelines."""
        return self.replicas * self.stages * self.tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LlmTimeline:
    """The LLM's step, without any encoder."""

    actions: TimedActions
    """In seconds from the start of the step."""
    kernels: tuple[LayerKernels, LayerKernels]
    """Those of a forward and of a backward of one chunk."""
    forward_due_s: Floats
    """(N,) when the first stage starts the first chunk's forward of a microbatch (F_i): its encoders are to be done by then."""
    backward_ready_s: Floats
    """(N,) when the first stage has ended the first chunk's backward (B_i): its encoders' backward may start then."""
    first_s: Floats
    """(S,) when a stage starts its first action."""
    last_s: Floats
    """(S,) when a stage ends its last action."""
    end_s: float
    """When the last stage is done with its reduce-scatter."""

    @property
    def num_stages(self) -> int:
        return self.first_s.size


def time_llm(plan: LlmPlan, *, adjusted: bool = True) -> LlmTimeline:
    """Time the LLM's step. adjusted: with the warm-up of `adjusted_actions`, else with that of Megatron-LM."""
    per_chunk = plan.layers // (plan.stages * plan.chunks)
    kernels = plan.layer.forward.repeated(per_chunk), plan.layer.backward.repeated(per_chunk)
    seconds = np.empty((2, plan.stages, plan.chunks))
    seconds[FORWARD], seconds[BACKWARD] = kernels[FORWARD].total_s, kernels[BACKWARD].total_s
    timed = (adjusted_actions if adjusted else megatron_actions)(seconds, plan.microbatches, plan.hop_s)
    actions = TimedActions(
        kind=timed.kind,
        chunk=timed.chunk,
        microbatch=timed.microbatch,
        start_s=timed.start_s + plan.all_gather_s,
        end_s=timed.end_s + plan.all_gather_s,
    )
    return LlmTimeline(
        actions=actions,
        kernels=kernels,
        forward_due_s=_of_first_chunk(actions, FORWARD, actions.start_s),
        backward_ready_s=_of_first_chunk(actions, BACKWARD, actions.end_s),
        first_s=actions.start_s[:, 0],
        last_s=actions.end_s[:, -1],
        end_s=actions.makespan_s + plan.reduce_scatter_s,
    )


def _of_first_chunk(actions: TimedActions, kind: int, at_s: Floats) -> Floats:
    """Return (N,) a time of each microbatch's action of that kind on the first stage's first chunk."""
    places = (actions.kind[0] == kind) & (actions.chunk[0] == 0)
    of_microbatch = np.empty(int(actions.microbatch.max()) + 1)
    of_microbatch[actions.microbatch[0, places]] = at_s[0, places]
    return of_microbatch
