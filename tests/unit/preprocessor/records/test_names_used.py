"""Which names of a mapping a record has: what no record has is a mistake in the mapping."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.mapping import MAPPING_PRESETS, MappingSpec
from headrace.preprocessor.records.names_used import names_given, names_used
from headrace.preprocessor.records.record import Record

FIELDS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "<video> What?"}, {"role": "assistant", "content": "A.", "tool_calls": [{"a": 1}]}],
    "meta": {"caption": "A barn.", "images": [{"path": "a"}], "note": None},
    "video": "a.mp4",
    "empty": [],
}


@pytest.mark.parametrize(
    ("mapping", "used"),
    [
        ({}, []),
        ({"text": "messages", "images": "jpg"}, ["messages", "jpg"]),
        ({"text": "conversations", "images": "png"}, []),
        ({"text": "meta.caption", "images": "meta.images.*.path", "audios": "meta.note"}, ["meta.caption", "meta.images.*.path"]),
        ({"question": "meta.caption", "answer": "meta.title"}, ["meta.caption"]),
        ({"images": "meta.images.*.gone", "audios": "empty"}, []),
        ({"ignore": ("video", "vdieo", "empty")}, ["video"]),
        ({"ignore": ("png", "seg.png", "mask.png")}, ["png", "seg.png"]),
        ({"ignore": ("<video>", "<audio>")}, ["<video>"]),
        ({"ignore": ("tool_calls", "tools", "note")}, ["tool_calls"]),
    ],
    ids=lambda value: repr(value if isinstance(value, dict) else sorted(value)),  # the same in every process
)
def test_a_name_is_used_if_it_leads_to_something(mapping: dict[str, Any], used: list[str]) -> None:
    spec = MappingSpec(**mapping)
    record = Record(key="k", fields=FIELDS, load=str.encode, members=("jpg", "seg.png"))
    assert names_used(record, spec) == set(used)
    assert set(used) <= names_given(spec)


def test_however_deep_a_record_is() -> None:
    deep: Any = "<video>"
    for _ in range(5000):
        deep = [deep]
    record = Record(key="k", fields={"deep": deep}, load=str.encode)
    assert names_used(record, MappingSpec(ignore=("<video>", "gone"))) == {"<video>"}


def test_the_names_that_a_mapping_gives() -> None:
    assert names_given(MAPPING_PRESETS["auto"]) == set()
    assert names_given(MAPPING_PRESETS["llava"]) == {"conversations", "image"}
    assert names_given(MappingSpec(question="q", answer="a", audios="b", ignore=("c",))) == {"q", "a", "b", "c"}
