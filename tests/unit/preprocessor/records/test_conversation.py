"""Parts of a conversation beside its words: kept where a template has a place for them, else refused by their name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.mapping import MappingSpec
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.records.record_to_sample import Sample, Text, to_sample
from headrace.preprocessor.text.template import load_template
from headrace.quarantine import BadSampleError, Reason
from headrace.sample import LABEL_IGNORED
from headrace.text_spec import TextSpec

USER = {"role": "user", "content": "2 + 3?"}
ANSWER = {"role": "assistant", "content": "5"}
CALL = [{"function": {"name": "add", "arguments": "{}"}}]


def sample(fields: dict[str, Any], **mapping: Any) -> Sample:
    return to_sample(Record(key="k", fields=fields, load=str.encode), MappingSpec(**mapping))


def said(fields: dict[str, Any], **mapping: Any) -> list[str]:
    """`ROLE: CONTENT` of each turn; media as "[NAME]"."""
    return [
        f"{turn.role}: " + "".join(item.text if isinstance(item, Text) else f"[{item.data.decode()}]" for item in turn.segments)
        for turn in sample(fields, **mapping).turns
    ]


def refusal(fields: dict[str, Any]) -> BadSampleError:
    with pytest.raises(BadSampleError) as caught:
        sample(fields)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("function_call", {"name": "add"}),
        ("refusal", "I cannot."),
        ("images", ["a.jpg"]),
        ("video", "a.mp4"),
    ],
)
def test_what_a_turn_has_beside_its_words_is_refused_by_name(field: str, value: Any) -> None:
    for content in ("5", "", None):
        error = refusal({"messages": [USER, {"role": "assistant", "content": content, field: value}]})
        assert error.reason is Reason.SCHEMA_ERROR
        assert error.detail.startswith(f"messages[1].{field} has no place in a template: ")
        assert f"list {field!r} under the mapping's ignore" in error.detail
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "5", field: value}]
    assert f"conversations[1].{field}" in refusal({"conversations": turns}).detail
    assert said({"conversations": turns}, ignore=(field,)) == ["user: ?", "assistant: 5"]


def test_what_is_null_or_empty_says_nothing() -> None:
    """As a table has it in the rows that have no such thing."""
    nothing = {"tool_calls": None, "reasoning_content": "", "images": [], "tool_call_id": None, "name": "Ada", "weight": None}
    fields = {"messages": [USER | nothing, ANSWER | nothing], "tools": "[]", "functions": None, "system": ""}
    assert said(fields) == ["user: 2 + 3?", "assistant: 5"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("tool_calls", CALL), ("tool_call_id", "call_1"), ("reasoning_content", "Two and three."), ("thinking", "Hm.")],
)
def test_calls_and_thoughts_are_carried_to_the_template_which_may_refuse_them_by_name(field: str, value: Any) -> None:
    for content in ("5", "", None):
        fields = {"messages": [USER, {"role": "assistant", "content": content, field: value, "name": "Ada"}]}
        carried = sample(fields)
        assert carried.turns[1].extra == {field: value, "name": "Ada"}
        with pytest.raises(BadSampleError) as caught:
            load_template(TextSpec()).render(carried, [])
        assert caught.value.reason is Reason.SCHEMA_ERROR
        assert caught.value.detail.startswith(f"turn 1: {field} has no place in a template: ")
        assert f"list {field!r} under the mapping's ignore" in caught.value.detail
    turns = {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "5", field: value}]}
    assert sample(turns).turns[1].extra == {field: value}
    assert not sample(turns, ignore=(field,)).turns[1].extra


def test_a_tools_turn_and_the_list_of_tools_are_carried_to_the_template_too() -> None:
    with pytest.raises(BadSampleError, match="turn 1 has the role 'tool', which has no place in this template"):
        load_template(TextSpec()).render(sample({"messages": [USER, {"role": "tool", "content": "5"}, ANSWER]}), [])
    for tools in ([{"type": "function"}], '[{"type": "function"}]'):
        carried = sample({"messages": [USER, ANSWER], "tools": tools})
        assert carried.tools == ({"type": "function"},)
        with pytest.raises(BadSampleError, match="tools has no place in a template"):
            load_template(TextSpec()).render(carried, [])
    called = {"role": "assistant", "tool_calls": json.dumps(CALL)}
    for content in ({}, {"content": None}, {"content": ""}):
        assert sample({"messages": [USER, called | content]}).turns[1].extra == {"tool_calls": CALL}
    for text in ("add", '{"a": 1}'):
        assert (
            "messages[1].tool_calls: expected a list, got" in refusal({"messages": [USER, called | {"tool_calls": text}]}).detail
        )
    assert sample({"question": "?", "answer": "5", "tools": ["add"]}).tools == ("add",)
    assert refusal({"caption": "A hammer.", "tools": ["hammer"]}).detail.startswith("tools has no place in a template")
    assert said({"caption": "A hammer.", "tools": ["hammer"]}, ignore=("tools",)) == ["document: A hammer."]


@pytest.mark.parametrize("field", ["system", "system_prompt"])
@pytest.mark.parametrize(
    "turns",
    [
        {"messages": [USER, ANSWER]},
        {"conversations": [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5"}]},
        {"texts": [{"user": "2 + 3?", "assistant": "5"}]},
    ],
    ids=lambda turns: next(iter(turns)),
)
def test_a_system_prompt_beside_the_turns_is_the_first_turn(turns: dict[str, Any], field: str) -> None:
    asked = ["user: 2 + 3?", "assistant: 5"]
    assert said({**turns, field: "You are a pirate."}) == ["system: You are a pirate.", *asked]
    assert said({**turns, field: "You are a pirate."}, ignore=(field,)) == asked
    assert said({**turns, field: None}) == asked
    assert refusal({**turns, field: ["a"]}).detail == f"{field}: expected a string, got list"


def test_two_system_turns_are_one_only_where_they_say_the_same() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert said({"messages": [system, USER, ANSWER], "system": "Be brief."})[0] == "system: Be brief."
    assert (
        "system and the first turn are two system turns" in refusal({"messages": [system, USER, ANSWER], "system": "No."}).detail
    )


@pytest.mark.parametrize("field", ["system", "system_prompt"])
@pytest.mark.parametrize("text", [{"caption": "A mill."}, {"texts": ["A ", "mill."]}], ids=["caption", "document"])
def test_a_system_prompt_beside_a_document_is_refused_by_name(text: dict[str, Any], field: str) -> None:
    assert refusal({**text, field: "Be brief."}).detail.startswith(f"{field} has no place in a template")
    assert said({**text, field: ""}) == said({**text, field: "Be brief."}, ignore=(field,)) == ["document: A mill."]


def test_an_answer_of_weight_0_is_context() -> None:
    fields = {"messages": [USER, ANSWER | {"content": "4", "weight": 0}, USER, ANSWER | {"weight": 1}]}
    assert [turn.loss for turn in sample(fields).turns] == [False, False, False, True]
    template = load_template(TextSpec())
    sequence = template.render(sample(fields), [])
    assert template.encoder.decode(sequence.labels[sequence.labels != LABEL_IGNORED].tolist()) == "5<|im_end|>"
    assert "assistant\n4<|im_end|>" in template.encoder.decode(sequence.input_ids.tolist())
    turns = [{"from": "human", "value": "?", "weight": 0}, {"from": "gpt", "value": "5", "weight": 1.0}]
    assert [turn.loss for turn in sample({"conversations": turns}).turns] == [False, True]


def test_other_weights_and_answers_without_any_are_refused() -> None:
    for weight in (0.5, 2, "1", "0"):
        assert refusal({"messages": [USER, ANSWER | {"weight": weight}]}).detail == (
            f"messages[1].weight: expected 0 or 1 (other numbers need `weights: true` in the mapping), got {weight!r}"
        )
    error = refusal({"messages": [USER, ANSWER | {"weight": 0}]})
    assert (error.reason, error.detail) == (
        Reason.EMPTY_SAMPLE,
        "no turn of an assistant that is to be learnt, so nothing to learn",
    )


def test_other_weights_are_taken_where_the_mapping_says_so() -> None:
    turns = [USER, ANSWER | {"weight": 0.5}, USER, ANSWER | {"loss_weight": 3}, USER, ANSWER, USER, ANSWER | {"weight": 0}]
    assert [turn.loss for turn in sample({"messages": turns}, weights=True).turns] == [0, 0.5, 0, 3, 0, 1, 0, 0]
    for weight in (-1, 1e-9, 1e9, float("nan"), "0.5"):
        with pytest.raises(BadSampleError, match=r"weight: expected 0 or a number from 1e-06 to 1e\+06, got"):
            sample({"messages": [USER, ANSWER | {"weight": weight}]}, weights=True)
    with pytest.raises(BadSampleError, match="weight and loss_weight differ"):
        sample({"messages": [USER, ANSWER | {"weight": 0.5, "loss_weight": 2}]}, weights=True)


@pytest.mark.parametrize("flag", ["loss", "train", "loss_weight"])
@pytest.mark.parametrize("value", [False, 0, 0.0])
def test_other_names_of_a_weight_are_followed(flag: str, value: Any) -> None:
    last = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "5", flag: True}]
    fields = {"messages": [USER, ANSWER | {flag: value}, *last]}
    assert [turn.loss for turn in sample(fields).turns] == [False, False, False, True]
    assert [turn.loss for turn in sample(fields, ignore=(flag,)).turns] == [False, True, False, True]
    pairs = {"texts": [{"user": "?", "assistant": "5", flag: value}, {"user": "?", "assistant": "6"}]}
    assert [turn.loss for turn in sample(pairs).turns] == [False, False, False, True]
    assert f"weight and {flag} differ" in refusal({"messages": [USER, ANSWER | {flag: value, "weight": 1}]}).detail


@pytest.mark.parametrize(("flag", "value"), [("train", "no"), ("loss_weight", 0.5), ("mask", 1), ("mask", 0)])
def test_other_names_of_a_weight_are_refused_where_they_say_anything_else(flag: str, value: Any) -> None:
    for fields in (
        {"messages": [USER, ANSWER | {flag: value}]},
        {"conversations": [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5", flag: value}]},
        {"texts": [{"user": "2 + 3?", "assistant": "5", flag: value}]},
    ):
        error = refusal(fields)
        assert error.reason is Reason.SCHEMA_ERROR
        assert f".{flag} is {value!r}, which is not followed: write a weight of 0 or 1" in error.detail
        assert said(fields, ignore=(flag,)) == ["user: 2 + 3?", "assistant: 5"]


def test_other_names_of_a_weight_may_say_what_is_done_anyway() -> None:
    usual = {"loss": True, "train": 1, "loss_weight": 1.0, "mask": None}
    context = {"loss": False, "train": 0, "loss_weight": 0.0}
    assert said({"messages": [USER | context, ANSWER | usual]}) == said({"messages": [USER | usual, ANSWER]})


@pytest.mark.parametrize("content", ["", " \n", [], [{"type": "text", "text": ""}]], ids=repr)
def test_an_answer_without_a_word_is_not_learnt(content: Any) -> None:
    empty = {"role": "assistant", "content": content}
    error = refusal({"messages": [USER, empty, USER, ANSWER]})
    assert error.reason is Reason.EMPTY_SAMPLE
    assert "turn 1 is an answer without a word" in error.detail
    assert len(sample({"messages": [USER, empty | {"weight": 0}, USER, ANSWER]}).turns) == 4


def test_a_question_may_be_empty_and_an_answer_a_picture() -> None:
    fields = {"messages": [USER | {"content": ""}, ANSWER | {"content": [{"type": "image"}]}], "images": ["a"]}
    assert said(fields) == ["user: ", "assistant: [a]"]


def parts(*indices: Any, kind: str = "image") -> dict[str, Any]:
    """A question with such parts and its answer."""
    content = [{"type": kind, "text": None, "index": index} for index in indices]
    return {"messages": [USER | {"content": [*content, {"type": "text", "text": "which?", "index": None}]}, ANSWER]}


def test_the_index_of_a_part_names_its_medium() -> None:
    media = {"images": ["a", "b"]}
    assert said({**parts(1, 0), **media})[0] == "user: [b][a]which?"
    assert said({**parts(0, 1), **media})[0] == "user: [a][b]which?"
    assert said({**parts(1, 0, 1), **media})[0] == "user: [b][a][b]which?"
    assert said({**parts(None, None), **media})[0] == "user: [a][b]which?"
    assert said({**parts(1, 0, kind="audio"), "audios": ["a", "b"]})[0] == "user: [b][a]which?"


@pytest.mark.parametrize("indices", [(0, 0), (0,), (1, 2), (0, None), (0, -1), (0, 1, 2)], ids=str)
def test_indices_that_leave_a_medium_or_a_part_alone_are_refused(indices: tuple[int | None, ...]) -> None:
    error = refusal({**parts(*indices), "images": ["a", "b"]})
    assert error.reason is Reason.PLACEHOLDER_MISMATCH
    assert "for 2 media" in error.detail


@pytest.mark.parametrize("index", ["0", True, 0.5])
def test_an_index_is_a_number(index: Any) -> None:
    assert "messages[0].content[0].index: expected a number from 0 on" in refusal({**parts(index), "images": ["a"]}).detail
