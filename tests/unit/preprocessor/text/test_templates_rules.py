"""What templates do beyond the published formats: documents, recordings, placeholders of one's own, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace.errors import SpecError
from headrace.mapping import MappingSpec
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.records.record_to_sample import Audio, Image, Role, Sample, Segment, Text, Turn, to_sample
from headrace.preprocessor.text import BUNDLED
from headrace.preprocessor.text.media_markup import TokenGrid
from headrace.preprocessor.text.sequence import NO_TOKEN, TokenSequence
from headrace.preprocessor.text.template import ChatTemplate, load_template
from headrace.preprocessor.text.templates import TEMPLATES
from headrace.quarantine import BadSampleError, Reason
from headrace.sample import LABEL_IGNORED
from headrace.text_spec import TextSpec
from tests.examples import with_examples

IMAGE, AUDIO = Image(data=b""), Audio(data=b"")
EVERY_TOKEN = tuple(dict.fromkeys(token for template in TEMPLATES.values() for token in template.control))


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json with the control tokens of every template, and a spare one."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(BUNDLED))
    tokenizer.add_special_tokens([*EVERY_TOKEN, "<|spare|>"])
    tokenizer.save(str(path))
    return path


def turn(role: Role, *segments: Segment | str) -> Turn:
    return Turn(role=role, segments=tuple(Text(text=item) if isinstance(item, str) else item for item in segments))


def text_of(template: ChatTemplate, sequence: TokenSequence) -> str:
    return template.encoder.decode(sequence.input_ids.tolist())


def learnt(template: ChatTemplate, sequence: TokenSequence) -> str:
    return template.encoder.decode(sequence.labels[sequence.labels != LABEL_IGNORED].tolist())


def make(tokenizer_file: Path, name: str, **options: object) -> ChatTemplate:
    return load_template(TextSpec.model_validate({"tokenizer": str(tokenizer_file), "template": name, **options}))


@pytest.mark.parametrize(
    ("name", "begin", "picture", "end"),
    [
        ("chatml", "", "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>", "<|endoftext|>"),
        ("qwen2.5-vl", "", "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>", "<|endoftext|>"),
        ("llava", "<s>", "<image><image>", "</s>"),
        ("llama3", "<|begin_of_text|>", "<|image|><|image|>", "<|end_of_text|>"),
        ("llama3.2-vision", "<|begin_of_text|>", "<|image|>", "<|end_of_text|>"),
        ("gemma3", "<bos>", "\n\n<start_of_image><image_soft_token><image_soft_token><end_of_image>\n\n", "<eos>"),
        ("pixtral", "<s>", "[IMG][IMG][IMG_END]", "</s>"),
        (
            "smolvlm",
            "<|im_start|>",
            "<fake_token_around_image><global-img><image><image><fake_token_around_image>",
            "<end_of_utterance>",
        ),
    ],
)
def test_a_document_keeps_its_order_and_gets_no_system_turn(
    tokenizer_file: Path, name: str, begin: str, picture: str, end: str
) -> None:
    template = make(tokenizer_file, name)
    sequence = template.render(Sample(turns=(turn(Role.DOCUMENT, "a cat, ", IMAGE, " and a dog"),)), [2])
    assert text_of(template, sequence) == f"{begin}a cat, {picture} and a dog{end}"
    assert learnt(template, sequence).endswith(f" and a dog{end}")


def test_a_missing_control_token_is_one_sentence_with_token_and_tokenizer() -> None:
    with pytest.raises(SpecError) as caught:
        load_template(TextSpec(template="llama3"))
    assert "\n" not in str(caught.value)
    assert f"{BUNDLED} lacks the control token <|begin_of_text|>; add it to its added tokens" in str(caught.value)


@pytest.mark.parametrize("name", ["qwen2.5-vl", "llava", "llava-hf", "llama3", "llama3.2-vision"])
def test_a_recording_is_refused_until_its_placeholder_is_named(tokenizer_file: Path, name: str) -> None:
    sample = Sample(turns=(turn(Role.USER, AUDIO, "Who sings?"), turn(Role.ASSISTANT, "A thrush.")))
    template = make(tokenizer_file, name)
    assert template.vocabulary.audio_token == NO_TOKEN
    with pytest.raises(BadSampleError, match=r"text\.audio_token") as caught:
        template.render(sample, [3])
    assert caught.value.reason is Reason.UNSUPPORTED_MEDIA
    named = make(tokenizer_file, name, audio_token="<|spare|>")
    sequence = named.render(sample, [3])
    assert sequence.input_ids.tolist().count(named.vocabulary.audio_token) == 3
    assert "<|spare|><|spare|><|spare|>" in text_of(named, sequence)


def test_another_image_placeholder_takes_the_place_of_the_templates_own(tokenizer_file: Path) -> None:
    sample = Sample(turns=(turn(Role.USER, IMAGE), turn(Role.ASSISTANT, "<|spare|>")))
    template = make(tokenizer_file, "qwen2.5-vl", image_token="<|spare|>")
    sequence = template.render(sample, [2])
    assert "<|vision_start|><|spare|><|spare|><|vision_end|>" in text_of(template, sequence)
    assert sequence.input_ids.tolist().count(template.vocabulary.image_token) == 2, "the name in the answer is text"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"image_token": "<|eot_id|>"}, "text.image_token: <|eot_id|> has another meaning"),
        ({"audio_token": "<|image|>"}, "text.image_token: <|image|> has another meaning"),
        ({"image_token": "<|absent|>"}, "lacks the control token <|absent|>"),
    ],
)
def test_a_placeholder_must_be_a_token_with_no_other_meaning(
    tokenizer_file: Path, options: dict[str, str], sentence: str
) -> None:
    with pytest.raises(SpecError) as caught:
        make(tokenizer_file, "llama3", **options)
    assert sentence in str(caught.value)


def test_a_tokenizer_without_tokens_for_media_serves_data_without_such_media(tmp_path: Path) -> None:
    """As Qwen's own do, which know no recordings."""
    path = tmp_path / "tokenizer.json"
    path.write_text(BUNDLED.read_text().replace("<|audio_", "<|sound_"))
    template = make(path, "chatml")
    answer = turn(Role.ASSISTANT, "A hen.")
    pictured = Sample(turns=(turn(Role.USER, IMAGE, "Hm?"), answer))
    assert template.render(pictured, [3]).input_ids.tolist() == make(BUNDLED, "chatml").render(pictured, [3]).input_ids.tolist()
    assert template.vocabulary.audio_token == NO_TOKEN
    with pytest.raises(BadSampleError, match=r"lacks the control token <\|audio_start\|>; add it") as caught:
        template.render(Sample(turns=(turn(Role.USER, AUDIO), answer)), [3])
    assert caught.value.reason is Reason.UNSUPPORTED_MEDIA


QUESTION, ANSWER = turn(Role.USER, "Hm?"), turn(Role.ASSISTANT, "A hen.")


@pytest.mark.parametrize(
    ("name", "turns", "said"),
    [
        ("pixtral", (turn(Role.SYSTEM, "Be brief."), QUESTION, ANSWER), "turn 0: the template has no place for the role system"),
        ("pixtral", (QUESTION, QUESTION, ANSWER), "turn 1: in the template a user and the assistant alternate"),
        ("gemma3", (ANSWER,), "turn 0: in the template a user and the assistant alternate"),
        ("gemma3", (QUESTION, ANSWER, turn(Role.SYSTEM, "Now!"), QUESTION, ANSWER), "turn 2: .* no place for the role system"),
        ("gemma3", (turn(Role.SYSTEM, IMAGE), QUESTION, ANSWER), "turn 0: the template has no place for media in a system turn"),
    ],
)
def test_turns_that_a_template_has_no_place_for_are_refused(
    tokenizer_file: Path, name: str, turns: tuple[Turn, ...], said: str
) -> None:
    with pytest.raises(BadSampleError, match=said) as caught:
        make(tokenizer_file, name).render(Sample(turns=turns), [1] * any(IMAGE in turn.segments for turn in turns))
    assert caught.value.reason is Reason.SCHEMA_ERROR


def test_a_template_without_a_place_for_images_refuses_them_until_their_placeholder_is_named(tokenizer_file: Path) -> None:
    sample = Sample(turns=(turn(Role.USER, IMAGE, "Hm?"), ANSWER))
    with pytest.raises(BadSampleError, match=r"no place for an image; name its placeholder in text\.image_token"):
        make(tokenizer_file, "qwen2-audio").render(sample, [2])
    named = make(tokenizer_file, "qwen2-audio", image_token="<|spare|>")
    assert "<|spare|><|spare|>Hm?" in text_of(named, named.render(sample, [2]))


def test_recordings_are_numbered_through_a_whole_conversation(tokenizer_file: Path) -> None:
    template = make(tokenizer_file, "qwen2-audio")
    sample = Sample(turns=(turn(Role.USER, AUDIO, AUDIO, "Alike?"), ANSWER, turn(Role.USER, "This?", AUDIO), ANSWER))
    text = text_of(template, template.render(sample, [1, 2, 1]))
    assert "Audio 1: <|audio_bos|><|AUDIO|><|audio_eos|>\nAudio 2: <|audio_bos|><|AUDIO|><|AUDIO|><|audio_eos|>\nAlike?" in text
    assert "This?Audio 3: <|audio_bos|><|AUDIO|><|audio_eos|>\n<|im_end|>" in text


def test_tiles_are_named_by_row_and_column_and_rows_have_ends(tokenizer_file: Path) -> None:
    sample = Sample(turns=(turn(Role.USER, IMAGE, "Hm?"), ANSWER))
    smol, pixtral = make(tokenizer_file, "smolvlm"), make(tokenizer_file, "pixtral")
    tiled = text_of(smol, smol.render(sample, [TokenGrid(height=1, width=2, rows=2, columns=1, whole=True)]))
    around, image = "<fake_token_around_image>", "<image><image>"
    tiles = f"{around}<row_1_col_1>{image}\n{around}<row_2_col_1>{image}\n"
    assert tiled.startswith(f"<|im_start|>User:{tiles}\n{around}<global-img>{image}{around}Hm?")
    rows = text_of(pixtral, pixtral.render(sample, [TokenGrid(height=2, width=3)]))
    assert rows.startswith("<s>[INST][IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]Hm?[/INST]")


def test_tokens_for_tiles_are_needed_where_images_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(BUNDLED))
    tokenizer.add_special_tokens([token for token in TEMPLATES["smolvlm"].control if not token.startswith("<row_")])
    tokenizer.save(str(path))
    template, sample = make(path, "smolvlm"), Sample(turns=(turn(Role.USER, IMAGE, "Hm?"), ANSWER))
    assert template.render(sample, [TokenGrid(height=1, width=2)]).num_targets
    with pytest.raises(BadSampleError, match=r"lacks the control token <row_1_col_1>; add it") as caught:
        template.render(sample, [TokenGrid(height=1, width=2, rows=2, whole=True)])
    assert caught.value.reason is Reason.UNSUPPORTED_MEDIA


def test_llama_vision_has_one_token_for_an_image_of_any_size(tokenizer_file: Path) -> None:
    template = make(tokenizer_file, "llama3.2-vision")
    sample = Sample(turns=(turn(Role.USER, IMAGE, "Hm?"), turn(Role.ASSISTANT, "A hen.")))
    small, large = (template.render(sample, [count]).input_ids.tolist() for count in (4, 4000))
    assert small == large
    assert small.count(template.vocabulary.image_token) == 1


def test_llama_vision_has_no_system_turn_beside_images(tokenizer_file: Path) -> None:
    template = make(tokenizer_file, "llama3.2-vision")
    question = (turn(Role.USER, IMAGE, "Hm?"), turn(Role.ASSISTANT, "A hen."))
    with pytest.raises(BadSampleError) as caught:
        template.render(Sample(turns=(turn(Role.SYSTEM, "Be brief."), *question)), [1])
    assert caught.value.reason is Reason.SCHEMA_ERROR
    blank = template.render(Sample(turns=(turn(Role.SYSTEM, " "), *question)), [1])
    assert blank.input_ids.tolist() == template.render(Sample(turns=question), [1]).input_ids.tolist()


def test_a_question_may_be_asked_with_the_picture_in_its_middle_of_llava(tokenizer_file: Path) -> None:
    template = make(tokenizer_file, "llava")
    asked = (turn(Role.USER, "\nWhat is ", IMAGE, "here?"), turn(Role.ASSISTANT, " A hen. "))
    text = text_of(template, template.render(Sample(turns=asked), [2]))
    assert text.endswith(" USER: <image><image>\nWhat is here? ASSISTANT: A hen.</s>")


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_a_sample_may_be_as_long_as_the_limit_and_no_longer(tokenizer_file: Path, name: str) -> None:
    medium = IMAGE if TEMPLATES[name].image else AUDIO
    sample = Sample(turns=(turn(Role.USER, medium, "Hm?"), turn(Role.ASSISTANT, "A hen, I think.")))
    length = len(make(tokenizer_file, name).render(sample, [5]).input_ids)
    assert len(make(tokenizer_file, name, max_tokens=length).render(sample, [5]).input_ids) == length
    with pytest.raises(BadSampleError) as caught:
        make(tokenizer_file, name, max_tokens=length - 1).render(sample, [5])
    assert caught.value.reason is Reason.TOO_LONG


@pytest.mark.parametrize("name", list(TEMPLATES))
@with_examples(40)
@given(words=st.lists(st.one_of(st.sampled_from(EVERY_TOKEN), st.text(st.characters(codec="utf-8"), max_size=8))))
def test_whatever_is_said_adds_no_control_token(tokenizer_file: Path, name: str, words: list[str]) -> None:
    template = make(tokenizer_file, name)
    said = "".join(words)
    sample = Sample(turns=(turn(Role.USER, said), turn(Role.ASSISTANT, said)))
    plain = Sample(turns=(turn(Role.USER, "x"), turn(Role.ASSISTANT, "x")))
    control = set(template.encoder.control.values())

    def skeleton(value: Sample) -> list[int]:
        return [token for token in template.render(value, []).input_ids.tolist() if token in control]

    assert skeleton(sample) == skeleton(plain)


@pytest.mark.parametrize("name", ["gemma3", "llava-hf"])
@pytest.mark.parametrize("thought_field", [True, False])
def test_a_masked_thought_and_its_answer_have_the_tokens_of_one_string(
    tokenizer_file: Path, name: str, thought_field: bool
) -> None:
    thought, said = "<think>\nEasy.\n</think>\n\n", "It is 4."
    answer = {"reasoning_content": "Easy.", "content": said} if thought_field else {"content": thought + said}
    messages = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", **answer}]
    template = make(tokenizer_file, name)
    kept, masked = (
        template.render(to_sample(Record(key="k", fields={"messages": messages}, load=str.encode), spec), [])
        for spec in (MappingSpec(thinking="keep"), MappingSpec(thinking="mask"))
    )
    assert f"{thought}{said}" in text_of(template, kept)
    assert masked.input_ids.tolist() == kept.input_ids.tolist()
    assert "Easy" not in learnt(template, masked)
