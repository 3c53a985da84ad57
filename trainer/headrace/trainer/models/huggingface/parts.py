"""The base of units made of modules of `transformers`: configuration, construction, weights and their names in a checkpoint."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from headrace.errors import UserError
from headrace.trainer.models.huggingface.packed_layer import PACKED
from headrace.trainer.models.huggingface.safetensors_reader import Layout, has_weights, load

WHOLE = ("qwen2_vl", "qwen2_5_vl", "llava", "llava_onevision", "internvl", "qwen2_audio")
"""Supported values of `model_type` of whole models: encoder, projector and llm (`published`)."""


def read_config(path: Path) -> Any:
    """Read the configuration of a local model from a folder with a config.json, or from that file itself.

    Raises UserError where there is none, or one that `transformers` cannot read.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"there is no config.json of a model at {path}: name a folder that has one, or the file itself")
    try:
        return AutoConfig.from_pretrained(file, local_files_only=True)
    except (OSError, ValueError, KeyError) as err:
        raise UserError(f"transformers cannot read {file}: {err}") from err


def skeleton(make: Callable[..., Any], config: PretrainedConfig) -> Any:
    """Build a model of `transformers` on the meta device, with attention inside of segments. `make`: its `from_config`.

    Raises UserError for a configuration with dropout, by which a step would depend on its division into microbatches.
    """
    check_dropout(config.to_dict())
    with torch.device("meta"):
        return make(config, attn_implementation=PACKED, dtype=torch.float32)


def check_dropout(config: Mapping[str, Any]) -> None:
    """Raise UserError for a model's configuration with dropout, in it or in a part of it."""
    for name, value in config.items():
        if isinstance(value, dict):
            check_dropout(value)
        elif isinstance(value, int | float) and value > 0 and ("dropout" in str(name) or "layerdrop" in str(name)):
            raise UserError(
                f"the model's {name} is {value}, but dropout here is that of the topology: set it to 0 in its config.json"
            )


class PerDevice:
    """Something without weights, such as a table of angles or a module with one, that is made once on each device.

    It is kept apart from the modules of a unit, which are built on the meta device and lose their buffers when they leave it.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._make, self._arguments = make, arguments
        self._made: dict[torch.device, Any] = {}

    def on(self, device: torch.device) -> Any:
        """Return what was made on this device, after making it at the first call."""
        if device not in self._made:
            with torch.device(device):
                self._made[device] = self._make(*self._arguments)
        return self._made[device]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Published:
    """A whole published model on the meta device, of which units are parts."""

    path: Path
    """Of its folder, or of its config.json."""
    model: Any
    """The model of `transformers`, with its head."""
    layouts: Sequence[Layout]
    """How its checkpoints may write the names of its tensors, the usual one first."""
    names: frozenset[str]
    """Names of all its parameters."""

    @property
    def config(self) -> Any:
        """The whole configuration."""
        return self.model.config


def prefixed(*prefixes: str) -> tuple[Layout, ...]:
    """Return the layouts in which all names have one of these prefixes in front."""
    return tuple({"": prefix} for prefix in prefixes)


class Adapted(nn.Module):
    """Base of units whose modules come from a model of `transformers` and have the compact model's attribute names."""

    width: int
    """Width of the hidden states."""
    layouts: Sequence[Layout] = ({},)
    """How checkpoints may write the names of the model's tensors."""
    stored_names: dict[str, str]
    """Name in the model of `transformers` of each parameter. Parameters with the same one share its stored rows, in order."""

    model_names: frozenset[str]
    """Names of all parameters of that model, also of those that the unit does not have."""
    tied_names: Sequence[str] = ()
    """Names of parameters of that model that are others of it."""

    def fixed(self) -> Mapping[str, Tensor]:
        """Return the tensors of that model, by name, that the unit computes and does not train."""
        return {}

    def adopt(self, model: PreTrainedModel, path: Path, whole: Published | None = None) -> None:
        """Take the stored names and the initialisation from `model`. To be called once, when the modules are in place.

        `path`: where the configuration and perhaps the weights lie. `whole`: the model that `model` is a part of, whose names
        and layouts count then.
        """
        self._path = path
        self._initialise_module: Any = model._init_weights
        if whole is not None:
            self.layouts = whole.layouts
        names = {id(tensor): name for name, tensor in (whole.model if whole else model).named_parameters()}
        self.model_names = whole.names if whole else frozenset(names.values())
        self.stored_names = {name: names[id(tensor)] for name, tensor in self.named_parameters()}

    @torch.no_grad()
    def initialise(self, unit: str, seed: int) -> None:
        """Load the checkpoint's weights or, without a checkpoint, initialise them as `transformers` does for this family.

        Each module draws from a seed of its own, made of `seed`, `unit` and its name: a stage with some of the layers gets the
        weights that they have in the whole unit. Raises UserError for a checkpoint that does not fit.
        """
        if has_weights(self._path):
            load(self._path, self._stored(), self.layouts)
            return
        devices = {parameter.device for parameter in self.parameters() if parameter.is_cuda}
        with torch.random.fork_rng(devices):
            for name, module in reversed(list(self.named_modules())):  # inner modules first, as in transformers
                torch.manual_seed(zlib.crc32(f"{seed}/{unit}.{name}".encode()))
                self._initialise_module(module)

    def _stored(self) -> Mapping[str, Sequence[Tensor]]:
        """Return the parameters that this stage has of the unit, by their stored names."""
        stored: defaultdict[str, list[Tensor]] = defaultdict(list)
        for name, parameter in self.named_parameters():
            stored[self.stored_names[name]].append(parameter)
        return stored
