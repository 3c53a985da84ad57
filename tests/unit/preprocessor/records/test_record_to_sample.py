"""From records to samples: shapes of text, placeholders, media, and strictness."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import SpecError
from headrace.mapping import MAPPING_PRESETS, MappingSpec
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.records.record_to_sample import Image, Role, Segment, Text, to_sample
from headrace.quarantine import BadSampleError, Reason
from headrace.spec import load_spec_json, parse_spec

Simple = list[tuple[str, list[str]]]


def simple(fields: dict[str, Any], members: tuple[str, ...] = (), spec: MappingSpec | None = None) -> Simple:
    """Turns as (role, pieces); media as "<image NAME>"."""

    def load(name: str) -> bytes:
        if name == "gone":
            raise BadSampleError(Reason.MISSING_MEDIA, name)
        return name.encode()

    sample = to_sample(Record(key="k", fields=fields, members=members, load=load), spec or MappingSpec())
    return [(turn.role.value, [shown(segment) for segment in turn.segments]) for turn in sample.turns]


def shown(segment: Segment) -> str:
    if isinstance(segment, Text):
        return segment.text
    return f"<{'image' if isinstance(segment, Image) else 'audio'} {segment.data.decode()}>"


def refusal(fields: dict[str, Any], spec: MappingSpec | None = None) -> BadSampleError:
    with pytest.raises(BadSampleError) as caught:
        simple(fields, spec=spec)
    return caught.value


PAIR = [("user", ["<image a>", "\nwhat?"]), ("assistant", ["this"])]


@pytest.mark.parametrize(
    "fields",
    [
        {"texts": [{"user": "<image>\nwhat?", "assistant": "this"}]},
        {"texts": [{"user": "<image>\nwhat?", "assistant": "this", "source": "extra"}]},
        {"conversations": [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "this"}]},
        {"messages": [{"role": "user", "content": "<image>\nwhat?"}, {"role": "assistant", "content": "this"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "\nwhat?"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "this"}]},
            ]
        },
    ],
)
def test_chat_shapes_are_one(fields: dict[str, Any]) -> None:
    assert simple({"images": ["a"], **fields}) == PAIR


def test_roles_of_the_mapping() -> None:
    spec = MappingSpec(text="chat", user_roles=("Q",), assistant_roles=("A",), system_roles=("S",))
    chat = [{"from": "S", "value": "s"}, {"from": "Q", "value": "q"}, {"from": "A", "value": "a"}]
    assert simple({"chat": chat}, spec=spec) == [("system", ["s"]), ("user", ["q"]), ("assistant", ["a"])]


def test_each_kind_of_placeholder_has_its_own_order() -> None:
    fields = {"texts": ["1<audio>2", "<image>", "<image>3<audio>"], "images": ["a", "b"], "audios": ["x", "y"]}
    assert simple(fields) == [("document", ["1", "<audio x>", "2", "<image a>", "<image b>", "3", "<audio y>"])]


def test_caption_without_placeholder_has_its_media_in_front() -> None:
    assert simple({"caption": "a cat", "image": "a"}) == [("document", ["<image a>", "a cat"])]
    assert simple({"txt": "both"}, ("wav", "2.jpg")) == [("document", ["<image 2.jpg>", "<audio wav>", "both"])]


@pytest.mark.parametrize("key", ["transcription", "transcript", "sentence"])
def test_a_transcript_is_a_caption_of_its_medium(key: str) -> None:
    assert simple({"audio": "a", key: "hello", "path": "x", "age": "teens"}) == [("document", ["<audio a>", "hello"])]
    assert simple({key: "hello"}, ("png",)) == [("document", ["<image png>", "hello"])]
    assert simple({"audio": "a", key: "hello", "question": "?", "answer": "!"})[0] == ("user", ["<audio a>", "?"])
    assert "none of texts" in refusal({key: "hello", "label": 1}).detail
    assert "none of texts" in refusal({key: "hello", "audio": None}).detail
    assert "none of texts" in refusal({"audio": "a", "transcription": "hello", "sentence": "Hello."}).detail


def test_an_empty_name_is_no_medium() -> None:
    """As LLaVA's rows of text have it."""
    assert simple({"texts": [{"user": "q", "assistant": "a"}], "image": ""}) == [("user", ["q"]), ("assistant", ["a"])]
    assert refusal({"texts": ["<image>"], "image": ""}).reason is Reason.MISSING_MEDIA


def test_caption_with_placeholder_keeps_its_place() -> None:
    assert simple({"text": "see <image>!", "image": "a"}) == [("document", ["see ", "<image a>", "!"])]


def test_placeholder_inside_of_a_typed_part_is_text() -> None:
    content = [{"type": "text", "text": "what does <image> mean?"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": [{"type": "text", "text": "a tag"}]}]
    assert simple({"messages": messages})[0] == ("user", ["what does <image> mean?"])


def test_placeholders_are_taken_literally() -> None:
    spec = MappingSpec(image_placeholder="(.*)")
    assert simple({"texts": ["a(.*)b", "<image>"], "images": ["i"]}, spec=spec) == [
        ("document", ["a", "<image i>", "b", "<image>"])
    ]


def test_members_stand_in_for_missing_lists() -> None:
    assert simple({"texts": ["<image><image>"]}, ("0.jpg", "1.png", "cls")) == [("document", ["<image 0.jpg>", "<image 1.png>"])]
    spec = MappingSpec(images="seg.png")
    assert simple({"texts": ["<image>"]}, ("jpg", "seg.png"), spec) == [("document", ["<image seg.png>"])]


def test_media_as_bytes_and_as_structs() -> None:
    for value in (b"a", {"bytes": b"a", "path": None}, [{"bytes": b"a", "path": "z.jpg"}], "a", ["a"]):
        assert simple({"texts": ["<image>"], "image": value}) == [("document", ["<image a>"])]


def test_first_text_that_is_not_null_counts() -> None:
    assert simple({"texts": None, "conversations": None, "caption": "c", "text": "t"}) == [("document", ["c"])]


def test_loss_is_on_answers_and_documents() -> None:
    fields = {"messages": [{"role": role, "content": role} for role in ("system", "user", "assistant")]}
    sample = to_sample(Record(key="k", fields=fields, load=str.encode), MappingSpec())
    assert [turn.loss for turn in sample.turns] == [False, False, True]
    document = to_sample(Record(key="k", fields={"txt": "t"}, load=str.encode), MappingSpec())
    assert [(turn.role, turn.loss) for turn in document.turns] == [(Role.DOCUMENT, True)]


@pytest.mark.parametrize(
    ("fields", "reason", "detail"),
    [
        ({}, Reason.SCHEMA_ERROR, "none of texts"),
        ({"texts": "a string"}, Reason.SCHEMA_ERROR, "texts: expected a list, got a string"),
        ({"caption": 3}, Reason.SCHEMA_ERROR, "caption: expected a string or a list, got int"),
        ({"texts": ["a", 3]}, Reason.SCHEMA_ERROR, "texts[0]: expected a turn"),
        ({"texts": ["a", None]}, Reason.SCHEMA_ERROR, "texts and images have nulls in each other's place"),
        ({"texts": [{"user": "q"}]}, Reason.SCHEMA_ERROR, "texts[0]: expected {user, assistant}"),
        ({"texts": [{"user": "q", "assistant": None}]}, Reason.SCHEMA_ERROR, "texts[0].assistant: expected a string, got null"),
        ({"conversations": [{"from": 1, "value": "x"}]}, Reason.SCHEMA_ERROR, "conversations[0].from: expected a string"),
        ({"conversations": [{"from": "wizard", "value": "x"}]}, Reason.SCHEMA_ERROR, "one of system, user, human"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, Reason.SCHEMA_ERROR, "content[0]: expected a part"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            Reason.SCHEMA_ERROR,
            "content[0].text: expected a string",
        ),
        ({"texts": ["<image>"], "images": [3]}, Reason.SCHEMA_ERROR, "images: expected a name or"),
        ({"texts": ["<image>"], "images": [{"bytes": "x"}]}, Reason.SCHEMA_ERROR, "images.bytes: expected bytes"),
        ({"texts": ["<image>"], "images": [{"bytes": None, "path": "z"}]}, Reason.MISSING_MEDIA, "only the path 'z'"),
        ({"texts": ["<image>"], "images": None}, Reason.MISSING_MEDIA, "null"),
        ({"texts": ["<image>"], "images": ["gone"]}, Reason.MISSING_MEDIA, "gone"),
        ({"texts": ["<image>"]}, Reason.PLACEHOLDER_MISMATCH, "1 image placeholders for 0"),
        ({"texts": ["a"], "images": ["a"]}, Reason.PLACEHOLDER_MISMATCH, "0 image placeholders for 1"),
        ({"texts": ["<image>"], "audios": ["a"], "images": ["b"]}, Reason.PLACEHOLDER_MISMATCH, "0 audio placeholders for 1"),
        ({"texts": ["", " \n"]}, Reason.EMPTY_SAMPLE, "no text and no media"),
        ({"texts": [{"user": "", "assistant": " "}]}, Reason.EMPTY_SAMPLE, "no text and no media"),
        ({"conversations": [{"from": "human", "value": "hello?"}]}, Reason.EMPTY_SAMPLE, "nothing to learn"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], reason: Reason, detail: str) -> None:
    error = refusal(fields)
    assert error.reason is reason
    assert detail in error.detail


def test_named_keys_must_be_there() -> None:
    assert "prompt: expected text" in refusal({"texts": ["x"]}, MappingSpec(text="prompt")).detail
    assert "photo: expected an image" in refusal({"texts": ["x"]}, MappingSpec(images="photo")).detail


def source(mapping: Any) -> dict[str, Any]:
    return {"name": "job", "sources": [{"path": "/d", "mapping": mapping}]}


def test_spec_takes_a_presets_name_or_a_mapping() -> None:
    for name, preset in MAPPING_PRESETS.items():
        spec = parse_spec(source(name))
        assert spec.sources[0].mapping == preset
        assert load_spec_json(spec.to_json()) == spec
    assert parse_spec(source({"text": "body"})).sources[0].mapping == MappingSpec(text="body")


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ("lava", "sources.0.mapping: no mapping 'lava'; there are auto, caption, cauldron, llava, messages"),
        ({"txt": "x"}, "sources.0.mapping.txt: there is no such field"),
        ({"image_placeholder": ""}, "sources.0.mapping.image_placeholder: String should have at least 1 character"),
        (3, "sources.0.mapping: must be a mapping of fields"),
    ],
)
def test_spec_names_the_wrong_field(mapping: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(source(mapping))
    assert str(caught.value).startswith(message)
