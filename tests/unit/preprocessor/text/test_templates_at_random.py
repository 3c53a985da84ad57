"""The named templates that have golden files, on chats drawn at random: tokens are those of the models' processors.

The processors and published templates are those that the golden files are made with (tests/data/templates/generate.py).
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from PIL import Image as Picture
from tokenizers import Tokenizer

from headrace.preprocessor.records.record_to_sample import Image, Role, Sample, Segment, Text, Turn
from headrace.preprocessor.text import TextEncoder
from headrace.preprocessor.text.template import ChatTemplate
from headrace.preprocessor.text.templates import TEMPLATES
from tests.unit.preprocessor.text.random_chats import Abilities, Chat, Chats

pytest.importorskip("transformers")

Parts = list[str | tuple[int, int]]
"""Texts, and images by their sizes."""
NAMES = ("chatml", "qwen2.5-vl", "llava", "llava-hf", "llama3", "llama3.2-vision")
EVERY = pytest.mark.parametrize("name", NAMES)


@cache
def golden() -> Any:
    """The module that makes the golden files."""
    path = Path(__file__).parents[3] / "data" / "templates" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate_golden_templates", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def turns_of(chat: Chat, random: Random, unit: int) -> list[tuple[str, Parts]]:
    """The chat as the golden cases have it, with images whose sides are random multiples of `unit` pixels."""

    def parts(content: Any) -> Parts:
        if isinstance(content, str):
            return [content]
        sizes = iter([(unit * random.randint(2, 9), unit * random.randint(2, 9)) for _ in content])
        return [part["text"] if part["type"] == "text" else next(sizes) for part in content]

    return [(message["role"], parts(message["content"])) for message in chat.messages]


def expected(processor: Any, name: str, turns: list[tuple[str, Parts]]) -> tuple[list[int], list[int]]:
    """Token ids by the processor, and the number of tokens of each image."""
    fast = getattr(processor, "tokenizer", processor)
    sizes = [part for _, parts in turns for part in parts if not isinstance(part, str)]
    extra = {"date_string": "26 Jul 2024"} if name == "llama3.2-vision" else {}
    text = processor.apply_chat_template(golden().messages_of(name, turns), tokenize=False, **extra)
    pictures = [Picture.fromarray(np.zeros((height, width, 3), np.uint8)) for width, height in sizes]
    ids = golden().by_processor(processor, name, text, pictures)
    if name in ("chatml", "llama3"):
        return ids, [width * height // 784 for width, height in sizes]
    if name == "qwen2.5-vl" or name == "llama3.2-vision":
        return ids, golden().image_counts(fast, name, ids, len(sizes))
    return ids, [9] * len(sizes)  # of 42 x 42 pixels in the middle, in patches of 14


def sample_of(turns: list[tuple[str, Parts]]) -> Sample:
    def segment(part: str | tuple[int, int]) -> Segment:
        return Text(text=part) if isinstance(part, str) else Image(data=b"")

    return Sample(turns=tuple(Turn(role=Role(role), segments=tuple(map(segment, parts))) for role, parts in turns))


def check_tokens(name: str, number: int) -> None:
    tokenizer: Tokenizer = golden().bundled(golden().CONTROL[name])
    definition = tokenizer.to_str()
    template = ChatTemplate(TextEncoder(definition, name, TEMPLATES[name].control), 100_000, TEMPLATES[name])
    processor = golden().processor_of(name, tokenizer)
    chats, random = Chats(21, Abilities(images=True)), Random(22)
    compared = 0
    while compared < number:
        turns = turns_of(chats.draw(), random, 28)
        has_images = any(not isinstance(part, str) for _, parts in turns for part in parts)
        if name in golden().NO_SYSTEM_BESIDE_IMAGES and turns[0][0] == "system" and has_images:
            continue  # its template refuses them
        ids, counts = expected(processor, name, turns)
        got = template.render(sample_of(turns), counts).input_ids.tolist()
        assert got == ids, f"{turns}\nours: {template.encoder.decode(got)!r}\ntheirs: {template.encoder.decode(ids)!r}"
        compared += 1


@EVERY
def test_tokens_are_those_of_the_models_processor(name: str) -> None:
    check_tokens(name, 50)


@pytest.mark.slow
@pytest.mark.timeout(900)
@EVERY
def test_tokens_of_a_thousand_chats_are_those_of_the_models_processor(name: str) -> None:
    check_tokens(name, 1000)
