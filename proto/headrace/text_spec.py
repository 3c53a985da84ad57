"""The section of a job spec that says how a sample's text becomes tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace import limits
from headrace.user_document import SpecSection


class TextSpec(SpecSection):
    """The tokenizer and the prompt template that turn a sample's text into tokens."""

    tokenizer: Annotated[str, Field(max_length=limits.MAX_PATH)] = ""
    """Path or fsspec URL of a `tokenizer.json`. Empty: the bundled tokenizer."""
    template: Literal["chatml", "qwen2.5-vl", "llava", "llava-hf", "llama3", "llama3.2-vision"] = "chatml"
    """Prompt template that joins the turns of a sample into one sequence; each but chatml is that of the model of its name."""
    image_token: str = ""
    """Control token that stands for an image in the sequence. Empty: the template's own."""
    audio_token: str = ""
    """Control token that stands for a recording in the sequence. Empty: the template's own, if it has one; a template without one
    takes recordings only if this is set."""
    max_tokens: Annotated[int, Field(ge=1, le=limits.MAX_TOKENS)] = 32_768
    """Samples with more tokens than this are quarantined as too_long."""
    min_targets: Annotated[int, Field(ge=0)] = 0
    """Samples with fewer tokens to learn than this are quarantined as too_short."""
