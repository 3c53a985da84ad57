"""The section of a job spec that says how a sample's text becomes tokens."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headrace import limits
from headrace.user_document import SpecSection

TooLong = Literal["refuse", "truncate_end", "truncate_start"]
"""What becomes of a sample with too many tokens: it is refused, or loses tokens at its end or at its start."""


class TextSpec(SpecSection):
    """The tokenizer and the prompt template that turn a sample's text into tokens."""

    tokenizer: Annotated[str, Field(max_length=limits.MAX_PATH)] = ""
    """Path or fsspec URL of a `tokenizer.json`. Empty: the bundled tokenizer."""
    template: Literal[
        "chatml", "qwen2.5-vl", "llava", "llava-hf", "llama3", "llama3.2-vision", "qwen3-vl", "qwen2-audio", "internvl", "gemma3",
        "pixtral", "smolvlm", "llava-onevision", "chat_template",
    ] = "chatml"  # fmt: skip
    """Prompt template that joins the turns of a sample into one sequence; each but chatml is that of the model of its name, and
    chat_template is the one that lies beside the tokenizer, as `apply_chat_template` of transformers takes it."""
    chat_template_kwargs: Annotated[dict[str, str | int | float | bool | None], Field(max_length=100)] = Field(
        default_factory=dict
    )
    """Variables for the tokenizer's chat template, such as `enable_thinking`."""
    today: date | None = None
    """The date that the tokenizer's chat template gets as today's. None: a template that asks for it is refused, since its
    sequences would be others every day."""
    allow_tokens: Annotated[tuple[str, ...], Field(max_length=10_000)] = ()
    """Special tokens of the tokenizer that data may write: their names in a text are the tokens. All others are text there."""
    image_token: str = ""
    """Control token that stands for an image in the sequence. Empty: the template's own."""
    audio_token: str = ""
    """Control token that stands for a recording in the sequence. Empty: the template's own, if it has one; a template without one
    takes recordings only if this is set."""
    max_tokens: Annotated[int, Field(ge=1, le=limits.MAX_TOKENS)] = 32_768
    """Samples with more tokens than this are quarantined as too_long, or cut, as `too_long` has it."""
    too_long: TooLong = "refuse"
    """What becomes of samples with more than `max_tokens` tokens: they are refused, or cut at their end or at their start. A cut
    that would go through a medium takes it away as a whole, and a sample of which nothing to learn is left is refused."""
    min_targets: Annotated[int, Field(ge=0)] = 0
    """Samples with fewer tokens to learn than this are quarantined as too_short."""

    @model_validator(mode="after")
    def _chat_template_has_a_tokenizer(self) -> Self:
        if self.template == "chat_template" and not self.tokenizer:
            raise ValueError("template chat_template is the one beside a tokenizer: name its tokenizer.json in text.tokenizer")
        if self.template != "chat_template" and (self.chat_template_kwargs or self.today):
            raise ValueError("chat_template_kwargs and today are for template: chat_template")
        return self
