"""Questions and answers in fields of their own: which are taken, and what makes a row uncertain."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import SpecError
from headrace.spec import parse_spec
from tests.unit.preprocessor.records.conversing import asked, refusal, said, sample

TURNS = ["user: 2 + 3?", "assistant: 5"]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("question", "answer"),
        ("query", "response"),
        ("prompt", "completion"),
        ("prompt", "response"),
        ("instruction", "output"),
        ("problem", "solution"),
        ("question", "answers"),
        ("question", "multiple_choice_answer"),
    ],
)
def test_a_question_and_its_answer_are_two_turns(question: str, answer: str) -> None:
    fields = {question: "2 + 3?", answer: ["5", "five"] if answer == "answers" else "5", "id": 3, "source": "sums"}
    assert said(fields) == TURNS
    assert said({**fields, "image": "a"}) == ["user: [a]2 + 3?", "assistant: 5"]
    assert said({**fields, question: "2 + <image>?", "image": "a"})[0] == "user: 2 + [a]?"
    assert said({**fields, "system_prompt": "Be brief."})[0] == "system: Be brief."
    assert [turn.loss for turn in sample(fields).turns] == [False, True]


def test_of_several_answers_the_first_counts_or_the_one_that_most_gave() -> None:
    """As TextVQA and VQA have them."""
    answers = [{"answer": "5", "answer_confidence": "yes"}, {"answer": "five", "answer_confidence": "maybe"}]
    assert said({"question": "2 + 3?", "answers": answers}) == TURNS
    assert said({"question": "2 + 3?", "answers": ["five"], "multiple_choice_answer": "5"}) == TURNS
    assert "answers: expected a string, got list" not in refusal({"question": "?", "answers": [[]]})
    assert "answers[0]: expected a string" in refusal({"question": "?", "answers": [{"text": "5"}]})
    assert "answers: expected a string, got dict" in refusal({"question": "?", "answers": {"text": ["5"]}})
    assert "'answer: answer.0'" in refusal({"question": "?", "answer": ["5", "6"]})
    assert said({"question": "2 + 3?", "answer": ["5", "6"]}, question="question", answer="answer.0") == TURNS


def test_an_instructions_input_is_in_a_line_behind_it() -> None:
    fields = {"instruction": "Add.", "input": "2 + 3", "output": "5"}
    assert said(fields) == ["user: Add.\n2 + 3", "assistant: 5"]
    dolly = {"instruction": "Add.", "context": "2 + 3", "response": "5"}
    assert said(dolly) == ["user: Add.\n2 + 3", "assistant: 5"]
    assert "instruction may not be understood without input" in refusal({**fields, "context": "Sums."})
    assert said({**fields, "input": ""}) == ["user: Add.", "assistant: 5"]
    assert said(fields, ignore=("input",)) == ["user: Add.", "assistant: 5"]


def test_a_text_that_has_the_answer_goes_before_a_question() -> None:
    fields = {"text": "2 + 3? 5", "question": "2 + 3?", "answer": "5"}
    assert said(fields) == ["document: 2 + 3? 5"]
    assert said({**fields, "text": "Sums."}, text="text") == ["document: Sums."]
    assert said(fields, ignore=("text",)) == said(fields, question="question", answer="answer") == TURNS


def test_the_mapping_names_any_two() -> None:
    fields = {"query": "no", "qa": [{"asked": "2 + 3?", "said": "5"}], "label": "x"}
    assert said(fields, question="qa.0.asked", answer="qa.0.said") == TURNS
    assert "qa.1.said: expected text, got nothing of that name" in refusal(fields, question="qa.0.asked", answer="qa.1.said")


@pytest.mark.parametrize(
    ("mapping", "sentence"),
    [
        ({"question": "q"}, "question and answer are named together"),
        ({"answer": "a"}, "question and answer are named together"),
        ({"text": "t", "question": "q", "answer": "a"}, "names text, or question and answer, not both"),
        ({"learn": "first"}, "learn"),
        ({"thinking": "hide"}, "thinking"),
        ({"text": "a." * 300}, "text"),
    ],
)
def test_a_mapping_that_makes_no_sense_is_refused_at_submission(mapping: dict[str, str], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        parse_spec({"name": "j", "sources": [{"path": "/d", "mapping": mapping}]})


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"problem": "?", "solution": "5", "answer": "6"}, "nothing says which of answer, solution answers"),
        ({"question": "?", "prompt": "!", "answer": "5"}, "nothing says which of question, prompt asks"),
        ({"question": "?", "answer": "5", "context": "Sums."}, "question may not be understood without context"),
        ({"question": "?", "answer": "A", "choices": ["5", "6"]}, "question may not be understood without choices"),
        ({"prompt": "?", "output": "A", "input": "2"}, "prompt may not be understood without input"),
        ({"prompt": "?", "completion": "5", "label": False}, "label says whether the answer is a good one"),
        (asked("?", "6", kto_tag=False), "kto_tag says whether the answer is a good one"),
        ({"question": "?", "A": "5", "B": "6", "answer": "A"}, "question may not be understood without A"),
        ({"question": "?", "opa": "5", "opb": "6", "answer": "5"}, "question may not be understood without opa"),
        ({"text": "It is 5.", "question": "How much is it?", "answer": "5"}, "nothing says whether text is learnt or answer"),
        ({"text": "OCR: 5", "question": "?", "answers": ["5"]}, "nothing says whether text is learnt or answers"),
        (asked("?", chosen="5", rejected="6"), "chosen and rejected are a preference"),
        (asked("?", history=[["a", "b"]]), "history has no place in a template"),
        ({"prompt": "?", "completion": "6", "label": "False"}, "label says whether the answer is a good one"),
        ({"messages": ["How are you?", "Fine."]}, "messages: expected turns that say who speaks, got strings"),
        ({"text": "Sums.", "question": "?", "answer": "5"}, "nothing says whether text is learnt or answer, the answer to"),
        ({"question": "?", "answer": 5}, "answer: expected a string, got int"),
        ({"question": ["?"], "answer": "5"}, "question: expected a string, got list"),
        ({"prompt": "?", "completion": [{"role": "assistant", "content": "5"}]}, "completion: expected one answer"),
        ({"prompt": "?", "chosen": "5", "rejected": "6"}, "chosen and rejected are a preference between two answers"),
        ({"question": "?"}, "none of texts"),
        ({"answer": "5"}, "none of texts"),
        ({"question": "?", "answer": "5", "reasoning": "Hm."}, "reasoning has no place in a template"),
    ],
    ids=str,
)
def test_what_is_not_certain_is_refused(fields: dict[str, Any], detail: str) -> None:
    error = refusal(fields)
    assert error.startswith("schema_error: ")
    assert detail in error


@pytest.mark.parametrize(
    "hint", [{"image_id": 17}, {"img": "17"}, {"imageName": "a"}, {"videos": [3]}, {"audio_key": "x"}], ids=str
)
def test_a_question_about_a_picture_that_is_elsewhere_is_no_text(hint: dict[str, Any]) -> None:
    """As VQA's questions are published, beside the pictures' archive."""
    (name,) = hint
    fields = {"question": "2 + 3?", "answer": "5", **hint}
    assert refusal(fields).startswith("unused_media: ")
    assert name in refusal(fields)
    assert said(fields, ignore=(name,)) == TURNS
    assert said({**fields, name: None}) == TURNS
    assert said({"question": "2 + 3?", "answer": "5", "image_id": 17, "image": "a"})[0] == "user: [a]2 + 3?"


def test_what_is_not_wanted_can_be_ignored() -> None:
    fields = {"question": "2 + 3?", "answer": "5", "solution": "s", "context": "c", "choices": ["5"], "label": True}
    assert said(fields, ignore=("solution", "context", "choices", "label")) == TURNS
    assert said({"prompt": "2 + 3?", "response": "5", "chosen": "x", "rejected": "y"}, ignore=("rejected",)) == TURNS


def test_a_preference_can_be_learnt_by_its_better_half() -> None:
    chosen = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
    assert said({"prompt": "2 + 3?", "chosen": chosen, "rejected": chosen}, text="chosen") == TURNS
    assert said({"prompt": "2 + 3?", "chosen": "5", "rejected": "6"}, question="prompt", answer="chosen") == TURNS


def test_of_a_prompt_and_a_completion_as_messages_the_completion_is_learnt() -> None:
    prompt = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2 + 3?"},
    ]
    fields = {"prompt": prompt, "completion": [{"role": "assistant", "content": "5"}]}
    assert said(fields) == ["user: 1 + 1?", "assistant: 2", *TURNS]
    assert [turn.loss for turn in sample(fields).turns] == [False, False, False, True]


def test_thoughts_beside_an_answer_follow_the_mapping() -> None:
    fields = {"question": "2 + 3?", "reasoning": "Add.", "answer": "5"}
    assert said(fields, thinking="keep")[1] == "assistant: <think>\nAdd.\n</think>\n\n5"
    assert said(fields, thinking="drop") == TURNS


def test_a_list_of_captions_is_refused_with_the_mapping_that_names_one() -> None:
    fields = {"caption": ["A barn.", "A red barn."], "image": "a"}
    assert "name one, as in the mapping 'text: caption.0'" in refusal(fields)
    assert said(fields, text="caption.1") == ["document: [a]A red barn."]
    assert said({"caption": ["A barn."], "image": "a"}) == ["document: [a]A barn."]
    assert said({"caption": ["A ", "<image>", "."], "image": "a"}) == ["document: A [a]."]
    assert refusal({"caption": [], "image": None}).startswith("empty_sample")
