"""A multimodal model on context-parallel ranks: what each of them computes of a case, and one process alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.manifest import Vocabulary
from headrace.mask_layouts import Sight
from headrace.model_shape import ModelShape, TransformerShape
from headrace.sample import LABEL_IGNORED
from headrace.spec import parse_spec
from headrace.trainer.context.context_model import ContextModel
from headrace.trainer.gradients import sum_gradients
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.packs import Padding, in_packs
from headrace.trainer.loading.slices import Balanced, padded_to_slices, rows_of_slices, slice_of, targets_of_slices
from headrace.trainer.models.multimodal import MultimodalModel, initialise
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.train_step import TrainStep
from tests.verify.batches import AUDIO, AUDIO_TOKEN, IMAGE, IMAGE_TOKEN, VOCAB, enlarge, packed_samples, whole_model

BLOCK = 8
_ENCODER = TransformerShape(layers=1, width=16, heads=2, kv_heads=2, mlp=32, gated=False)
_LLM = TransformerShape(layers=2, width=32, heads=4, kv_heads=2, mlp=48, gated=True)
SHAPE = ModelShape(vision=_ENCODER, audio=_ENCODER, llm=_LLM)
SPEC = parse_spec({"name": "job", "sources": [{"path": "data"}], "image": IMAGE.model_dump(), "audio": AUDIO.model_dump()})
VOCABULARY = Vocabulary(size=VOCAB, image_token=IMAGE_TOKEN, audio_token=AUDIO_TOKEN)
Outcome = tuple[float, float, dict[str, Tensor]]
"""Loss and weight of targets, both summed over ranks, and gradients."""


@dataclass(frozen=True, slots=True)
class ModelCase:
    cp: int
    samples: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    sight: Sight = Sight.TEXT
    trained: str = ""
    """What learns, by the beginnings of names; all of it if empty."""
    one_target: bool = False
    pack_tokens: int = 0
    """Length to which packs of two samples are padded."""
    dropout: float = 0.0
    sliced: bool = False
    """Whether ranks get slices of the loader's, and not the whole."""
    degrees: tuple[tuple[int, ...], ...] = ()
    """The ranks of each sample; empty: all ranks for all of them together."""
    kv_heads: int = 2
    """Heads of keys in the LLM, which has 4 of queries."""

    def __str__(self) -> str:
        others = [f"{self.trained or 'all'} learns", f"packs of {self.pack_tokens}" * bool(self.pack_tokens)]
        others += ["one target" * self.one_target, "dropout" * bool(self.dropout), "sliced" * self.sliced]
        others += [f"ranks {'+'.join(''.join(map(str, ranks)) for ranks in self.degrees)}" * bool(self.degrees)]
        first = f"cp {self.cp}, model of {self.kv_heads} heads, {self.sight.value}, {len(self.samples)} samples"
        return ", ".join([first, *filter(None, others)])

    def microbatch(self) -> PackedMicrobatch:
        data = packed_samples(self.samples, audio=True)
        if self.one_target:
            kept = (data.labels != LABEL_IGNORED).nonzero().squeeze(1)[:1]
            labels = torch.full_like(data.labels, LABEL_IGNORED).index_copy(0, kept, data.labels[kept])
            data = replace(data, labels=labels, num_targets=1, target_weights=torch.zeros(0))
        if self.pack_tokens:
            packs = [list(self.samples[first : first + 2]) for first in range(0, len(self.samples), 2)]
            data = in_packs(data, packs, Padding(pack_tokens=self.pack_tokens, segment_tokens=self.pack_tokens, token=0))
        return data

    def model(self) -> MultimodalModel:
        shape = replace(SHAPE, llm=replace(SHAPE.llm, kv_heads=self.kv_heads))
        model = whole_model(shape, dropout=self.dropout)
        model.to_empty(device="cpu")
        initialise(model, 1)
        enlarge(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(tuple(self.trained.split())) if self.trained else True)
        return model


CASES = {
    "two ranks": ModelCase(2),
    "three ranks": ModelCase(3),
    "four ranks": ModelCase(4),
    "one rank": ModelCase(1),
    "images see themselves": ModelCase(4, sight=Sight.ITSELF),
    "text alone": ModelCase(2, samples=(30, 34, 11)),
    "a rank alone has a target": ModelCase(4, one_target=True),
    "projectors alone learn": ModelCase(3, trained="vision_projector audio_projector"),
    "the audio encoder alone learns": ModelCase(4, trained="audio."),
    "the last layer alone learns": ModelCase(2, trained="decoder.layers.1 decoder.norm"),
    "a degree for each sample": ModelCase(4, degrees=((0,), (1, 2, 3), (2,), (0, 3), (1,), (0, 2))),
    "padded packs": ModelCase(3, pack_tokens=96),
    "slices of a loader": ModelCase(3, sight=Sight.ITSELF, sliced=True),
    "slices with dropout": ModelCase(4, sliced=True, dropout=0.2),
}


def wrapped(case: ModelCase, model: MultimodalModel, group: dist.ProcessGroup | None) -> ContextModel:
    degrees = (lambda *_: case.degrees) if case.degrees else None
    return ContextModel(
        model, group, image=IMAGE, audio=AUDIO, images=case.sight, recordings=case.sight, block=BLOCK, degrees=degrees
    )


def slice_for(case: ModelCase, rank: int) -> PackedMicrobatch:
    """As a loader whose `cp_order` is balanced has it for this rank."""
    order = Balanced(images=case.sight.value, recordings=case.sight.value, block=BLOCK)
    whole = order.with_mask(padded_to_slices(case.microbatch(), case.cp, order, 1, token=0), SPEC, VOCABULARY)
    rows = rows_of_slices(whole, case.cp, order)
    return slice_of(whole, rows[rank], targets_of_slices(whole, rows)[rank])


def computed(case: ModelCase, group: dist.ProcessGroup, rank: int) -> Outcome:
    """What the ranks compute together."""
    model = case.model()
    loss = wrapped(case, model, group)(slice_for(case, rank) if case.sliced else case.microbatch())
    loss.loss_sum.backward()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss_sum, weight = sum_gradients(parameters, group, [float(loss.loss_sum.detach()), loss.target_weight])
    return loss_sum, weight, gradients_of(model)


def alone(case: ModelCase) -> Outcome:
    """What one process computes: the model as it is where all attention is causal."""
    return _alone(replace(case, cp=1, sliced=False, degrees=()))


@lru_cache(maxsize=64)
def _alone(case: ModelCase) -> Outcome:
    model = case.model()
    whole = model if case.sight is Sight.TEXT else wrapped(case, model, None)
    loss = whole(case.microbatch())
    loss.loss_sum.backward()
    return float(loss.loss_sum.detach()), loss.target_weight, gradients_of(model)


def gradients_of(model: MultimodalModel) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


class Descent:
    """Plain gradient descent: torch's own optimizers take seconds to import."""

    def __init__(self, parameters: Iterable[nn.Parameter], rate: float) -> None:
        self._parameters, self._rate = list(parameters), rate
        self.param_groups: list[dict[str, float]] = []

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=self._rate)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def one_step(parts: Sequence[ModelCase], group: dist.ProcessGroup | None) -> tuple[float, float, float]:
    """Loss, weight of targets and norm of the gradient of a step over these microbatches and all processes."""
    model = parts[0].model()
    trained = model if group is None else wrapped(parts[0], model, group)
    descent = cast(torch.optim.Optimizer, Descent(model.parameters(), 0.1))
    step = TrainStep(trained, descent, settings=OptimizerSpec(max_grad_norm=1e9))
    for part in parts:
        step.accumulate(part.microbatch())
    result = step.finish()
    return result.loss, result.target_weight, result.grad_norm


STEP = [ModelCase(2, samples=(0, 1, 2)), ModelCase(2, samples=(13, 3, 4, 5), one_target=True)]
"""The microbatches of two data-parallel ranks."""
