"""A compact multimodal model in plain PyTorch on packed sequences: two encoders, projectors, a decoder, perhaps a generator.

`load` builds a whole published model in its place, and `export` writes it back as a folder that `transformers` loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch and transformers take seconds to import
    import torch

    from headrace.manifest import Vocabulary
    from headrace.spec import JobSpec
    from headrace.trainer.models.multimodal import MultimodalModel

__all__ = ["export", "load"]


def load(
    path: Path | str, *, spec: JobSpec, vocabulary: Vocabulary, device: torch.device | str = "cpu", seed: int | None = None
) -> MultimodalModel:
    """Build the whole published model in the folder `path`, with its weights in float32 or, if it has none, fresh ones.

    Called with a PackedMicrobatch it returns the summed loss. spec, vocabulary: of the job that feeds it, as `StepLoader` has
    them. seed: of fresh weights; None: the job's. Raises UserError where the model does not fit the job, `transformers` is
    missing, or the device is not there.
    """
    import torch

    from headrace.trainer.devices import check_device
    from headrace.trainer.models.adapted_units import HuggingFaceUnits
    from headrace.trainer.models.whole_model import WholeModel

    check_device(torch.device(device))
    whole = WholeModel.of(spec.model, spec, vocabulary, HuggingFaceUnits(whole=Path(path)))
    model = whole.make()
    model.to_empty(device=device)
    whole.initialise(model, spec.seed if seed is None else seed)
    return model


def export(
    model: MultimodalModel, source: Path | str, folder: Path | str, *, dtype: str | None = None, format: str = "safetensors"
) -> None:
    """Write a model of `load` to `folder`, which must be empty or absent, as a folder that `transformers` loads.

    source: the folder that it was loaded from, from which configuration and tokenizer are copied. dtype: "float32", "bfloat16" or
    "float16"; None: that of the source. format: "safetensors", or "dcp" for `torch.distributed.checkpoint`. Raises UserError.
    """
    from headrace.trainer.models.adapted_units import HuggingFaceUnits
    from headrace.trainer.models.huggingface.dcp_export import writer
    from headrace.trainer.models.huggingface.safetensors_export import export as export_units

    parameters = dict(model.named_parameters())

    def read(name: str, _: Any) -> torch.Tensor:
        return parameters[name].detach().cpu()

    export_units(model, HuggingFaceUnits(whole=Path(source)), read, Path(folder), writer(format), dtype)
