"""Prompt templates as data, by the names of `text.template` in a job's spec; headrace.preprocessor.text.template renders them."""

from __future__ import annotations

from headrace.preprocessor.text.templates.base import Frame, Template
from headrace.preprocessor.text.templates.chatml import CHATML, INTERNVL, QWEN2_5_VL, QWEN2_AUDIO, QWEN3_VL
from headrace.preprocessor.text.templates.gemma import GEMMA3
from headrace.preprocessor.text.templates.llama import LLAMA3, LLAMA3_2_VISION
from headrace.preprocessor.text.templates.llava import LLAVA, LLAVA_HF, LLAVA_ONEVISION
from headrace.preprocessor.text.templates.pixtral import PIXTRAL
from headrace.preprocessor.text.templates.smolvlm import SMOLVLM

TEMPLATES = {
    "chatml": CHATML,
    "qwen2.5-vl": QWEN2_5_VL,
    "llava": LLAVA,
    "llava-hf": LLAVA_HF,
    "llava-onevision": LLAVA_ONEVISION,
    "llama3": LLAMA3,
    "llama3.2-vision": LLAMA3_2_VISION,
    "qwen3-vl": QWEN3_VL,
    "qwen2-audio": QWEN2_AUDIO,
    "internvl": INTERNVL,
    "gemma3": GEMMA3,
    "pixtral": PIXTRAL,
    "smolvlm": SMOLVLM,
}

__all__ = ["TEMPLATES", "Frame", "Template"]
