"""The kinds of layers that a model consists of: one layer stands for all that are alike, and each end of a stack is a kind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.plan import GENERATOR, LLM
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.device_copy import to_device
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.audio_encoder import encoder_frames
from headrace.trainer.models.loss import Targets, token_loss
from headrace.trainer.models.multimodal import MultimodalModel, fill_placeholders
from headrace.trainer.pipeline.stage import PROJECTORS, TRUNKS
from headrace.trainer.pipeline.tensor_parallel import cut_to_first_slice

_INIT_STD = 0.02  # of random weights, as at the start of training


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """A kind's computation on one microbatch."""

    x: Tensor | None
    """The input from the layers in front, which needs a gradient; None where there is nothing in front."""
    run: Callable[[], Tensor]
    """Computes the output, or the loss, from `x`."""
    layer: Callable[[Tensor], Tensor] | None = None
    """The layer as a function of `x`, for activation checkpointing; None for an end, which is not checkpointed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kind:
    """Some equal layers of one part of a model, or what stands at one of its ends."""

    part: str
    name: str
    """`layer`, with a number from the second kind on; or `embedding`, `projector` or `head`, for an end."""
    layers: tuple[int, ...] = ()
    """Indices of the layers of the stack that are of this kind; empty for an end."""
    tp: int = 1
    """Number of slices of which the first is computed, without the sums over slices."""
    modules: tuple[nn.Module, ...]
    """The modules whose weights take part."""
    work: Callable[[PackedMicrobatch], Work]
    """Prepares the computation on a microbatch that is on the weights' device."""

    def materialise(self, device: torch.device) -> None:
        """Give weights that are on the meta device random values on `device`."""
        for module in self.modules:
            if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
                randomise(module, device)

    def release(self) -> None:
        """Free weights and gradients: the weights go back to the meta device."""
        for module in self.modules:
            module.zero_grad(set_to_none=True)
            module.to("meta")


@torch.no_grad()
def randomise(module: nn.Module, device: torch.device) -> None:
    """Give a module that is on the meta device random weights on `device`, and buffers of zeros."""
    module.to_empty(device=device)
    for parameter in module.parameters():
        parameter.normal_(std=_INIT_STD)
    for buffer in module.buffers():
        buffer.zero_()


def kinds_of(model: MultimodalModel, part: str, widths: Sequence[int] = (1,)) -> list[Kind]:
    """Return the kinds of one part of a model on the meta device: layers at each tensor-parallel width, and whole ends.

    The tensors of a kind are shared with the model, except those of slices.
    """
    trunk = model.get_submodule(TRUNKS[part])
    stack = trunk.get_submodule("layers")
    assert isinstance(stack, nn.ModuleList)
    alike: dict[object, list[int]] = {}
    for index, layer in enumerate(stack):
        alike.setdefault(_signature(layer), []).append(index)
    inputs = _Inputs(model, part)
    kinds = []
    for tp in widths:
        for number, indices in enumerate(alike.values()):
            layer = stack[indices[0]]
            if tp > 1:
                layer = copy.deepcopy(layer)
                cut_to_first_slice(layer, tp)
            name = f"layer {number + 1}" if number else "layer"
            work = inputs.of_layer(layer, is_first=indices[0] == 0)
            kinds.append(Kind(part=part, name=name, layers=tuple(indices), tp=tp, modules=(layer,), work=work))
    return kinds + list(_ends(model, part))


def _signature(layer: nn.Module) -> object:
    """Return what layers of one kind have in common: class, switches, and the names and shapes of their weights."""
    switches = tuple((name, value) for name, value in vars(layer).items() if isinstance(value, bool) and name != "training")
    return type(layer), switches, tuple((name, parameter.shape) for name, parameter in layer.named_parameters())


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """What the layers of one part take: hidden states, and what is computed once per microbatch for all layers."""

    model: MultimodalModel
    part: str

    def of_layer(self, layer: nn.Module, *, is_first: bool) -> Callable[[PackedMicrobatch], Work]:
        def work(data: PackedMicrobatch) -> Work:
            args = self.layer_args(self.layout(data))
            x = self.hidden(data, embedded=is_first)
            return Work(x=x, run=lambda: layer(x, *args), layer=lambda x: layer(x, *args))

        return work

    def layout(self, data: PackedMicrobatch) -> Any:
        """Return what the layers need to know of a microbatch: made on the host, and brought to the device beside a step."""
        match self.part:
            case "vision":
                layout = self.model.vision.layout(data.image_grids, data.image_cu_seqlens)
            case "audio":
                layout = self.model.audio.layout(data.mel_frames)
            case "llm":
                layout = self.model.decoder.positions(data), Segments.of(data.cu_seqlens)
            case _:
                assert self.model.generator is not None
                layout = self.model.generator.layout(data)
        return to_device(layout, data.input_ids.device)

    def layer_args(self, layout: Any) -> tuple[Any, ...]:
        if self.part == LLM:
            return self.model.decoder.layer_args(*layout)
        args: tuple[Any, ...] = self.model.get_submodule(TRUNKS[self.part]).layer_args(layout)  # type: ignore[operator]
        return args

    def hidden(self, data: PackedMicrobatch, *, embedded: bool = False) -> Tensor:
        """Return random hidden states between layers, or `embedded`, those in front of the first layer."""
        rows = {"audio": int(encoder_frames(data.mel_frames).sum()), LLM: len(data.input_ids)}
        if self.part == "vision":
            rows["vision"] = len(data.patches) if embedded else self.model.vision.num_rows(data.image_cu_seqlens)
        elif self.model.generator is not None:
            rows[GENERATOR] = self.model.generator.num_rows(data.image_cu_seqlens)
        return self.random(rows[self.part], int(self.model.get_submodule(TRUNKS[self.part]).width), data)  # type: ignore[arg-type]

    def random(self, rows: int, width: int, data: PackedMicrobatch) -> Tensor:
        return torch.randn(rows, width, device=data.input_ids.device, requires_grad=True)


def _ends(model: MultimodalModel, part: str) -> Iterator[Kind]:
    inputs = _Inputs(model, part)
    trunk = model.get_submodule(TRUNKS[part])

    def embedding(
        embed: Callable[[PackedMicrobatch, Any], Tensor], entry: Callable[[PackedMicrobatch], Any] = lambda _: None
    ) -> Callable[[PackedMicrobatch], Work]:
        """Return the work of an entry. `entry`: makes what it needs to know of a microbatch, on the host and not timed."""

        def work(data: PackedMicrobatch) -> Work:
            layout, made = inputs.layout(data), to_device(entry(data), data.input_ids.device)

            def run() -> Tensor:
                inputs.layer_args(layout)  # is computed once per microbatch too
                return embed(data, made)

            return Work(x=None, run=run)

        return work

    def behind(
        run: Callable[[Tensor, Any], Tensor], end: Callable[[PackedMicrobatch], Any]
    ) -> Callable[[PackedMicrobatch], Work]:
        """Return the work of an end. `end`: as `entry` above."""

        def work(data: PackedMicrobatch) -> Work:
            x, made = inputs.hidden(data, embedded=True), to_device(end(data), data.input_ids.device)
            return Work(x=x, run=lambda: run(x, made))

        return work

    if part == "vision":
        vision, project = model.vision, model.vision_projector
        yield _end(part, "embedding", [vision.embed], embedding(lambda data, _: vision.embed_inputs(data.patches)))
        norm_and_project = behind(lambda x, groups: project(vision.norm(x), groups), project.image_groups)
        yield _end(part, "projector", [vision.norm, model.get_submodule(PROJECTORS[part])], norm_and_project)
    elif part == "audio":
        audio, join = model.audio, model.audio_projector
        convolutions = [trunk.get_submodule("conv1"), trunk.get_submodule("conv2")]
        embed_mel = embedding(
            lambda data, made: audio.embed_inputs(data.mel, made), lambda data: audio.convolutions(data.mel_frames)
        )
        yield _end(part, "embedding", convolutions, embed_mel)
        norm_and_join = behind(
            lambda x, groups: join(audio.norm(x), groups), lambda data: join.groups(encoder_frames(data.mel_frames))
        )
        yield _end(part, "projector", [audio.norm, model.get_submodule(PROJECTORS[part])], norm_and_join)
    elif part == LLM:
        decoder = model.decoder

        def embed(data: PackedMicrobatch, rows: Tensor) -> Tensor:
            return fill_placeholders(decoder.embed(data.input_ids), rows, None, "image")

        yield _end(
            part, "embedding", [decoder.embed], embedding(embed, lambda data: model.placeholders("vision", data.input_ids))
        )
        output = decoder.embed if decoder.head is None else decoder.head
        loss = behind(
            lambda x, targets: token_loss(decoder.norm(x), targets, decoder.output_weight), lambda data: Targets.of(data.labels)
        )
        yield _end(part, "head", [decoder.norm, output], loss)
    else:
        yield from _generator_ends(model, inputs)


def _generator_ends(model: MultimodalModel, inputs: _Inputs) -> Iterator[Kind]:
    generator, projector = model.generator, model.generator_projector
    assert generator is not None
    assert projector is not None

    def project(data: PackedMicrobatch) -> Work:
        tokens = inputs.hidden(data).shape[0]
        hidden = inputs.random(tokens, model.decoder.width, data)
        rows = torch.arange(tokens, device=hidden.device)
        return Work(x=hidden, run=lambda: model.conditions(hidden, rows))

    def embed(data: PackedMicrobatch) -> Work:
        conditions, layout = inputs.hidden(data), inputs.layout(data)

        def run() -> Tensor:
            inputs.layer_args(layout)
            return generator.embed_inputs(generator.flow(data.patches, layout), conditions)

        return Work(x=conditions, run=run)

    def loss(data: PackedMicrobatch) -> Work:
        x, flow = inputs.hidden(data), generator.flow(data.patches, inputs.layout(data))
        return Work(x=x, run=lambda: generator.loss(x, flow))

    yield _end(GENERATOR, "projector", [projector], project)
    yield _end(GENERATOR, "embedding", [generator.embed, generator.time], embed)
    yield _end(GENERATOR, "head", [generator.norm, generator.head], loss)


def _end(part: str, name: str, modules: Sequence[nn.Module], work: Callable[[PackedMicrobatch], Work]) -> Kind:
    return Kind(part=part, name=name, modules=tuple(modules), work=work)
