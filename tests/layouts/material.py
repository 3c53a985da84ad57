"""Small pictures, sounds and texts for the layouts, made from a number and nothing else. All of it is CC0."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import soundfile
from PIL import Image, ImageDraw

COUNT = 3
"""Samples of most layouts."""
FILM = b"\0\0\0\x1cftypisom\0\0\2\0isomiso2mp41\0\0\0\x08free"
"""The head of an MP4 file: enough to be one, for readers that do not decode it."""
PDF = b"%PDF-1.4\n1 0 obj<</Type/Catalog>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF\n"
_THINGS = (
    "a red barn",
    "two green boats",
    "the old mill",
    "a yellow kite",
    "three blue cups",
    "a long bridge",
    "an owl",
    "a stair",
)


def drawing(number: int, mode: str = "RGB") -> Image.Image:
    """Return a picture of an ellipse on one colour, of another size and colour for each number."""
    width, height = 20 + 4 * (number % 5), 16 + 2 * (number % 3)
    base = Image.new("RGB", (width, height), ((37 * number + 60) % 256, (91 * number + 30) % 256, (53 * number + 120) % 256))
    ImageDraw.Draw(base).ellipse((3, 2, width - 5, height - 4), fill=((17 * number + 200) % 256, 90, (29 * number) % 256))
    if mode == "I;16":
        return Image.fromarray(np.asarray(base.convert("L")).astype(np.uint16) * 257)
    return base.convert(mode)


def picture(number: int, form: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    """Return the drawing of a number as a file in a format of Pillow."""
    buffer = io.BytesIO()
    drawing(number, mode).save(buffer, form, **options)
    return buffer.getvalue()


def sound(number: int, form: str = "WAV", **options: Any) -> bytes:
    """Return a beep of a fifth of a second, at 8 kHz, as a file in a format of libsndfile."""
    buffer = io.BytesIO()
    wave = 0.3 * np.sin(2 * np.pi * (220 + 60 * number) * np.arange(1600) / 8000)
    soundfile.write(buffer, wave, 8000, format=form, **options)
    return buffer.getvalue()


def caption(number: int) -> str:
    """Return the caption of a picture."""
    return f"{_THINGS[number % len(_THINGS)]}, number {number}"


def question(number: int) -> str:
    """Return a question, another one for each number."""
    return f"What is there in picture {number}?"


def answer(number: int) -> str:
    """Return the answer to the question of that number."""
    return f"There is {caption(number)}."


def sharegpt(number: int, placeholder: str = "<image>\n") -> list[dict[str, str]]:
    """Return two questions and answers as LLaVA has them; the first question has the picture."""
    return [
        {"from": "human", "value": f"{placeholder}{question(number)}"},
        {"from": "gpt", "value": answer(number)},
        {"from": "human", "value": "Are you sure?"},
        {"from": "gpt", "value": "Yes."},
    ]


def messages(number: int, placeholder: str = "<image>") -> list[dict[str, str]]:
    """Return a question and its answer as messages of plain text."""
    return [
        {"role": "user", "content": f"{placeholder}{question(number)}"},
        {"role": "assistant", "content": answer(number)},
    ]
