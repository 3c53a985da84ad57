"""FSDP ranks beside one process: what is compared, and the plans and samples of a case."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, Literal

import numpy as np
import torch

from headrace.block_distribution import BLOCK as PLANNED_BLOCK
from headrace.model_shape import ModelShape
from headrace.plan import LLM, Microbatch, StepPlan, Topology
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.post_balancing_options import FORMS, Form, PostBalancing
from headrace.reorder_service.planning.strategies import plan as make_plan
from headrace.sample import UNIT_COLUMNS
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.models.multimodal import initialise
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.pipeline.stage import PROJECTORS, TRUNKS
from headrace.trainer.train_step import StepResult, TrainStep, make_optimizer
from tests.matrices import gradients_of, weights_of
from tests.verify.batches import IMAGE_TOKEN, SHAPE, costs_of, enlarge, make_row, packed, whole_model
from tests.verify.cases import FROZEN, frozen_in
from tests.verify.comparison import ENTRIES

RANKS = (1, 2, 4)
MODALITIES = (("vision",), ("audio",), ("vision", "audio"))
STRATEGIES = ("random", "llm-only", "orchmllm")
FROZEN_SETS = tuple(name for name in FROZEN if "generator" not in name)
MICROBATCHES = (1, 2)
DEGREES: tuple[int | Literal["auto"], ...] = (2, 4, "auto")
BLOCK = 8
"""Tokens of the blocks by which ranks share sequences: those of these samples are short."""
BOTH = MODALITIES[-1]
STEPS = 2
LEARNING_RATE = 1e-3
SEED = 1


@dataclass(frozen=True, slots=True)
class FsdpCase:
    """One combination."""

    ranks: int
    encoders: tuple[str, ...]
    frozen: str
    strategy: str
    microbatches: int
    samples: int = 12
    """Of a global batch."""
    moved: str = ""
    """What becomes of a plan: "permuted", the ranks of each unit by themselves; "hoarded", all of an encoder on the last rank."""
    refused: int = 0
    """How many samples of each step are found to be damaged when they are decoded."""
    shard_ranks: int | None = None
    dtype: str = "float32"
    checkpointing: bool = False
    max_grad_norm: float = 1e9
    dropout: float = 0.0
    layers: int = 0
    """Of each unit; 0: as in the pipelines' cases."""
    form: Form = "no_padding"
    """Of all units: what `orchmllm` balances, and how their layers run."""
    cp: int | Literal["auto"] = 1
    """How many ranks share each sequence of the LLM."""

    def __str__(self) -> str:
        others = [self.form * (self.form != "no_padding"), self.moved]
        others += [f"{self.refused} refused" * bool(self.refused), self.dtype * (self.dtype != "float32")]
        others += [f"shards of {self.shard_ranks}" * bool(self.shard_ranks), "recomputed" * self.checkpointing]
        others += [f"cp {self.cp}" * (self.cp != 1), "clipped" * (self.max_grad_norm < 1), "dropout" * bool(self.dropout)]
        first = f"{self.ranks} ranks, {'+'.join(self.encoders)}, {self.frozen}, {self.strategy}, K {self.microbatches}"
        return ", ".join([first, *filter(None, others)])

    @property
    def units(self) -> tuple[str, ...]:
        return (*self.encoders, LLM)

    @property
    def shape(self) -> ModelShape:
        """Of the compact model."""
        if not self.layers:
            return SHAPE
        return replace(SHAPE, **{unit: replace(SHAPE.units[unit], layers=self.layers) for unit in ("vision", "audio", LLM)})

    @property
    def topology(self) -> dict[str, Any]:
        """Of all ranks, as `headrace.trainer.orchestrated.fsdp_ranks` makes it of a job."""
        flags = frozen_in(self.units, self.frozen)
        on = {unit: {} if unit == LLM else {"on": LLM} for unit in self.units}
        of_all = {"dp": self.ranks, "checkpointing": self.checkpointing}
        return {"units": {unit: {**of_all, **on[unit], **flags[unit]} for unit in self.units}, "dropout": self.dropout}

    def plan(self, step: int) -> StepPlan:
        rows = [row_of(sample, self.encoders) for sample in self.sample_ids(step)]
        topology = Topology(replicas=self.ranks, microbatches=self.microbatches, stages=dict.fromkeys(self.units, 1))
        ids = np.array([row["sample_id"] for row in rows])
        forms = PostBalancing(forms=dict.fromkeys(self.units, self.form), quadratic=0.5)
        execution = Execution(may_cross_replicas=True, colocated="phases", post_balancing=forms, cp=self.cp)
        tokens = np.array([len(row["input_ids"]) for row in rows]) * (PLANNED_BLOCK // BLOCK)
        costs = costs_of(rows, self.units)
        plan = make_plan(self.strategy, ids, costs, topology, seed=step, execution=execution, tokens=tokens)
        return _moved(plan, self.moved, step) if self.moved else plan

    def sample_ids(self, step: int) -> list[int]:
        return [1000 * step + number for number in range(self.samples)]

    def refused_ids(self, step: int) -> list[int]:
        return self.sample_ids(step)[: self.refused]


def every_fsdp_case() -> list[FsdpCase]:
    """Ranks, modalities, frozen units, strategies and forms in every combination, of one microbatch and of two in turn; and each
    other choice with some of them."""
    wide = enumerate(product(RANKS, MODALITIES, FROZEN_SETS, STRATEGIES, FORMS))
    return [
        *(
            FsdpCase(ranks, encoders, frozen, strategy, MICROBATCHES[(number + number // len(FORMS)) % 2], form=form)
            for number, (ranks, encoders, frozen, strategy, form) in wide
        ),
        *(FsdpCase(4, BOTH, frozen, strategy, 2, moved="permuted") for frozen in FROZEN_SETS for strategy in STRATEGIES),
        *(FsdpCase(4, modality, frozen, "orchmllm", 2, moved="hoarded") for frozen in FROZEN_SETS for modality in MODALITIES),
        *(FsdpCase(4, BOTH, "all learn", "orchmllm", 2, refused=count) for count in (1, 3, 11)),
        *(FsdpCase(4, BOTH, frozen, "orchmllm", 2, shard_ranks=2) for frozen in ("all learn", "frozen encoder")),
        *(FsdpCase(2, BOTH, "all learn", "orchmllm", 2, checkpointing=True, form=form) for form in FORMS),
        *(FsdpCase(2, BOTH, "all learn", "orchmllm", 2, dropout=0.2, form=form) for form in FORMS),
        FsdpCase(2, BOTH, "all learn", "orchmllm", 2, max_grad_norm=0.1),
        *shared_cases(),
    ]


def shared_cases() -> list[FsdpCase]:
    """Ranks that share sequences: any number of them for each, or the same for all, beside every other choice."""
    few = 5  # of which the longest take more than an even share
    whole = FsdpCase(4, BOTH, "all learn", "orchmllm", 1, few, cp="auto")
    return [
        *(replace(whole, frozen=frozen, microbatches=k, cp=cp) for frozen in FROZEN_SETS for k in MICROBATCHES for cp in DEGREES),
        *(replace(whole, encoders=encoders, cp=cp, samples=9) for encoders in MODALITIES[:2] for cp in DEGREES),
        *(replace(whole, refused=count, cp=cp) for count in (1, 4) for cp in DEGREES),
        *(replace(whole, form="third", checkpointing=True, cp=cp) for cp in DEGREES),
        *(replace(whole, dropout=0.2, microbatches=2, cp=cp) for cp in DEGREES),
        *(replace(whole, shard_ranks=2, cp=cp) for cp in DEGREES),
        replace(whole, samples=2, microbatches=2),
        replace(whole, strategy="auto", max_grad_norm=0.1),
    ]


def _moved(plan: StepPlan, moved: str, seed: int) -> StepPlan:
    """The same samples in the same microbatches, on other ranks."""
    rng, ranks = np.random.default_rng(seed), plan.topology.replicas
    units: dict[str, list[list[tuple[int, ...]]]] = {}
    for unit in plan.topology.stages:
        of_ranks = [[microbatch.units[unit] for microbatch in replica] for replica in plan.replicas]
        if moved == "permuted":
            of_ranks = [of_ranks[rank] for rank in rng.permutation(ranks)]
        elif unit != LLM:
            together = [sum(of_index, ()) for of_index in zip(*of_ranks, strict=True)]
            of_ranks = [[() for _ in together] for _ in range(ranks - 1)] + [together]
        units[unit] = of_ranks
    replicas = [
        [Microbatch(units={unit: units[unit][rank][k] for unit in units}) for k in range(plan.topology.microbatches)]
        for rank in range(ranks)
    ]
    plan = replace(plan, replicas=replicas)
    plan.check()
    return plan


@lru_cache(maxsize=4096)
def row_of(sample: int, encoders: tuple[str, ...]) -> dict[str, Any]:
    """`make_row`'s sample with the media of these encoders alone."""
    row = make_row(sample, audio="audio" in encoders)
    if "vision" in encoders:
        return row
    kept = row["input_ids"] != IMAGE_TOKEN
    weights = row["target_weights"]
    return {
        **row,
        "input_ids": row["input_ids"][kept],
        "labels": row["labels"][kept],
        "patches": row["patches"][:0],
        "image_grids": [],
        "target_weights": weights[kept] if len(weights) else weights,
    }


def packed_rows(samples: tuple[int, ...], encoders: tuple[str, ...], unit: str | None = None) -> PackedMicrobatch:
    """As a rank of that unit receives these samples; None: everything."""
    return packed([row_of(sample, encoders) for sample in samples], UNIT_COLUMNS[unit] if unit else None)


@lru_cache(maxsize=64)
def one_process(case: FsdpCase) -> tuple[list[StepResult], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Results, gradients of the first step, weights after the last: each global batch as one microbatch, nothing sharded."""
    model = whole_model(case.shape, dropout=case.dropout)
    model.to_empty(device="cpu")
    initialise(model, SEED)
    enlarge(model)
    for unit, flags in frozen_in(case.units, case.frozen).items():
        trunk = model.get_submodule(TRUNKS[unit])
        trunk.requires_grad_(not flags.get("frozen", False))
        if count := flags.get("frozen_layers", 0):
            layers = list(trunk.get_submodule("layers").children())
            for module in (*(getattr(trunk, name) for name in ENTRIES[unit]), *layers[:count]):
                module.requires_grad_(False)
        if unit != LLM:
            model.get_submodule(PROJECTORS[unit]).requires_grad_(not flags.get("frozen_projector", False))
    settings = OptimizerSpec(max_grad_norm=case.max_grad_norm)
    adamw = make_optimizer(model.parameters(), settings)
    train_step = TrainStep(model, adamw, settings=settings, dtype=getattr(torch, case.dtype))
    results, gradients = [], dict[str, np.ndarray]()
    for step in range(STEPS):
        samples = tuple(sample for sample in case.sample_ids(step) if sample not in case.refused_ids(step))
        train_step.accumulate(packed_rows(samples, case.encoders))
        if step == 0:
            weight = train_step._target_weight
            gradients = {name: gradient.numpy() / weight for name, gradient in gradients_of(model).items()}
        results.append(train_step.finish(LEARNING_RATE))
        if step == 0 and results[0].grad_norm > case.max_grad_norm:
            gradients = {name: one * (case.max_grad_norm / results[0].grad_norm) for name, one in gradients.items()}
    return results, gradients, {name: weight.numpy().copy() for name, weight in weights_of(model).items()}
