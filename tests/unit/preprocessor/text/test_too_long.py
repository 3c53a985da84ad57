"""Samples with more tokens than a sequence may have are refused or cut, and no cut goes through a medium."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.preprocessor.records.record_to_sample import Audio, Image, Role, Sample, Segment, Text, Turn
from headrace.preprocessor.text import BUNDLED, load_encoder
from headrace.preprocessor.text.sequence import TokenSequence
from headrace.preprocessor.text.template import ChatTemplate, load_template
from headrace.quarantine import BadSampleError, Reason
from headrace.sample import LABEL_IGNORED
from headrace.text_spec import TextSpec

CUTS: tuple[Literal["truncate_end"], Literal["truncate_start"]] = ("truncate_end", "truncate_start")
IMAGE, AUDIO = Image(data=b""), Audio(data=b"")
ENCODER = load_encoder("")
CONTROL = ENCODER.control

pieces = st.one_of(st.text(st.characters(codec="utf-8"), max_size=30), st.sampled_from([IMAGE, AUDIO]))


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """A document, or a conversation with an answer at its end, of up to a few hundred tokens."""
    roles = draw(st.sampled_from([(Role.DOCUMENT,), (Role.USER, Role.ASSISTANT), (Role.USER, Role.ASSISTANT) * 2]))
    return Sample(
        turns=tuple(
            Turn(role=role, segments=tuple(segment(piece) for piece in draw(st.lists(pieces, max_size=5)))) for role in roles
        )
    )


def segment(piece: str | Image | Audio) -> Segment:
    return Text(text=piece) if isinstance(piece, str) else piece


def render(
    sample: Sample, most: int, too_long: Literal["refuse", "truncate_end", "truncate_start"], size: int = 4
) -> TokenSequence:
    media = [size for segment in sample.segments if not isinstance(segment, Text)]
    return ChatTemplate(ENCODER, most, too_long=too_long).render(sample, media)


def placeholders(sequence: TokenSequence) -> tuple[int, int]:
    """How many images of four tokens, and recordings, the sequence has: each opened, whole and closed."""
    ids = sequence.input_ids.tolist()
    counts = []
    for kind in ("vision", "audio"):
        pad = CONTROL["<|image_pad|>" if kind == "vision" else "<|audio_pad|>"]
        begins = [i for i, token in enumerate(ids) if token == CONTROL[f"<|{kind}_start|>"]]
        assert all(ids[i + 1 : i + 6] == [pad] * 4 + [CONTROL[f"<|{kind}_end|>"]] for i in begins)
        assert ids.count(pad) == 4 * len(begins)
        counts.append(len(begins))
    return counts[0], counts[1]


@given(samples(), st.integers(1, 120), st.sampled_from(CUTS))
def test_a_cut_leaves_an_end_of_the_sequence_with_whole_media(
    sample: Sample, most: int, too_long: Literal["truncate_end", "truncate_start"]
) -> None:
    whole = render(sample, 10**6, "refuse")
    try:
        cut = render(sample, most, too_long)
    except BadSampleError as err:
        too_long_ = err.reason is Reason.TOO_LONG and len(whole.input_ids) > most
        cut = None if too_long_ else pytest.fail(str(err))
    if cut is None:
        return
    length = len(cut.input_ids)
    assert cut.is_truncated == (len(whole.input_ids) > most)
    side = slice(length) if too_long == "truncate_end" else slice(len(whole.input_ids) - length, None)
    np.testing.assert_array_equal(cut.input_ids, whole.input_ids[side])
    np.testing.assert_array_equal(cut.labels[1:], whole.labels[side][1:])
    assert length <= most
    assert cut.num_targets or not cut.is_truncated
    assert placeholders(cut) == (len(cut.images), len(cut.recordings))
    if cut.is_truncated and length < most:
        left_out = len(whole.images) + len(whole.recordings) - len(cut.images) - len(cut.recordings)
        assert left_out, "only a medium is cut away as a whole"


@given(samples(), st.integers(1, 120))
def test_without_a_rule_what_is_too_long_is_refused(sample: Sample, most: int) -> None:
    whole = render(sample, 10**6, "refuse")
    if len(whole.input_ids) <= most:
        np.testing.assert_array_equal(render(sample, most, "refuse").input_ids, whole.input_ids)
    else:
        with pytest.raises(BadSampleError, match=f"too_long: .*more than {most} tokens"):
            render(sample, most, "refuse")


def conversation(answer: str) -> Sample:
    question = Turn(role=Role.USER, segments=(IMAGE, Text(text="What is in the picture, in every detail that there is?")))
    return Sample(turns=(question, Turn(role=Role.ASSISTANT, segments=(Text(text=answer),))))


def test_a_sample_is_refused_if_its_answer_is_cut_away_and_keeps_what_is_left_of_it_otherwise() -> None:
    sample = conversation("A barn. " * 50)
    with pytest.raises(BadSampleError, match="too_long: nothing to learn is within the first 12 tokens"):
        render(sample, 12, "truncate_end")
    for too_long in CUTS:
        assert render(sample, 60, too_long).num_targets > 20


def test_media_in_front_and_behind_a_cut_are_named_by_their_places() -> None:
    document = Sample(
        turns=(Turn(role=Role.DOCUMENT, segments=(IMAGE, Text(text="one"), AUDIO, Text(text="two"), IMAGE, IMAGE)),)
    )
    end, start = render(document, 17, "truncate_end"), render(document, 15, "truncate_start")
    assert (end.images, end.recordings) == (range(1), range(1))
    assert (start.images, start.recordings) == (range(1, 3), range(1, 1))


def test_a_text_of_any_length_is_cut_in_bounded_time() -> None:
    words = "barn " * 2_000_000
    document = Sample(turns=(Turn(role=Role.DOCUMENT, segments=(Text(text=words),)),))
    for too_long in CUTS:
        cut = render(document, 100, too_long)
        assert len(cut.input_ids) == 100
        text = ENCODER.decode(cut.input_ids.tolist())
        assert words.startswith(text) if too_long == "truncate_end" else f"{words}<|endoftext|>".endswith(text)


def test_a_chat_template_is_cut_around_what_it_writes_about_a_medium(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(BUNDLED.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
        "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}"
        "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    answer = Turn(role=Role.ASSISTANT, segments=(Text(text="first"),))
    question = Turn(role=Role.USER, segments=(Text(text="one"), IMAGE, IMAGE, Text(text="more")))
    sample = Sample(turns=(Turn(role=Role.USER, segments=(Text(text="q"),)), answer, question, answer))

    def cut(most: int) -> TokenSequence:
        spec = TextSpec(
            tokenizer=str(tmp_path / "tokenizer.json"), template="chat_template", max_tokens=most, too_long="truncate_end"
        )
        return load_template(spec).render(sample, [4, 4])

    whole = cut(1000)
    first = whole.input_ids.tolist().index(CONTROL["<|vision_start|>"])
    for most, images in ((first, 0), (first + 3, 0), (first + 5, 0), (first + 6, 1), (first + 11, 1), (first + 12, 2)):
        sequence = cut(most)
        assert len(sequence.images) == images
        assert len(sequence.input_ids) == first + 6 * images
        assert placeholders(sequence) == (images, 0)


def test_labels_of_a_cut_sequence_are_those_of_its_tokens() -> None:
    cut = render(conversation("A barn. " * 50), 40, "truncate_start")
    learnt = cut.labels != LABEL_IGNORED
    np.testing.assert_array_equal(cut.labels[learnt], cut.input_ids[learnt])
    assert not learnt[0]
