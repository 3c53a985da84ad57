"""What the fields and members of a record are used as, told by what the sample would be without them."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.mapping import MAPPING_PRESETS, MappingSpec
from headrace.preprocessor.records.field_use import field_uses, kind_of
from headrace.preprocessor.records.names_used import names_given, names_used
from headrace.preprocessor.records.record import Record
from headrace.quarantine import BadSampleError, Reason


def record(fields: dict[str, Any], **members: bytes) -> Record:
    """A record with media of these names; `seg_png` stands for the member `seg.png`."""
    files = {name.replace("_", "."): data for name, data in members.items()}

    def load(name: str) -> bytes:
        if name.lower() not in files:
            raise BadSampleError(Reason.MISSING_MEDIA, name)
        return files[name.lower()]

    return Record(key="k", fields=fields, load=load, members=tuple(files))


def uses(item: Record, **mapping: Any) -> dict[str, str]:
    return {use.name: str(use.use) for use in field_uses(item, MappingSpec(**mapping))}


@pytest.mark.parametrize(
    ("item", "mapping", "expected"),
    [
        (record({"txt": "a", "score": 3}, jpg=b"p"), {}, {"txt": "text", "score": "not used", "jpg": "images"}),
        (record({"txt": "a"}, jpg=b"p", flac=b"s"), {}, {"txt": "text", "jpg": "images", "flac": "audios"}),
        (record({"txt": "a"}, jpg=b"p", cls=b"7"), {}, {"txt": "text", "jpg": "images", "cls": "note"}),
        (record({"caption": "<image> a", "image": b"p"}), {}, {"caption": "text", "image": "images"}),
        (record({"caption": "a", "image": {"bytes": b"p", "path": None}}), {}, {"caption": "text", "image": "images"}),
        (record({"caption": "a", "txt": "b"}), {}, {"caption": "text", "txt": "not used"}),
        (record({"caption": "a", "images": None}), {}, {"caption": "text", "images": "not used"}),
        (record({"caption": "<audio><audio>", "audios": [b"s", b"t"]}), {}, {"caption": "text", "audios": "audios"}),
        # an annotation that names its members
        (record({"caption": "<image>", "image": "JPG"}, jpg=b"p"), {}, {"caption": "text", "image": "images", "jpg": "images"}),
        # numbers are one name
        (record({"caption": "<image><image>"}, **{"0_jpg": b"p", "1_jpg": b"q"}), {}, {"caption": "text", "N.jpg": "images"}),
        # what nothing takes, and what says so
        (record({"txt": "a"}, mp4=b"f"), {}, {"txt": "text", "mp4": "refused"}),
        (record({"txt": "a"}, mp4=b"f", npy=b"f"), {}, {"txt": "text", "mp4": "refused", "npy": "refused"}),
        (record({"txt": "a"}, jpg=b"p", seg_png=b"m"), {}, {"txt": "text", "jpg": "refused", "seg.png": "refused"}),
        (
            record({"txt": "a"}, jpg=b"p", seg_png=b"m", mp4=b"f"),
            {"images": "jpg", "ignore": ("mp4",)},
            {"txt": "text", "jpg": "images", "seg.png": "not used", "mp4": "ignored"},
        ),
        (record({"caption": "a", "video": b"f"}), {}, {"caption": "text", "video": "refused"}),
        (record({"caption": "a", "video": b"f"}), {"ignore": ("video",)}, {"caption": "text", "video": "ignored"}),
        (
            record({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}], "system": "Be."}),
            {},
            {"messages": "text", "system": "text"},
        ),
        # either would do
        (record({"txt": "a cat", "caption": "a cat"}, jpg=b"p"), {}, {"txt": "text", "caption": "text", "jpg": "images"}),
        # refused for something else: what the fields would be is not known
        (record({"words": "a"}, flac=b"s"), {}, {"words": "unknown", "flac": "unknown"}),
        (record({"words": "a"}, flac=b"s"), {"text": "words"}, {"words": "text", "flac": "audios"}),
        (record({"transcript": "a"}, flac=b"s"), {}, {"transcript": "text", "flac": "audios"}),
    ],
)
def test_uses(item: Record, mapping: dict[str, Any], expected: dict[str, str]) -> None:
    assert uses(item, **mapping) == expected


def test_a_broken_medium_that_cannot_be_read_now_is_no_error() -> None:
    def load(name: str) -> bytes:
        raise BadSampleError(Reason.TOO_LARGE, name)

    item = Record(key="k", fields={"txt": "a"}, load=load, members=("jpg",))
    assert uses(item) == {"txt": "unknown", "jpg": "unknown"}


def test_media_are_read_once() -> None:
    reads: list[str] = []

    def load(name: str) -> bytes:
        reads.append(name)
        return name.encode()

    item = Record(key="k", fields={"caption": "<image><image>", "id": 1, "url": "u"}, load=load, members=("1.jpg", "2.jpg"))
    uses(item)
    assert sorted(reads) == ["1.jpg", "2.jpg"]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("a", "text"),
        (3, "number"),
        (2.5, "number"),
        (True, "true or false"),
        (None, "null"),
        (b"", "bytes"),
        ({"bytes": b"", "path": None}, "{bytes, path}"),
        ({"a": 1}, "object"),
        ([], "empty list"),
        ([None], "empty list"),
        ([None, "a"], "list of text"),
        (["a", 3], "list of text and number"),
        ([[1.0]], "list of list of number"),
    ],
)
def test_kinds(value: Any, kind: str) -> None:
    assert kind_of(value) == kind


def test_names_of_the_mapping_that_a_record_has() -> None:
    spec = MappingSpec(text="caption", images="jpg", ignore=("mp4", "seg.png", "<video>", "tool_calls", "nothing"))
    talk = [{"role": "user", "content": "<video>", "tool_calls": [{"name": "f"}]}]
    item = record({"caption": talk}, jpg=b"p", low_mp4=b"f", seg_png=b"m")
    assert names_given(spec) - names_used(item, spec) == {"nothing"}
    assert names_used(record({"url": "x.mp4s"}), MappingSpec(text="caption")) == frozenset()
    assert names_given(MAPPING_PRESETS["auto"]) == frozenset()
