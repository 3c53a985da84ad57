"""Media of a text without any placeholder: in front of a caption and of a conversation, unless something may be a place."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.preprocessor.records.conversing import asked, refusal, said

PAIR = [{"user": "What?", "assistant": "A barn."}, {"user": "Where?", "assistant": "There."}]


@pytest.mark.parametrize(
    "fields",
    [
        {"texts": PAIR},
        {"messages": [turn for pair in PAIR for turn in ({"role": role, "content": text} for role, text in pair.items())]},
        {"conversations": [turn for pair in PAIR for turn in ({"from": role, "value": text} for role, text in pair.items())]},
        {
            "messages": [
                {"role": role, "content": [{"type": "text", "text": text}]} for pair in PAIR for role, text in pair.items()
            ]
        },
    ],
    ids=["cauldron", "messages", "conversations", "typed parts"],
)
def test_in_front_of_the_first_question(fields: dict[str, Any]) -> None:
    turns = ["assistant: A barn.", "user: Where?", "assistant: There."]
    assert said({**fields, "images": ["a", "b"]}) == ["user: [a][b]What?", *turns]
    assert said({**fields, "audios": ["x"], "images": ["a"]}) == ["user: [a](x)What?", *turns]
    assert said({**fields, "audio": "x"}) == ["user: (x)What?", *turns]
    assert said(fields, ("jpg",)) == ["user: [jpg]What?", *turns]
    assert said({**fields, "images": ["a"], "system": "Be brief."}) == ["system: Be brief.", "user: [a]What?", *turns]


def test_behind_a_greeting() -> None:
    greeting = {"role": "assistant", "content": "Hello."}
    fields = {"messages": [greeting, *asked("What?")["messages"]], "images": ["a"]}
    assert said(fields) == ["assistant: Hello.", "user: [a]What?", "assistant: A barn."]
    assert refusal({"messages": [greeting], "images": ["a"]}) == "placeholder_mismatch: 0 image placeholders for 1 media"


def test_only_where_no_medium_has_a_place() -> None:
    assert "1 image placeholders for 2 media" in refusal(
        {"texts": [{"user": "<image>?", "assistant": "A."}], "images": ["a", "b"]}
    )
    assert "0 audio placeholders for 1 media" in refusal(asked("<image>What?", image="a", audio="x"))
    assert "0 image placeholders for 1 media" in refusal({"texts": ["A document."], "images": ["a"]})


@pytest.mark.parametrize(
    "sign", ["<img>", "<Image>", "<IMAGE_1>", "<image-1>", "[img]", "<|vision_start|>", "<a picture>", "[audio]"]
)
def test_not_where_something_in_the_text_may_be_a_place(sign: str) -> None:
    error = refusal(asked(f"{sign}What?", image="a"))
    assert error.startswith(f"placeholder_mismatch: 0 placeholders for 1 media, and {sign} in the text may be one")
    assert said(asked(f"{sign}What?", image="a"), ignore=(sign,))[0] == f"user: [a]{sign}What?"
    assert said(asked(f"{sign}What?", image="a"), image_placeholder=sign)[0] == "user: [a]What?"
    assert said(asked(f"{sign}What?"))[0] == f"user: {sign}What?", "without media it is text, as before"


def test_a_placeholder_in_a_typed_part_may_be_meant_as_one() -> None:
    fields = asked([{"type": "text", "text": "<image>What?"}], image="a")
    assert "<image> in the text may be one" in refusal(fields)
    assert said(fields, ignore=("<image>",))[0] == "user: [a]<image>What?"


def test_html_in_an_answer_is_no_place() -> None:
    assert said(asked("Write it as HTML.", '<img src="a.png"> <image/>', image="a"))[0] == "user: [a]Write it as HTML."
    assert said(asked("What is $[a, b)$ (see the image) <b>here</b>?", image="a"))[0].startswith("user: [a]What is")
