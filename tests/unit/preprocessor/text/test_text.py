"""Text: control tokens' names are text, whatever the tokenizer's file says of them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace.errors import SpecError
from headrace.preprocessor.text import BUNDLED, CONTROL_TOKENS, TextEncoder, byte_pairs, load_encoder
from headrace.quarantine import BadSampleError, Reason


def small_tokenizer(control: tuple[str, ...] = CONTROL_TOKENS, *, special: bool = True) -> dict[str, Any]:
    """A byte-level BPE; its control tokens may be plain added tokens, as in many published files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat and the rat"] * 5, trainer)
    tokenizer.add_tokens([AddedToken(token, special=special) for token in control])
    document: dict[str, Any] = json.loads(tokenizer.to_str())
    return document


@pytest.fixture(scope="module", params=["bundled", "special", "plain"])
def encoder(request: pytest.FixtureRequest) -> TextEncoder:
    if request.param == "bundled":
        return load_encoder("")
    return TextEncoder(json.dumps(small_tokenizer(special=request.param == "special")), "small")


def test_control_tokens_have_their_own_ids(encoder: TextEncoder) -> None:
    ids = list(encoder.control.values())
    assert len(set(ids)) == len(CONTROL_TOKENS) == 9
    assert max(ids) < encoder.vocab_size
    assert [encoder.decode([token]) for token in ids] == list(CONTROL_TOKENS)


@pytest.mark.parametrize("token", CONTROL_TOKENS)
@pytest.mark.parametrize("frame", ["{}", "word{}word", " {} ", "{0}{0}", "a\n{}\nb", "<{}>"])
def test_names_of_control_tokens_are_text(encoder: TextEncoder, token: str, frame: str) -> None:
    text = frame.format(token)
    ids = encoder.encode(text)
    assert not set(ids) & set(encoder.control.values())
    assert encoder.decode(ids) == text


@given(st.text(st.characters(codec="utf-8")))
def test_round_trip(text: str) -> None:
    assert load_encoder("").decode(load_encoder("").encode(text)) == text


def test_lone_surrogate(encoder: TextEncoder) -> None:
    with pytest.raises(BadSampleError) as caught:
        encoder.encode("a\ud800b")
    assert caught.value.reason is Reason.ENCODING_ERROR


def test_text_beyond_any_limit_is_refused_unread(encoder: TextEncoder) -> None:
    assert encoder.encode("the cat", limit=10) == encoder.encode("the cat")
    with pytest.raises(BadSampleError) as caught:
        encoder.encode("x" * 10_000_000, limit=100)
    assert caught.value.reason is Reason.TOO_LONG


@pytest.mark.parametrize("missing", CONTROL_TOKENS)
def test_missing_control_token_is_named(missing: str) -> None:
    control = tuple(token for token in CONTROL_TOKENS if token != missing)
    with pytest.raises(SpecError) as caught:
        TextEncoder(json.dumps(small_tokenizer(control)), "mine.json")
    assert str(caught.value).startswith(f"text.tokenizer: mine.json lacks the control token {missing};")


def test_truncation_and_padding_in_the_file_are_ignored() -> None:
    document = small_tokenizer()
    document["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    document["padding"] = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    document["padding"] |= {"pad_type_id": 0, "pad_token": "!"}
    encoder = TextEncoder(json.dumps(document), "small")
    text = "the cat sat on the mat"
    assert encoder.decode(encoder.encode(text)) == text


def test_file_and_url(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(small_tokenizer()))
    expected = TextEncoder(path.read_text(), "small").encode("the cat")
    assert load_encoder(str(path)).encode("the cat") == load_encoder(path.as_uri()).encode("the cat") == expected
    assert BUNDLED.is_file()


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe", b'{"added_tokens": [], "model": {"type": "No"}}'])
def test_other_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=r"^text\.tokenizer: .*x\.json"):
        load_encoder(str(path))


@pytest.mark.parametrize("path", ["/no/such.json", "nonsense://x/tokenizer.json"])
def test_missing_file(path: str) -> None:
    with pytest.raises(SpecError, match=r"^text\.tokenizer: cannot read"):
        load_encoder(path)


@given(st.text(st.characters(codec="utf-8")))
def test_pieces_are_the_text_cut_at_its_tokens(text: str) -> None:
    encoder = load_encoder("")
    ids = encoder.encode(text)
    pieces = encoder.pieces(ids)
    assert "".join(piece for piece, _ in pieces) == text
    assert sum(count for _, count in pieces) == len(ids)


def test_a_character_of_several_tokens_is_one_piece_and_half_of_it_is_shown_as_such(encoder: TextEncoder) -> None:
    ids = encoder.encode("🦜")
    assert len(ids) > 1
    assert encoder.pieces(ids) == [("🦜", len(ids))]
    assert encoder.pieces(ids[:-1]) == [("\ufffd", len(ids) - 1)]


def test_spans_of_characters_become_ranges_of_tokens(encoder: TextEncoder) -> None:
    text = "the cat 🦜 sat  on the mat"
    ids, (whole, parrot, sat, nothing) = encoder.encode_spans(text, [(0, len(text)), (8, 9), (10, 13), (4, 4)])
    assert whole == range(len(ids))
    assert encoder.decode(ids[parrot.start : parrot.stop]).strip() == "🦜"
    assert encoder.decode(ids[sat.start : sat.stop]).strip() == "sat"
    assert not nothing


@pytest.fixture
def without_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    load_encoder("")  # as it is installed, and kept
    monkeypatch.setattr(byte_pairs, "_tiktoken", None)
    monkeypatch.setattr(byte_pairs, "NAME", None)


@pytest.mark.usefixtures("without_tiktoken")
@pytest.mark.parametrize("text", ["", "The cat's 12 mats.\n\n ", "größe 猫 🦜", "<|im_end|>", "e\u0301 ภาษา"])
def test_ids_and_spans_are_the_same_without_tiktoken(text: str) -> None:
    spans = [(start, stop) for stop in range(len(text) + 1) for start in range(stop + 1)]
    plain = TextEncoder(BUNDLED.read_text(), "bundled")
    assert plain.codec.startswith("tokenizers ")
    assert plain.encode_spans(text, spans) == load_encoder("").encode_spans(text, spans)


def test_the_codec_is_named_once_a_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(small_tokenizer()))
    with caplog.at_level(logging.INFO, "headrace.preprocessor.text"):
        encoder = load_encoder(str(path))
        load_encoder(str(path))
    assert caplog.messages[0] == f'text codec tokenizer={path} codec="{encoder.codec}"'
    assert len(caplog.messages) == (1 if byte_pairs.NAME else 2)


@pytest.mark.usefixtures("without_tiktoken")
def test_that_tiktoken_is_missing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(small_tokenizer()))
    load_encoder(str(path))
    assert "tiktoken is not installed" in caplog.messages[-1]
