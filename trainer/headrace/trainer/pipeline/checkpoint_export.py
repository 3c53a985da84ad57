"""Export of a pipeline's or a node's checkpoint: the weights of all its processes, as `transformers` names them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from headrace.model_shape import MODEL_SHAPES
from headrace.trainer.models.adapted_units import HuggingFaceUnits
from headrace.trainer.models.huggingface.dcp_export import writer
from headrace.trainer.models.huggingface.model import adapted_model, own_settings
from headrace.trainer.models.huggingface.safetensors_export import export
from headrace.trainer.pipeline.checkpoint_files import WEIGHT, Checkpoint, TensorKey


def export_checkpoint(
    checkpoint: Checkpoint, units: HuggingFaceUnits, folder: Path, *, dtype: str | None = None, format: str = "safetensors"
) -> Sequence[Path]:
    """Write the models of a checkpoint to `folder`, and return the folders that `transformers` loads.

    units: the models of `transformers` that the trainers had, with the folders that they started from. A tensor is read when it
    is written, so that the host needs no room for the whole model. dtype: "float32", "bfloat16" or "float16"; None: that of the
    folders that they started from. format: "safetensors" or "dcp". Raises UserError where the checkpoint is of other models.
    """
    image, audio = own_settings(units)
    token = 0 if units.whole is None else -1  # compact units ask for a placeholder, and a whole model for none but its own
    model = adapted_model(
        units, MODEL_SHAPES["tiny"], vocab_size=1, image=image, audio=audio, image_token_id=token, audio_token_id=-1
    )

    def read(name: str, shape: Sequence[int]) -> Tensor:
        return checkpoint.read(TensorKey(name=name, kind=WEIGHT), shape)

    return export(model, units, read, folder, writer(format), dtype)
