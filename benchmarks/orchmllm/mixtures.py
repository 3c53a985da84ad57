"""Batches of OrchMLLM's models (table 1) on ranks that meet after every phase, of the mixture of `headrace experiment`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from headrace.cli.experiment.orchmllm_experiments import PHASES, TAILORED
from headrace.cli.experiment.orchmllm_samples import SETTINGS, draw
from headrace.plan import Topology
from headrace.published_models import PUBLISHED_MODELS
from headrace.reorder_service.planning.batch import Batch, Floats, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.post_balancing_options import Form, PostBalancing
from headrace.reorder_service.planning.simulation.phase_step import AFTER_PHASES

RANKS_PER_NODE = 8
OPERATIONS_PER_S = 4e14  # of a rank: it scales all times alike
BYTES = 2  # of a channel of what an encoder sends
ALL_PACKED: Mapping[str, Form] = {**TAILORED, "audio": "no_padding"}
ALL_PADDED: Mapping[str, Form] = {**TAILORED, "vision": "padded"}


def batch_of(model: str, ranks: int, per_rank: int, seed: int = 0) -> Batch:
    """Draw a global batch for a model whose audio encoder pads its recordings; nodes have RANKS_PER_NODE ranks."""
    mixture, setting = draw(model, ranks * per_rank, seed), SETTINGS[model]
    sent: dict[str, Floats] = {
        "vision": np.ceil(mixture.vision / setting.vision_merge),
        "audio": np.ceil(mixture.audio / setting.audio_merge),
        "llm": np.zeros(mixture.llm.size),
    }
    width = PUBLISHED_MODELS[model].llm.width
    return make_batch(
        np.arange(mixture.llm.size),
        {phase: mixture.work(phase) / OPERATIONS_PER_S for phase in PHASES},
        Topology(replicas=ranks, microbatches=1, stages=dict.fromkeys(PHASES, 1)),
        seed,
        execution=Execution(colocated=AFTER_PHASES, post_balancing=PostBalancing(forms=TAILORED, ranks_per_node=RANKS_PER_NODE)),
        transfer_bytes={unit: BYTES * width * tokens for unit, tokens in sent.items()},
    )


def planned_for(batch: Batch, forms: Mapping[str, Form], ranks_per_node: int = RANKS_PER_NODE) -> Batch:
    """Return the batch as a planner sees it that takes its units to be of these forms, on nodes of so many ranks."""
    options = PostBalancing(forms=forms, ranks_per_node=ranks_per_node)
    return replace(batch, execution=replace(batch.execution, post_balancing=options))
