"""Which units of a model come from `transformers`. It knows neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict


class HuggingFaceUnits(BaseModel):
    """For each unit a local model: a folder with a config.json, and with its weights in safetensors where it does not start
    afresh; or a config.json alone. None: the unit is the compact model's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    vision: Path | None = None
    """Qwen2.5-VL, SigLIP or CLIP: the whole model or its vision tower. The job's image.patch, and for Qwen2.5-VL image.merge, are
    its own."""
    audio: Path | None = None
    """Whisper. The job's audio.mel_bins are its own."""
    llm: Path | None = None
    """Llama, Qwen2, Qwen2.5, Qwen3 or Mistral. The job's text.tokenizer is its own."""
