"""The modules that FSDP wraps as wholes: a unit each, whether its modules are Headrace's or the user's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from headrace.errors import UserError
from headrace.manifest import Vocabulary
from headrace.plan import LLM
from headrace.spec import JobSpec
from headrace.trainer.loading.collate import PAYLOAD, PackedMicrobatch, cumulative, sums
from headrace.trainer.models.audio_encoder import AudioEncoder
from headrace.trainer.models.decoder import Decoder
from headrace.trainer.models.vision_encoder import VisionEncoder
from headrace.trainer.orchestrated.padded_rows import PADDED, run_spread, with_form
from headrace.trainer.pipeline.chunk import Inputs
from headrace.trainer.pipeline.stage import TRUNKS, Stage


class UnitRoot(nn.Module, ABC):
    """One unit, whole, on every rank."""

    @property
    def shards(self) -> Sequence[nn.Module]:
        """The modules, innermost first, that are gathered one by one; what is in none of them is gathered with the unit."""
        return ()

    def outside_shards(self) -> set[nn.Parameter]:
        """Return the parameters that are used outside of `shards`, whether or not a shard has them, too: a tower's patch
        embedding is a part of its first layer in `transformers`, and works in front of it here."""
        found, modules = set[nn.Parameter](), [cast(nn.Module, self)]
        while modules:
            module = modules.pop()
            if not any(module is shard for shard in self.shards):
                found.update(module.parameters(recurse=False))
                modules += module.children()
        return found

    @abstractmethod
    def prepare(self, data: PackedMicrobatch) -> Inputs:
        """Return what `forward` takes of a microbatch, on the host as is `data`. Called from any thread."""

    def token_counts(self, _: PackedMicrobatch) -> Tensor:
        """Return the (n,) counts of rows that an encoder makes of each sample, on the host."""
        raise AssertionError("nothing is behind the LLM")

    def input_token_counts(self, unit: str, _: PackedMicrobatch) -> Tensor:
        """Return the (n,) counts of rows that each sample takes of an encoder, on the host."""
        raise AssertionError(f"nothing is in front of an encoder, and not {unit}")

    @abstractmethod
    def target_weight(self, inputs: Inputs) -> float:
        """Return the weight of the LLM's targets in a microbatch, their number where each weighs 1."""

    @abstractmethod
    def forward(self, inputs: Inputs, arrived: Mapping[str, Tensor]) -> Tensor:
        """Return an encoder's rows (t, width) or the LLM's summed loss. arrived: of each encoder, in the order of the samples."""

    @abstractmethod
    def whole_name(self, name: str) -> str:
        """Return the name that the parameter `name` has in a checkpoint."""


class StageRoot(UnitRoot):
    """A unit of Headrace's: the compact model's, or one of `transformers`, as the only stage of a pipeline has it."""

    def __init__(self, stage: Stage, form: str = "no_padding") -> None:
        """form: of the job's `orchmllm.forms`, how the unit's layers run (`padded_rows`).

        Raises UserError for "padded" where a unit of `transformers` has layers that take packed rows alone.
        """
        super().__init__()
        self.stage, self._form = stage, form
        if form == PADDED:
            trunk = stage.model.get_submodule(TRUNKS[stage.unit])
            if type(trunk) not in (VisionEncoder, AudioEncoder, Decoder):
                raise UserError(
                    f"orchmllm.forms says that {stage.unit} is padded, but the layers of its {type(trunk).__name__} take packed "
                    "rows: set fourth, under which their attention is padded, or no_padding"
                )
            run_spread(stage.layers)

    @property
    def shards(self) -> Sequence[nn.Module]:
        return self.stage.layers

    def prepare(self, data: PackedMicrobatch) -> Inputs:
        return with_form(self.stage.prepare(data), self._form, causal=self.stage.unit == LLM)

    def token_counts(self, data: PackedMicrobatch) -> Tensor:
        return self.stage.token_counts(data)

    def input_token_counts(self, unit: str, data: PackedMicrobatch) -> Tensor:
        return self.stage.input_token_counts(unit, data)

    def target_weight(self, inputs: Inputs) -> float:
        weight: float = inputs.end.target_weight
        return weight

    def forward(self, inputs: Inputs, arrived: Mapping[str, Tensor]) -> Tensor:
        output = self.stage(inputs, None, arrived)
        made: Tensor = output.rows if output.loss is None else output.loss.loss_sum
        return made

    def whole_name(self, name: str) -> str:
        return name.removeprefix("stage.model.")


class OwnEncoder(UnitRoot):
    """An encoder of the user's: `module(data)` returns the rows (t, width) of all images, or recordings, of a microbatch."""

    def __init__(self, module: nn.Module, unit: str, spec: JobSpec) -> None:
        """Raises UserError for images whose tokens a module of one's own cannot make."""
        super().__init__()
        if unit == "vision" and spec.image.fit == "anyres":
            raise UserError(
                "image.fit is anyres, where the tokens of an image depend on its size, but an encoder of one's own makes one of "
                "each merge x merge patches: take another image.fit"
            )
        self.module, self.unit, self._spec = module, unit, spec

    def prepare(self, data: PackedMicrobatch) -> Inputs:
        return Inputs(num_rows=int(self.token_counts(data).sum()), entry=_packed(data))

    def token_counts(self, data: PackedMicrobatch) -> Tensor:
        if self.unit == "vision":
            tokens = data.image_cu_seqlens.diff() // self._spec.image.merge**2
            return sums(tokens, cumulative(data.images_per_sample))
        tokens = torch.tensor([self._spec.audio.num_tokens(frames) for frames in data.mel_frames.tolist()], dtype=torch.int32)
        return sums(tokens, cumulative(data.recordings_per_sample))

    def target_weight(self, _: Inputs) -> float:
        return 0.0

    def forward(self, inputs: Inputs, _: Mapping[str, Tensor]) -> Tensor:
        rows: Tensor = self.module(_unpacked(inputs.entry))
        return rows if rows._base is None else rows.clone()  # FSDP asks for no views

    def whole_name(self, name: str) -> str:
        return f"{self.unit}.{name.removeprefix('module.')}"


class OwnLlm(UnitRoot):
    """An LLM of the user's: `module(data, tokens)` returns the summed loss of a microbatch, a scalar.

    tokens: by encoder, the rows that its placeholders are to be filled with, in their order; there may be none.
    """

    def __init__(self, module: nn.Module, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.module = module
        self._placeholders = {"vision": vocabulary.image_token, "audio": vocabulary.audio_token}

    def prepare(self, data: PackedMicrobatch) -> Inputs:
        return Inputs(num_rows=len(data.input_ids), entry=_packed(data))

    def input_token_counts(self, unit: str, data: PackedMicrobatch) -> Tensor:
        return sums(data.input_ids == self._placeholders[unit], data.cu_seqlens)[data.sample_segments]

    def target_weight(self, inputs: Inputs) -> float:
        host, _ = inputs.entry
        weight: float = host.data.target_weight
        return weight

    def forward(self, inputs: Inputs, arrived: Mapping[str, Tensor]) -> Tensor:
        loss: Tensor = self.module(_unpacked(inputs.entry), dict(arrived))
        return loss

    def whole_name(self, name: str) -> str:
        return f"{LLM}.{name.removeprefix('module.')}"


class _OnHost:
    """A microbatch of which nothing is copied to the device."""

    def __init__(self, data: PackedMicrobatch) -> None:
        self.data = data


def _packed(data: PackedMicrobatch) -> tuple[_OnHost, dict[str, Tensor]]:
    """Return a microbatch as a value of which only the payload is copied to the device."""
    return _OnHost(data), {name: getattr(data, name) for name in PAYLOAD}


def _unpacked(entry: Any) -> PackedMicrobatch:
    host, payload = entry
    data: PackedMicrobatch = host.data
    return replace(data, **payload)
