"""Dotted paths: what they reach, what counts where several keys fit, and that any place in a record can be named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.preprocessor.records.key_path import field_of, find
from tests.unit.preprocessor.records.conversing import refusal, said

FIELDS: dict[str, Any] = {
    "json": {"caption": "a", "n": 0},
    "media": [{"path": "x"}, {"path": "y", "kind": None}, {"path": None}, {"other": 1}],
    "turns": [{"images": ["a", "b"]}, {"images": None}, {}, {"images": ["c"]}],
    "grid": [[1, 2], [3]],
    "a.b": {"c": "dots"},
    "a": {"b": {"c": "nested"}, "0": "zero"},
    "column": '{"caption": "in JSON", "list": [{"k": 1}]}',
    "null": None,
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("json", FIELDS["json"]),
        ("json.caption", "a"),
        ("json.n", 0),
        ("media.0.path", "x"),
        ("media.2.path", None),
        ("media.*.path", ["x", "y"]),
        ("turns.*.images", ["a", "b", "c"]),
        ("grid.1.0", 3),
        ("grid.*", [1, 2, 3]),
        ("grid.*.0", [1, 3]),
        ("a.b.c", "dots"),
        ("a.0", "zero"),
        ("column.caption", "in JSON"),
        ("column.list.*.k", [1]),
        ("null.anything", None),
    ],
)
def test_a_path_leads_to_a_value(path: str, value: Any) -> None:
    assert find(FIELDS, path) == value


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "gone",
        "json.gone",
        "json.caption.0",
        "media.4",
        "media.-1",
        "media.path",
        "media.x",
        "json.*",
        "a.b.d",
        "grid.9999999999",
    ],
)
def test_nothing_at_a_path_is_an_error(path: str) -> None:
    with pytest.raises(KeyError):
        find(FIELDS, path)


def test_the_field_in_which_a_path_begins() -> None:
    assert [field_of(FIELDS, path) for path in ("a.b.c", "a.0", "json.x.y", "gone.x")] == ["a.b", "a", "json", "gone.x"]


KEYS = st.text(st.characters(codec="utf-8"), max_size=6)


@given(first=KEYS, steps=st.lists(st.one_of(KEYS, st.integers(0, 3)), max_size=6), value=st.integers())
def test_every_place_can_be_named(first: str, steps: list[str | int], value: int) -> None:
    """Keys of any spelling, dots, digits and stars included, where nothing else stands beside them."""
    inner: Any = value
    for step in reversed(steps):
        inner = {step: inner} if isinstance(step, str) else [None] * step + [inner]
    assert find({first: inner}, ".".join([first, *map(str, steps)])) == value


@given(key=KEYS, fields=st.dictionaries(KEYS, st.dictionaries(KEYS, st.integers())), value=st.integers())
def test_a_key_that_is_there_literally_wins(key: str, fields: dict[str, Any], value: int) -> None:
    assert find({**fields, key: value}, key) == value
    assert field_of({**fields, key: value}, key) == key


@given(path=st.text(st.sampled_from("ab01.*"), max_size=12))
def test_a_path_finds_something_or_says_so(path: str) -> None:
    fields = {"a": [{"b": [0, {"a": 1}]}, None, "x"], "b": {"0": [[1], [2]], "1": '{"a": [1]}'}}
    try:
        find(fields, path)
    except KeyError:
        return
    assert field_of(fields, path) in fields


def test_a_mapping_reaches_texts_and_media() -> None:
    fields = {
        "meta": {"caption": "A barn.", "chat": [{"user": "<image>?", "assistant": "A."}]},
        "media": [{"path": "a"}, {"path": "b"}],
        "sounds": [{"file": {"bytes": b"x", "path": None}}],
    }
    assert said(fields, text="meta.caption", images="media.0.path", ignore=("sounds",)) == ["document: [a]A barn."]
    assert said(fields, text="meta.caption", images="media.*.path", audios="sounds.0.file") == ["document: [a][b](x)A barn."]
    assert said(fields, text="meta.chat", images="media.1.path", audios="sounds.*.none")[0] == "user: [b]?"
    assert said({"meta.caption": "literal", **fields}, text="meta.caption", ignore=("sounds",)) == ["document: literal"]
    assert said({"caption": "c"}, ("jpg", "seg.png"), images="seg.png") == ["document: [seg.png]c"]
    assert "media.2.path: expected an image or a recording, got nothing" in refusal(
        fields, text="meta.caption", images="media.2.path"
    )
    assert "meta.title: expected text, got null" in refusal(fields, text="meta.title")


def test_a_path_into_the_field_of_the_text_may_name_its_media() -> None:
    fields = {"row": {"text": "A barn.", "image": "a"}}
    assert said(fields, text="row.text", images="row.image") == ["document: [a]A barn."]
