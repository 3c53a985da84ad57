"""The user's choice of units that come from `transformers`. Imports neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict


class HuggingFaceUnits(BaseModel):
    """The local Hugging Face model, if any, that each unit is taken from.

    A path names a folder with a config.json, and with weights in safetensors unless the unit starts afresh, or a config.json
    alone. None: the compact model's unit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    vision: Path | None = None
    """Qwen2.5-VL, SigLIP or CLIP: the whole model or its vision tower. The job's image.patch, and for Qwen2.5-VL image.merge,
    must equal the model's."""
    audio: Path | None = None
    """Whisper. The job's audio.mel_bins must equal the model's."""
    llm: Path | None = None
    """Llama, Qwen2, Qwen2.5, Qwen3 or Mistral. The job's text.tokenizer must be the model's."""
