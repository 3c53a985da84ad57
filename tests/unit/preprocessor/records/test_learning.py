"""Which words are learnt: the last answer or all, and thoughts kept, masked or dropped."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.mapping import MappingSpec
from headrace.preprocessor.records.learning import answer_words
from headrace.preprocessor.records.record_to_sample import Role, Sample, Text, Turn
from headrace.preprocessor.text.template import load_template
from headrace.quarantine import BadSampleError
from headrace.sample import LABEL_IGNORED
from headrace.text_spec import TextSpec
from tests.unit.preprocessor.records.conversing import asked, refusal, said, sample

TWO = {"messages": [{"role": role, "content": text} for role, text in [("user", "a"), ("assistant", "b")] * 2]}
THOUGHT = "<think>\nHm.\n</think>\n\n5"


def test_all_answers_are_learnt_or_the_last() -> None:
    assert [turn.loss for turn in sample(TWO).turns] == [False, True, False, True]
    assert [turn.loss for turn in sample(TWO, learn="last").turns] == [False, False, False, True]
    pairs = {"texts": [{"user": "a", "assistant": ""}, {"user": "c", "assistant": "d"}]}
    assert refusal(pairs).startswith("empty_sample: turn 1 is an answer without a word")
    assert [turn.loss for turn in sample(pairs, learn="last").turns] == [False, False, False, True]
    assert [turn.loss for turn in sample({"caption": "A barn."}, learn="last").turns] == [True]
    weighted = {"messages": [*TWO["messages"][:3], {"role": "assistant", "content": "b", "weight": 0}]}
    assert refusal(weighted, learn="last").startswith("empty_sample: no turn of an assistant that is to be learnt")


@pytest.mark.parametrize(
    ("thinking", "answer"), [(None, THOUGHT), ("keep", THOUGHT), ("mask", "~<think>\nHm.\n</think>\n\n~5"), ("drop", "5")]
)
def test_thoughts_in_an_answer(thinking: Any, answer: str) -> None:
    for content in (THOUGHT, [{"type": "text", "text": THOUGHT}]):
        assert said(asked(THOUGHT, content), thinking=thinking) == [f"user: {THOUGHT}", f"assistant: {answer}"]
    assert said({"caption": THOUGHT}, thinking=thinking) == [f"document: {THOUGHT}"], "a caption has no thoughts"


@pytest.mark.parametrize(("thinking", "answer"), [("keep", THOUGHT), ("mask", "~<think>\nHm.\n</think>\n\n~5"), ("drop", "5")])
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_beside_an_answer_stand_in_front_of_it(thinking: str, answer: str, name: str) -> None:
    for content in ("5", [{"type": "text", "text": "5"}]):
        fields = asked("2 + 3?", content)
        fields["messages"][1][name] = "\nHm.\n"
        with pytest.raises(BadSampleError, match=f"turn 1: {name} has no place in a template: set the mapping's thinking"):
            load_template(TextSpec()).render(sample(fields), [])
        assert said(fields, thinking=thinking)[1] == f"assistant: {answer}"
        assert said(fields, ignore=(name,))[1] == "assistant: 5"
    pair = {"texts": [{"user": "?", "assistant": "5", name: "Hm."}]}
    assert said(pair, thinking=thinking)[1] == f"assistant: {answer}"


def test_thoughts_of_an_answer_that_begins_with_a_picture_stand_in_front_too() -> None:
    fields = asked("Draw.", [{"type": "image", "image": "a"}])
    fields["messages"][1]["reasoning_content"] = "Hm."
    assert said(fields, thinking="keep")[1] == "assistant: <think>\nHm.\n</think>\n\n[a]"


@pytest.mark.parametrize("thinking", ["keep", "mask", "drop"])
def test_two_thoughts_for_one_answer_are_refused(thinking: str) -> None:
    both = asked("2 + 3?", THOUGHT)
    both["messages"][1]["reasoning_content"] = "Hm."
    assert "has thoughts in a field of its own and in its text" in refusal(both, thinking=thinking)
    two = asked("2 + 3?", "5")
    two["messages"][1] |= {"reasoning_content": "Hm.", "thinking": "Ah."}
    assert "reasoning_content and messages[1].thinking differ" in refusal(two, thinking=thinking)
    assert said(two, thinking="drop", ignore=("thinking",))[1] == "assistant: 5"
    asking = asked("2 + 3?", "5")
    asking["messages"][0]["reasoning_content"] = "Hm."
    assert "messages[0].reasoning_content has no place in a template" in refusal(asking, thinking=thinking)


@pytest.mark.parametrize(
    "answer",
    ["<think>Hm.", "Hm.</think>5", "<think><think>Hm.</think></think>5", "</think><think>5", "<think>a</think>b</think>c"],
)
@pytest.mark.parametrize("thinking", ["mask", "drop"])
def test_thoughts_that_do_not_pair_cannot_be_told_from_the_answer(thinking: str, answer: str) -> None:
    assert "do not pair" in refusal(asked("?", answer), thinking=thinking)
    assert said(asked("?", answer), thinking="keep")[1] == f"assistant: {answer}"


def test_an_answer_of_nothing_but_thoughts_is_not_learnt() -> None:
    for thinking in ("mask", "drop"):
        assert refusal(asked("?", "<think>Hm.</think>\n"), thinking=thinking).startswith(
            "empty_sample: turn 1 is an answer without"
        )
    assert said(asked("?", "<think>Hm.</think>"), thinking="keep")[1] == "assistant: <think>Hm.</think>"


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n"]), max_size=20))
def test_masked_and_learnt_words_are_the_answer_and_what_is_dropped_is_what_is_masked(pieces: list[str]) -> None:
    signs = [piece for piece in pieces if "think" in piece]
    paired = signs == ["<think>", "</think>"] * (len(signs) // 2)
    text = "".join(pieces)
    if not paired:
        with pytest.raises(BadSampleError, match="do not pair"):
            answer_words("x", text, MappingSpec(thinking="mask"), has_thought=False)
        return
    masked = answer_words("x", text, MappingSpec(thinking="mask"), has_thought=False)
    assert "".join(part for part, _ in masked) == text
    assert [part for part, learnt in masked if not learnt] == re.findall(r"<think>[^<]*</think>\s*", text)
    dropped = answer_words("x", text, MappingSpec(thinking="drop"), has_thought=False)
    assert dropped == [(part, learnt) for part, learnt in masked if learnt]


@pytest.mark.parametrize("role", [Role.ASSISTANT, Role.DOCUMENT])
def test_masked_text_is_in_the_sequence_and_not_in_the_labels(role: Role) -> None:
    template = load_template(TextSpec())
    segments = (Text(text="Hm. ", learnt=False), Text(text="5"), Text(text=" (no)", learnt=False), Text(text="!"))
    masked, whole = (
        template.render(Sample(turns=(Turn(role=role, segments=each),)), []) for each in (segments, (Text(text="Hm. 5 (no)!"),))
    )
    assert masked.input_ids.tolist() == whole.input_ids.tolist(), "masking changes no token"
    end = template.encoder.decode([masked.input_ids[-1] if role is Role.DOCUMENT else masked.input_ids[-2]])
    learnt = template.encoder.decode(masked.labels[masked.labels != LABEL_IGNORED].tolist())
    assert learnt.replace(" ", "") == f"5!{end}"


def test_a_masked_thought_is_read_and_its_answer_learnt() -> None:
    template = load_template(TextSpec())
    sequence = template.render(sample(asked("2 + 3?", THOUGHT), thinking="mask"), [])
    assert template.encoder.decode(sequence.labels[sequence.labels != LABEL_IGNORED].tolist()) == "5<|im_end|>"
    whole = template.render(sample(asked("2 + 3?", THOUGHT)), [])
    assert sequence.input_ids.tolist() == whole.input_ids.tolist()
