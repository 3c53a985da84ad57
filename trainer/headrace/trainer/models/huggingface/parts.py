"""The base of units made of modules of `transformers`: configuration, construction, weights and their names in a checkpoint."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from headrace.errors import UserError
from headrace.trainer.models.huggingface.packed_layer import PACKED
from headrace.trainer.models.huggingface.safetensors_reader import has_weights, load


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

    Raises UserError for a configuration with dropout, since a step must not depend on its division into microbatches.
    """
    for name, value in config.to_dict().items():
        if ("dropout" in name or "layerdrop" in name) and isinstance(value, int | float) and value > 0:
            raise UserError(
                f"the model's {name} is {value}, but training here is without dropout: set it to 0 in its config.json"
            )
    with torch.device("meta"):
        return make(config, attn_implementation=PACKED, dtype=torch.float32)


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


class Adapted(nn.Module):
    """Base of units whose modules come from a model of `transformers` and have the compact model's attribute names."""

    width: int
    """Width of the hidden states."""
    checkpoint_prefixes: tuple[str, ...] = ("",)
    """Prefixes that the names of the model's tensors may have in a checkpoint."""
    stored_names: dict[str, str]
    """Name in a checkpoint, without prefix, of each parameter. Parameters with the same one share its stored rows, in order."""

    def adopt(self, model: PreTrainedModel, path: Path) -> None:
        """Take the stored names and the initialisation from `model`. To be called once, when the modules are in place.

        `path`: where the configuration and perhaps the weights lie.
        """
        self._path = path
        self._initialise_module: Any = model._init_weights
        names = {id(tensor): name for name, tensor in model.named_parameters()}
        self.stored_names = {name: names[id(tensor)] for name, tensor in self.named_parameters()}

    @torch.no_grad()
    def initialise(self, unit: str, seed: int) -> None:
        """Load the checkpoint's weights or, without a checkpoint, initialise them as `transformers` does for this family.

        Each module draws from a seed of its own, made of `seed`, `unit` and its name: a stage with some of the layers gets the
        weights that they have in the whole unit. Raises UserError for a checkpoint that does not fit.
        """
        if has_weights(self._path):
            load(self._path, self._stored(), self.checkpoint_prefixes)
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
