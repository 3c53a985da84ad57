"""Templates against `transformers`: every sequence of tests/data/templates, token for token.

The golden files come from the models' processors and published chat templates (tests/data/templates/generate.py).
"""

from __future__ import annotations

import io
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from PIL import Image as Picture
from tokenizers import Tokenizer

from headrace.preprocessor import image
from headrace.preprocessor.records.record_to_sample import Image, Role, Sample, Text, Turn
from headrace.preprocessor.text import BUNDLED, TextEncoder
from headrace.preprocessor.text.template import ChatTemplate, load_template
from headrace.preprocessor.text.templates import TEMPLATES
from headrace.sample import LABEL_IGNORED
from headrace.spec import ImageSpec
from headrace.text_spec import TextSpec
from tests.unit.preprocessor.text.test_named_templates import MODELS

DATA = Path(__file__).parents[3] / "data" / "templates"
GOLDEN = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in DATA.glob("*.json")
    if not path.stem.startswith("tokenizer")
}
CASES = [(stem, case) for stem, golden in GOLDEN.items() for case in golden["cases"]]
NO_END = {"llava-hf"}


@cache
def template(stem: str) -> ChatTemplate:
    golden = GOLDEN[stem]
    if golden["tokenizer"] == "bundled":
        tokenizer = Tokenizer.from_file(str(BUNDLED))
        tokenizer.add_special_tokens(golden["added_tokens"])
        definition = tokenizer.to_str()
    else:
        definition = (DATA / f"tokenizer-{golden['tokenizer']}.json").read_text(encoding="utf-8")
    data = TEMPLATES[golden["template"]]
    return ChatTemplate(TextEncoder(definition, stem, data.control), 10_000, data)


def sample_of(case: dict[str, Any]) -> tuple[Sample, list[int]]:
    turns = tuple(
        Turn(
            role=Role(turn["role"]),
            segments=tuple(Text(text=part["text"]) if "text" in part else Image(data=b"") for part in turn["parts"]),
        )
        for turn in case["turns"]
    )
    counts = [part["image"] for turn in case["turns"] for part in turn["parts"] if "image" in part]
    return Sample(turns=turns), counts


@pytest.mark.parametrize(("stem", "case"), CASES)
def test_sequences_are_those_of_transformers(stem: str, case: str) -> None:
    golden = GOLDEN[stem]["cases"][case]
    sequence = template(stem).render(*sample_of(golden))
    decode = template(stem).encoder.decode
    assert sequence.input_ids.tolist() == golden["input_ids"], f"ours: {decode(sequence.input_ids.tolist())!r}"


@pytest.mark.parametrize(("stem", "case"), CASES)
def test_loss_is_on_what_the_assistant_says_and_its_end(stem: str, case: str) -> None:
    golden = GOLDEN[stem]["cases"][case]
    sequence = template(stem).render(*sample_of(golden))
    learnt = sequence.labels[sequence.labels != LABEL_IGNORED].tolist()
    data = TEMPLATES[GOLDEN[stem]["template"]]
    end = data.roles[Role.ASSISTANT].end
    answers = [part["text"] for turn in golden["turns"] if turn["role"] == "assistant" for part in turn["parts"]]
    said = template(stem).encoder.decode(learnt)
    assert re.sub(r"\s", "", said) == re.sub(r"\s", "", "".join(answer + end for answer in answers))
    assert bool(end) is (GOLDEN[stem]["template"] not in NO_END)


@pytest.mark.parametrize("stem", [stem for stem in GOLDEN if GOLDEN[stem]["template"] == "qwen2.5-vl"])
def test_images_have_as_many_tokens_as_the_processor_gives_them(stem: str) -> None:
    seen = 0
    for case in GOLDEN[stem]["cases"].values():
        for part in (part for turn in case["turns"] for part in turn["parts"] if "image" in part):
            data = io.BytesIO()
            Picture.new("RGB", tuple(part["size"])).save(data, "PNG")
            assert image.probe(data.getvalue(), ImageSpec()).tokens(ImageSpec().merge) == part["image"]
            seen += 1
    assert seen > 5


def test_every_template_is_compared_with_transformers_and_has_a_name_in_the_spec() -> None:
    """By golden files here, or by the processors themselves in test_named_templates."""
    names = get_args(TextSpec.model_fields["template"].annotation)
    compared = {golden["template"] for golden in GOLDEN.values()} | {model.template or name for name, model in MODELS.items()}
    assert set(names) - {"chat_template"} == set(TEMPLATES) == compared


def test_the_bundled_tokenizer_serves_chatml_and_qwen() -> None:
    assert load_template(TextSpec()).vocabulary.audio_token >= 0
    assert load_template(TextSpec(template="qwen2.5-vl")).vocabulary.audio_token == -1
