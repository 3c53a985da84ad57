"""Chat templates beside a tokenizer: the tokens and the loss are those of `transformers`, on chats drawn at random."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from headrace.mapping import MappingSpec
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.records.record_to_sample import Sample, to_sample
from headrace.preprocessor.text import BUNDLED
from headrace.preprocessor.text.sequence import PromptTemplate, TokenSequence
from headrace.preprocessor.text.template import load_template
from headrace.quarantine import BadSampleError, Reason
from headrace.sample import LABEL_IGNORED
from headrace.text_spec import TextSpec
from tests.unit.preprocessor.text.random_chats import Abilities, Chat, Chats, spoilt

transformers = pytest.importorskip("transformers")

DATA = Path(__file__).parents[3] / "data" / "chat_templates"
GENERATION = re.compile(r"\{%- (end)?generation %\}")
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A template of tests/data/chat_templates, with a tokenizer for it."""

    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    abilities: Abilities = field(default_factory=Abilities)
    parts_only: bool = False
    written: str = ""
    """Placeholder of a medium, and what the model's processor puts in its place for n tokens."""
    expanded: Callable[[int], str] = field(default=lambda _: "")
    spec: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)
    """The same for `apply_chat_template`."""


QWEN = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
VISION = (*QWEN, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]")
SMOL = ("<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>")
AUDIO = (*QWEN, "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
INTERN = (*QWEN, "<img>", "</img>", "<IMG_CONTEXT>")
FAMILIES = {
    "thinking": Family(special=QWEN, eos="<|im_end|>", abilities=Abilities(tools=True, thoughts=True)),
    "vision": Family(
        special=VISION,
        eos="<|im_end|>",
        abilities=Abilities(tools=True, images=True),
        written="<|image_pad|>",
        expanded=lambda count: "<|image_pad|>" * count,
    ),
    "gemma": Family(
        special=GEMMA,
        bos="<bos>",
        eos="<eos>",
        abilities=Abilities(images=True),
        written="<start_of_image>",
        expanded=lambda count: f"\n\n<start_of_image>{'<image_soft_token>' * count}<end_of_image>\n\n",
    ),
    "llama": Family(
        special=LLAMA,
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        abilities=Abilities(tools=True, calls_at_once=1),
        spec={"today": "2024-07-26"},
        theirs={"date_string": "26 Jul 2024"},
    ),
    "mistral": Family(
        special=MISTRAL,
        bos="<s>",
        eos="</s>",
        abilities=Abilities(images=True),
        written="[IMG]",
        expanded=lambda count: "[IMG]" * count,
    ),
    "smol": Family(
        special=SMOL,
        bos="<|im_start|>",
        eos="<end_of_utterance>",
        abilities=Abilities(images=True),
        parts_only=True,
        written="<image>",
        expanded=lambda count: f"<fake_token_around_image><global-img>{'<image>' * count}<fake_token_around_image>",
    ),
    "audio": Family(
        special=AUDIO,
        eos="<|im_end|>",
        abilities=Abilities(audios=True),
        written="<|AUDIO|>",
        expanded=lambda count: "<|AUDIO|>" * count,
    ),
    "internvl": Family(
        special=INTERN,
        eos="<|im_end|>",
        abilities=Abilities(images=True),
        written="<IMG_CONTEXT>",
        expanded=lambda count: f"<img>{'<IMG_CONTEXT>' * count}</img>",
    ),
}
EVERY = pytest.mark.parametrize("name", list(FAMILIES))


def write_folder(folder: Path, family: Family, template: str) -> Path:
    """A tokenizer as it is published: tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer = Tokenizer.from_file(str(BUNDLED))
    tokenizer.add_special_tokens(list(family.special))
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": family.bos, "eos_token": family.eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def ours(folder: Path, **spec: Any) -> PromptTemplate:
    return load_template(TextSpec.model_validate({"tokenizer": f"{folder}/tokenizer.json", "template": "chat_template", **spec}))


def sample_of(messages: list[dict[str, Any]], tools: Any = None) -> Sample:
    kinds = [part["type"] for message in messages if isinstance(message["content"], list) for part in message["content"]]
    media = {f"{kind}s": [kind] * kinds.count(kind) for kind in ("image", "audio") if kind in kinds}
    fields = {"messages": messages, "tools": tools, **media}
    special = tuple(token for family in FAMILIES.values() for token in family.special)  # text, here
    mapping = MappingSpec(image_placeholder="[image]", audio_placeholder="[audio]", ignore=special)
    return to_sample(Record(key="k", fields=fields, load=str.encode), mapping)


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]} if isinstance(message["content"], str) else message
        for message in messages
    ]


class Compared:
    """One template with its tokenizer, here and in `transformers`."""

    def __init__(self, folder: Path, family: Family) -> None:
        self.family = family
        self.theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
        self.ours = ours(folder, **family.spec)

    def expected(self, chat: Chat) -> tuple[list[int], str]:
        """Token ids, and the text behind them."""
        messages = in_parts(chat.messages) if self.family.parts_only else chat.messages
        text = self.theirs.apply_chat_template(messages, tools=chat.tools, tokenize=False, **self.family.theirs)
        plain = self.theirs.apply_chat_template(messages, tools=chat.tools, return_dict=False, **self.family.theirs)
        assert plain == self.theirs.encode(text, add_special_tokens=False)
        if chat.media_tokens:
            head, *rest = text.split(self.family.written)
            pairs = zip(chat.media_tokens, rest, strict=True)
            text = head + "".join(self.family.expanded(count) + part for count, part in pairs)
        return self.theirs.encode(text, add_special_tokens=False), text

    def rendered(self, chat: Chat) -> TokenSequence:
        return self.ours.render(sample_of(chat.messages, chat.tools), chat.media_tokens)

    def mask(self, chat: Chat) -> list[int]:
        """What `transformers` says is generated; the chat has no media."""
        messages = in_parts(chat.messages) if self.family.parts_only else chat.messages
        options = {"return_dict": True, "return_assistant_tokens_mask": True, **self.family.theirs}
        given = self.theirs.apply_chat_template(messages, tools=chat.tools, **options)
        return list(given["assistant_masks"])


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Compared]:
    made: dict[str, Compared] = {}

    def get(name: str) -> Compared:
        if name not in made:
            template = (DATA / f"{name}.jinja").read_text(encoding="utf-8")
            made[name] = Compared(write_folder(tmp_path_factory.mktemp(name), FAMILIES[name], template), FAMILIES[name])
        return made[name]

    return get


def check_tokens(pair: Compared, name: str, number: int) -> None:
    chats = Chats(7, FAMILIES[name].abilities)
    for _ in range(number):
        chat = chats.draw()
        ids, text = pair.expected(chat)
        got = pair.rendered(chat).input_ids.tolist()
        assert got == ids, f"{chat}\nours: {pair.ours.encoder.decode(got)!r}\ntheirs: {text!r}"


@EVERY
def test_tokens_are_those_of_transformers(compared: Callable[[str], Compared], name: str) -> None:
    check_tokens(compared(name), name, 16)


@pytest.mark.slow
@EVERY
def test_tokens_of_a_thousand_chats_are_those_of_transformers(compared: Callable[[str], Compared], name: str) -> None:
    check_tokens(compared(name), name, 1000)


@EVERY
def test_loss_is_where_the_template_says_that_text_is_generated(compared: Callable[[str], Compared], name: str) -> None:
    pair = compared(name)
    chats = Chats(8, dataclasses.replace(FAMILIES[name].abilities, images=False, audios=False))
    for _ in range(12):
        chat = chats.draw()
        assert (pair.rendered(chat).labels != LABEL_IGNORED).tolist() == [bool(learnt) for learnt in pair.mask(chat)]


def unmarked(folder: Path, name: str) -> PromptTemplate:
    """The template without its marks."""
    template = GENERATION.sub("", (DATA / f"{name}.jinja").read_text(encoding="utf-8"))
    return ours(write_folder(folder, FAMILIES[name], template), **FAMILIES[name].spec)


@pytest.mark.parametrize("without", ["tools", "thoughts"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "smol"])  # which marks its words without the blank
def test_loss_is_the_same_where_the_template_says_nothing(
    compared: Callable[[str], Compared], tmp_path: Path, name: str, without: str
) -> None:
    template = unmarked(tmp_path, name)
    chats = Chats(9, dataclasses.replace(FAMILIES[name].abilities, **{without: False}))
    for _ in range(10):
        chat = chats.draw()
        marked = compared(name).rendered(chat)
        derived = template.render(sample_of(chat.messages, chat.tools), chat.media_tokens)
        assert derived.input_ids.tolist() == marked.input_ids.tolist()
        assert derived.labels.tolist() == marked.labels.tolist(), chat


def test_what_is_learnt_is_refused_where_a_prompt_is_rendered_in_another_way_later(tmp_path: Path) -> None:
    """The thought before the call is there when the model answers, and gone once another question follows."""
    call = {"function": {"name": "add", "arguments": {}}}
    messages = [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "Five."},
    ]
    template = unmarked(tmp_path, "thinking")
    assert template.render(sample_of(messages), []).num_targets > 20
    messages += [{"role": "user", "content": "And 4?"}, {"role": "assistant", "content": "Nine."}]
    with pytest.raises(BadSampleError, match="turn 3: the chat template renders the turns before it in another way") as caught:
        template.render(sample_of(messages), [])
    assert caught.value.reason is Reason.SCHEMA_ERROR
    messages[3]["weight"] = 0
    sequence = template.render(sample_of(messages), [])
    assert "Five" not in template.encoder.decode(sequence.labels[sequence.labels != LABEL_IGNORED].tolist())


@EVERY
def test_control_tokens_in_what_is_said_are_text(compared: Callable[[str], Compared], name: str) -> None:
    """Whole names and parts of them, side by side with others: the same control tokens as in the chat without."""
    pair, random = compared(name), Random(3)
    chats = Chats(10, FAMILIES[name].abilities)
    control = set(pair.ours.encoder.control.values())
    placeholders = {pair.ours.vocabulary.image_token, pair.ours.vocabulary.audio_token}
    disarmed = 0
    for _ in range(24):
        chat = chats.draw()
        attacked = dataclasses.replace(
            chat,
            messages=spoilt(chat.messages, FAMILIES[name].special, random),
            tools=spoilt(chat.tools, FAMILIES[name].special, random),
        )
        expected, got = pair.rendered(chat), pair.rendered(attacked)
        assert [token for token in got.input_ids.tolist() if token in control] == [
            token for token in expected.input_ids.tolist() if token in control
        ]
        assert not placeholders & set(got.labels.tolist())
        disarmed += got.num_disarmed
    assert disarmed > 24


@EVERY
def test_what_is_said_comes_through_as_it_is(compared: Callable[[str], Compared], name: str) -> None:
    pair = compared(name)
    said = "".join(FAMILIES[name].special)
    messages = [{"role": "user", "content": f"x{said}y"}, {"role": "assistant", "content": f"z{said}"}]
    sequence = pair.ours.render(sample_of(messages), [])
    shown = in_parts(messages) if FAMILIES[name].parts_only else messages
    text = pair.theirs.apply_chat_template(shown, tokenize=False, **FAMILIES[name].theirs)
    assert pair.ours.encoder.decode(sequence.input_ids.tolist()) == text
    assert sequence.num_disarmed == 2 * len(FAMILIES[name].special)
    learnt = sequence.labels[sequence.labels != LABEL_IGNORED].tolist()
    assert f"z{said}" in pair.ours.encoder.decode(learnt)


def test_a_medium_without_a_placeholder_and_a_field_without_a_place_are_refused(
    compared: Callable[[str], Compared],
) -> None:
    image = [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "A hen."}]
    with pytest.raises(BadSampleError, match=r"part of type image; name it in text\.image_token") as caught:
        compared("thinking").ours.render(sample_of(image), [3])
    assert caught.value.reason is Reason.UNSUPPORTED_MEDIA
    asked = {"role": "user", "content": "?"}
    thought = [asked, {"role": "assistant", "content": "5", "reasoning_content": "Hm."}]
    with pytest.raises(BadSampleError, match="turn 1: reasoning_content has no place in a template"):
        compared("gemma").ours.render(sample_of(thought), [])
    with pytest.raises(BadSampleError, match="tools has no place in a template"):
        compared("mistral").ours.render(sample_of([asked, {"role": "assistant", "content": "5"}], [{"name": "f"}]), [])
    twice = [asked, asked, {"role": "assistant", "content": "5"}]
    with pytest.raises(BadSampleError, match="the chat template refuses the conversation: Questions and answers must alternate"):
        compared("gemma").ours.render(sample_of(twice), [])


def test_only_answers_that_are_to_be_learnt_are(compared: Callable[[str], Compared]) -> None:
    messages = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "One.", "weight": 0},
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "Two."},
    ]
    template = compared("vision").ours
    sequence = template.render(sample_of(messages), [])
    learnt = sequence.labels[sequence.labels != LABEL_IGNORED].tolist()
    assert template.encoder.decode(learnt) == "Two.<|im_end|>"


def test_thoughts_that_a_mapping_makes_words_of_are_those_of_the_field(compared: Callable[[str], Compared]) -> None:
    messages = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5", "reasoning_content": "Hm."}]
    record = Record(key="k", fields={"messages": messages}, load=str.encode)
    template = compared("thinking").ours
    carried, kept = (template.render(to_sample(record, MappingSpec(thinking=word)), []) for word in (None, "keep"))
    assert carried.input_ids.tolist() == kept.input_ids.tolist()
    with pytest.raises(BadSampleError, match="set the mapping's thinking to keep or drop"):
        template.render(to_sample(record, MappingSpec(thinking="mask")), [])


def test_a_caption_is_its_text_between_beginning_and_end(compared: Callable[[str], Compared]) -> None:
    caption = to_sample(Record(key="k", fields={"caption": "A <bos> hen.", "image": "i"}, load=str.encode), MappingSpec())
    template = compared("gemma").ours
    sequence = template.render(caption, [2])
    said = template.encoder.decode(sequence.input_ids.tolist())
    assert said == "<bos>\n\n<start_of_image><image_soft_token><image_soft_token><end_of_image>\n\nA <bos> hen.<eos>"
    assert np.count_nonzero(sequence.input_ids == template.encoder.control["<bos>"]) == 1
    vision = compared("vision").ours
    told = vision.encoder.decode(vision.render(caption, [2]).input_ids.tolist())
    assert told == "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>A <bos> hen.<|im_end|>"
