"""Media and texts that are strings: base64 and data URLs where they are certain, and JSON in columns of strings."""

from __future__ import annotations

import base64
import json

import pytest

from headrace.preprocessor.records.medium import medium_of
from tests.unit.preprocessor.records.conversing import refusal, said

BEGINNINGS = {
    "JPEG": b"\xff\xd8\xff\xe0",
    "PNG": b"\x89PNG\r\n\x1a\n",
    "GIF": b"GIF89a",
    "WebP": b"RIFF\0\0\0\0WEBP",
    "WAV": b"RIFF\0\0\0\0WAVE",
    "FLAC": b"fLaC\0",
    "Ogg": b"OggS\0",
    "MP3": b"ID3\4",
    "TIFF": b"II*\0",
}
CHAT = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A barn."}]


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
def test_a_long_string_that_is_a_file_in_base64_is_that_file(beginning: bytes) -> None:
    for length in (100, 101, 102):
        data = beginning + bytes(length)
        assert medium_of("image", encoded(data)) == data
        assert medium_of("image", {"bytes": encoded(data), "path": None}) == data
    lines = base64.encodebytes(beginning + bytes(100)).decode()
    assert medium_of("image", lines) == beginning + bytes(100)


@pytest.mark.parametrize(
    "name",
    [
        "a.jpg",
        "/9j/",
        encoded(BEGINNINGS["JPEG"] + bytes(40)),
        encoded(b"something else" * 20),
        encoded(BEGINNINGS["JPEG"] + bytes(100)) + "/a.jpg",
        "data:a.jpg",
        "/9j/" + "ü" * 200,
    ],
)
def test_any_other_string_is_a_name(name: str) -> None:
    assert medium_of("image", name) == name


def test_a_data_url_is_its_data_however_short() -> None:
    assert medium_of("image", "data:image/png;base64,QUJD") == b"ABC"
    assert medium_of("audio", "DATA:;base64,QUJD") == b"ABC"
    assert said({"conversations": CHAT, "image": "data:image/png;base64,QUJD"})[0] == "user: [ABC]What?"
    assert said({"caption": "Two.", "images": ["data:image/png;base64,QQ==", "data:image/png;base64,Qg=="]}) == [
        "document: [A][B]Two."
    ]


def test_bytes_that_are_null_are_missing_however_they_are_called() -> None:
    assert refusal({"caption": "a", "image": {"bytes": None, "path": "z"}}).startswith("missing_media: image: no bytes")
    assert "image.bytes: expected bytes, got z" in refusal({"caption": "a", "image": {"bytes": "z", "path": None}})


@pytest.mark.parametrize("key", ["texts", "conversations", "messages"])
def test_a_list_of_turns_may_be_json_in_a_string(key: str) -> None:
    fields = {key: json.dumps(CHAT), "image": "a"}
    assert said(fields) == said({key: CHAT, "image": "a"}) == ["user: [a]What?", "assistant: A barn."]
    assert said({"row": {key: json.dumps(CHAT)}, "image": "a"}, text=f"row.{key}") == said(fields)


def test_a_string_that_is_not_a_list_in_json_stays_refused_and_a_caption_a_caption() -> None:
    for text in ("[1, 2", '{"a": 1}', "What?", ""):
        assert "texts: expected a list" in refusal({"texts": text})
    assert "caption is a list of 2 captions, in JSON: name one" in refusal({"caption": '["a", "b"]'})
    assert said({"caption": '["a", "b"]'}, text="caption.1") == ["document: b"]
    assert "txt is a list of 1 objects, not a text" in refusal({"txt": '[{"role": "user", "content": "?"}]'})
    assert said({"text": '["a", "b"]'}) == ['document: ["a", "b"]']
