"""What every unit made of modules of `transformers` has: a configuration, weights, and names in its checkpoint."""

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
    """The configuration of a local model: a folder with a config.json, or that file alone.

    Raises UserError where there is none, or one that `transformers` does not know.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"there is no config.json of a model at {path}: name a folder that has one, or the file itself")
    try:
        return AutoConfig.from_pretrained(file, local_files_only=True)
    except (OSError, ValueError, KeyError) as err:
        raise UserError(f"transformers cannot read {file}: {err}") from err


def skeleton(make: Callable[..., Any], config: PretrainedConfig) -> Any:
    """A model of `transformers` on the meta device, whose layers attend inside of segments. `make`: its `from_config`.

    Raises UserError for a configuration with dropout: a step is to be the same for every division into microbatches.
    """
    for name, value in config.to_dict().items():
        if ("dropout" in name or "layerdrop" in name) and isinstance(value, int | float) and value > 0:
            raise UserError(
                f"the model's {name} is {value}, but training here is without dropout: set it to 0 in its config.json"
            )
    with torch.device("meta"):
        return make(config, attn_implementation=PACKED, dtype=torch.float32)


class Adapted(nn.Module):
    """A unit whose modules are those of a model of `transformers`, under this repository's names."""

    width: int
    """Of hidden states."""
    checkpoint_prefixes: tuple[str, ...] = ("",)
    """What may stand before the names of the model's tensors in a checkpoint."""
    stored_names: dict[str, str]
    """Of its parameters, in a checkpoint. Several with one name have the stored rows in order."""

    def adopt(self, model: PreTrainedModel, path: Path) -> None:
        """To be called once, when the modules are in place. `path`: where the configuration and perhaps the weights lie."""
        self._path = path
        self._initialise_module: Any = model._init_weights
        names = {id(tensor): name for name, tensor in model.named_parameters()}
        self.stored_names = {name: names[id(tensor)] for name, tensor in self.named_parameters()}

    @torch.no_grad()
    def initialise(self, unit: str, seed: int) -> None:
        """Weights of the checkpoint or, without one, such as `transformers` gives this family.

        A module draws from a seed of its own, by unit and name: a stage with some of the layers gets the weights that these
        have in the whole unit. Raises UserError for a checkpoint that does not fit.
        """
        if has_weights(self._path):
            load(self._path, self._stored(), self.checkpoint_prefixes)
            return
        devices = {parameter.device for parameter in self.parameters() if parameter.is_cuda}
        with torch.random.fork_rng(devices):
            for name, module in reversed(list(self.named_modules())):  # as transformers does: what is inside first
                torch.manual_seed(zlib.crc32(f"{seed}/{unit}.{name}".encode()))
                self._initialise_module(module)

    def _stored(self) -> Mapping[str, Sequence[Tensor]]:
        """The parameters that are left of the unit, by their names in the model of `transformers`."""
        stored: defaultdict[str, list[Tensor]] = defaultdict(list)
        for name, parameter in self.named_parameters():
            stored[self.stored_names[name]].append(parameter)
        return stored
