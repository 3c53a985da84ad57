"""The user's choice of units that come from `transformers`. Imports neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator


class HuggingFaceUnits(BaseModel):
    """The local Hugging Face model, if any, that each unit is taken from.

    A path names a folder with a config.json, and with weights in safetensors unless the unit starts afresh, or a config.json
    alone. None: the compact model's unit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    whole: Path | None = None
    """A published model that all units and projectors are taken from: Qwen2-VL, Qwen2.5-VL, LLaVA, LLaVA-OneVision, InternVL or
    Qwen2-Audio. The job's text.tokenizer must be the model's."""
    vision: Path | None = None
    """Qwen2-VL, Qwen2.5-VL, SigLIP or CLIP: the whole model or its vision tower. The job's image.patch, and for Qwen-VL
    image.merge, must equal the model's."""
    audio: Path | None = None
    """Whisper. The job's audio.mel_bins must equal the model's."""
    llm: Path | None = None
    """Llama, Qwen2, Qwen2.5, Qwen3 or Mistral. The job's text.tokenizer must be the model's."""

    @model_validator(mode="after")
    def _whole_or_parts(self) -> Self:
        parts = [name for name in ("vision", "audio", "llm") if getattr(self, name) is not None]
        if self.whole is not None and parts:
            raise ValueError(f"whole takes all units from one model, and {', '.join(parts)} from another: name either")
        return self
