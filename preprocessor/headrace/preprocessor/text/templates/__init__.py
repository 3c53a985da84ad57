"""Prompt templates as data, by the names of `text.template` in a job's spec; headrace.preprocessor.text.template renders them."""

from __future__ import annotations

from headrace.preprocessor.text.templates.base import Frame, Template
from headrace.preprocessor.text.templates.chatml import CHATML, QWEN2_5_VL
from headrace.preprocessor.text.templates.llama import LLAMA3, LLAMA3_2_VISION
from headrace.preprocessor.text.templates.llava import LLAVA, LLAVA_HF

TEMPLATES = {
    "chatml": CHATML,
    "qwen2.5-vl": QWEN2_5_VL,
    "llava": LLAVA,
    "llava-hf": LLAVA_HF,
    "llama3": LLAMA3,
    "llama3.2-vision": LLAMA3_2_VISION,
}

__all__ = ["TEMPLATES", "Frame", "Template"]
