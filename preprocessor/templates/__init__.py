"""Prompt templates as data, by the names of `text.template` in a job's spec; preprocessor.template renders them."""

from __future__ import annotations

from preprocessor.templates.base import Frame, Template
from preprocessor.templates.chatml import CHATML, QWEN2_5_VL
from preprocessor.templates.llama import LLAMA3, LLAMA3_2_VISION
from preprocessor.templates.llava import LLAVA, LLAVA_HF

TEMPLATES = {
    "chatml": CHATML,
    "qwen2.5-vl": QWEN2_5_VL,
    "llava": LLAVA,
    "llava-hf": LLAVA_HF,
    "llama3": LLAMA3,
    "llama3.2-vision": LLAMA3_2_VISION,
}

__all__ = ["TEMPLATES", "Frame", "Template"]
