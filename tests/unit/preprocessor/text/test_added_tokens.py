"""Added tokens: what the file says is special is text in a text, all others are kept whole, as `transformers` keeps them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from headrace.mapping import MappingSpec
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.records.record_to_sample import to_sample
from headrace.preprocessor.text import BUNDLED, TextEncoder, byte_pairs
from headrace.preprocessor.text.template import load_template
from headrace.sample import LABEL_IGNORED
from headrace.text_spec import TextSpec
from tests.examples import with_examples

PLAIN = ("<think>", "</think>", "<tool_call>", "<|fim_prefix|>")
SPECIAL = ("<|extra|>", "<|im_start|>")
FLAGGED = (AddedToken("[A]", lstrip=True), AddedToken("[B]", rstrip=True), AddedToken("WORD", single_word=True))
FRAGMENTS = (
    *PLAIN,
    *SPECIAL,
    *(token.content for token in FLAGGED),
    " ",
    "\n",
    "the cat",
    "größe",
    "12",
    "WORDS",
    "<",
    "think>",
    "</",
)


def definition(*flagged: AddedToken) -> str:
    tokenizer = Tokenizer.from_str(BUNDLED.read_text())
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN])
    tokenizer.add_special_tokens(["<|extra|>"])
    tokenizer.add_tokens(list(flagged))
    return str(tokenizer.to_str())


def encoders(monkeypatch: pytest.MonkeyPatch, text: str) -> tuple[TextEncoder, TextEncoder]:
    """With the fast codec, where it is installed, and without."""
    fast = TextEncoder(text, "mine")
    with monkeypatch.context() as patched:
        patched.setattr(byte_pairs, "_tiktoken", None)
        return fast, TextEncoder(text, "mine")


@pytest.mark.parametrize("flagged", [(), FLAGGED], ids=["plain", "with flags"])
def test_ids_are_those_of_transformers(flagged: tuple[AddedToken, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_text(text := definition(*flagged))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    ours = encoders(monkeypatch, text)

    @with_examples(200)
    @given(st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join))
    def check(text: str) -> None:
        expected = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        for encoder in ours:
            assert encoder.encode(text) == expected
            spans = list(pairwise((0, len(text) // 3, len(text))))
            assert encoder.encode_spans(text, spans) == ours[0].encode_spans(text, spans)

    check()


def test_a_thought_is_one_token_and_a_special_token_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoder in encoders(monkeypatch, definition()):
        ids = encoder.encode("<think>\nok\n</think>\n\n4 <|extra|>")
        names = [encoder.decode([token]) for token in ids]
        assert names[0] == "<think>"
        assert "</think>" in names
        assert "<|extra|>" not in names
        assert "".join(names) == "<think>\nok\n</think>\n\n4 <|extra|>"


@pytest.mark.parametrize("special", [True, False])
def test_a_control_token_is_text_in_a_text_whatever_the_file_says(special: bool) -> None:
    document: dict[str, Any] = json.loads(definition())
    for token in document["added_tokens"]:
        token["special"] = special
    encoder = TextEncoder(json.dumps(document), "mine")
    assert encoder.control["<|im_end|>"] not in encoder.encode("a<|im_end|>b")


def test_thoughts_of_an_answer_are_learnt(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(definition())
    template = load_template(TextSpec(tokenizer=str(tmp_path / "tokenizer.json")))
    messages = [
        {"role": "user", "content": "<think>?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nNo."},
    ]
    fields = {"messages": messages}
    sequence = template.render(to_sample(Record(key="k", fields=fields, load=str.encode), MappingSpec()), [])
    (thought,) = template.encoder.encode("<think>")
    assert np.count_nonzero(sequence.input_ids == thought) == 2
    assert np.count_nonzero(sequence.labels == thought) == 1
    learnt = sequence.labels[sequence.labels != LABEL_IGNORED].tolist()
    assert template.encoder.decode(learnt) == "<think>\nhm\n</think>\n\nNo.<|im_end|>"
