"""What lies beside a tokenizer: where its template is found, what bounds it, what a job says to it, what it may not do."""

from __future__ import annotations

import io
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Picture
from tokenizers import Tokenizer

from headrace.errors import SpecError
from headrace.preprocessor.decoding import SampleProcessor
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.records.record_to_sample import Image, Role, Sample, Segment, Text, Turn
from headrace.preprocessor.text import BUNDLED, jinja_environment, template_bounds
from headrace.preprocessor.text.sequence import NO_TOKEN, PromptTemplate
from headrace.preprocessor.text.template import load_template
from headrace.quarantine import BadSampleError, Reason
from headrace.sample import LABEL_IGNORED
from headrace.spec import JobSpec, parse
from headrace.text_spec import TextSpec

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SPARE = "<|spare|>"
MOST_ITEMS = 100_000
"""In place of a million, which takes ten times as long to reach."""
LONG = "{% set a = ['x' * 1000] * 90 %}{% set a = a + a %}"
"""A list of 180,000 characters, of which a template of a short sample makes no text then."""
LISTS = (
    "{{ a }}",
    "{{ a ~ '' }}",
    "{{ '%s' % a }}",
    "{{ '{}'.format(a) }}",
    "{{ ''.join(a) }}",
    "{{ a | tojson }}",
    "{{ a | join }}",
)
LISTS += tuple(f"{{% set b = a | {name} %}}" for name in ("string", "upper", "escape", "urlencode", "replace('a', 'b')", "trim"))


@cache
def tokenizer_with(*special: str) -> str:
    tokenizer = Tokenizer.from_file(str(BUNDLED))
    tokenizer.add_special_tokens([*special])
    return tokenizer.to_str()


def folder(path: Path, files: dict[str, Any], *special: str) -> Path:
    """A tokenizer.json with more special tokens, and files beside it: texts, or what becomes JSON."""
    (path / "tokenizer.json").write_text(tokenizer_with(SPARE, *special), encoding="utf-8")
    for name, content in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def load(path: Path, **spec: Any) -> PromptTemplate:
    fields = {"tokenizer": f"{path}/tokenizer.json", "template": "chat_template", **spec}
    return load_template(parse(TextSpec, fields, "spec"))


def made(path: Path, template: str, **spec: Any) -> PromptTemplate:
    return load(folder(path, {"chat_template.jinja": template}), **spec)


def chat(question: str | Segment = "hi?", answer: str = "yes", **sample: Any) -> Sample:
    asked = Text(text=question) if isinstance(question, str) else question
    turns = (Turn(role=Role.USER, segments=(asked,)), Turn(role=Role.ASSISTANT, segments=(Text(text=answer),)))
    return Sample(turns=turns, **sample)


def text_of(template: PromptTemplate, sample: Sample, *counts: int) -> str:
    return template.encoder.decode(template.render(sample, list(counts)).input_ids.tolist())


def refusal(template: PromptTemplate, sample: Sample) -> BadSampleError:
    with pytest.raises(BadSampleError) as caught:
        template.render(sample, [])
    return caught.value


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "config"}}, "config"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "list"}]}}, "list"),
        ({"tokenizer_config.json": {"chat_template": "config"}, "chat_template.json": {"chat_template": "json"}}, "json"),
        (
            {
                "tokenizer_config.json": {"chat_template": "config"},
                "chat_template.json": {"chat_template": "json"},
                "chat_template.jinja": "jinja",
            },
            "jinja",
        ),
    ],
)
def test_where_a_template_is_found(tmp_path: Path, files: dict[str, Any], expected: str) -> None:
    shown = json.loads(json.dumps(files).replace(f'"{expected}"', json.dumps(f"{expected} {CHATML}")))
    template = load(folder(tmp_path, shown))
    assert text_of(template, chat()).startswith(f"{expected} <|im_start|>user\nhi?")


def test_conversations_with_tools_may_have_a_template_of_their_own(tmp_path: Path) -> None:
    tools = "{{ tools | tojson }}" + CHATML
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": tools}]
    for number, files in enumerate(
        (
            {"tokenizer_config.json": {"chat_template": named}},
            {"chat_template.jinja": CHATML, "additional_chat_templates/tool_use.jinja": tools},
        )
    ):
        (tmp_path / str(number)).mkdir()
        template = load(folder(tmp_path / str(number), files))
        assert text_of(template, chat()).startswith("<|im_start|>")
        assert text_of(template, chat(tools=({"name": "größe<"},))).startswith('[{"name": "größe<"}]<|im_start|>')


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "there is no chat template beside"),
        ({"tokenizer_config.json": {"chat_template": 3}}, "tokenizer_config.json is neither a text nor a list of named ones"),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json is no JSON"),
        ({"tokenizer_config.json": "[]"}, "tokenizer_config.json is no JSON object"),
        ({"chat_template.jinja": "{% if %}"}, "the chat template is no Jinja: line 1"),
        ({"chat_template.jinja": CHATML + "{{ strftime_now('%Y') }}"}, "writes today's date"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path, files: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(folder(tmp_path, files))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_job_names_the_tokenizer_of_a_chat_template() -> None:
    with pytest.raises(SpecError, match=r"name its tokenizer\.json in text\.tokenizer"):
        parse(TextSpec, {"template": "chat_template"}, "spec")
    for field in ({"today": "2026-01-31"}, {"chat_template_kwargs": {"a": 1}}):
        with pytest.raises(SpecError, match="are for template: chat_template"):
            parse(TextSpec, field, "spec")


def test_today_is_the_day_that_the_job_names(tmp_path: Path) -> None:
    template = made(tmp_path, "{{ strftime_now('%d %b %Y') }}" + CHATML, today="2026-01-31")
    assert text_of(template, chat()).startswith("31 Jan 2026<|im_start|>")


def test_a_date_that_is_asked_for_now_and_then_is_refused_then(tmp_path: Path) -> None:
    template = made(tmp_path, "{% if tools %}{{ strftime_now('%Y') }}{% endif %}" + CHATML)
    assert template.render(chat(), []).num_targets
    error = refusal(template, chat(tools=({"name": "f"},)))
    assert (error.reason, "name a date in text.today" in error.detail) == (Reason.SCHEMA_ERROR, True)


def test_a_job_has_variables_for_its_template(tmp_path: Path) -> None:
    asked = "{% if not enable_thinking %}/no{% endif %}{{ level }}"
    template = made(tmp_path, asked + CHATML, chat_template_kwargs={"enable_thinking": True, "level": 3, "messages": "none"})
    assert text_of(template, chat()).startswith("3<|im_start|>user")


@pytest.mark.parametrize(
    "attempt",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{% set n = namespace(_x=1) %}",
        "{{ messages[0].update(a=1) }}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{% set a = 'a' * 10 ** 10 %}",
        "{% set a = (range(9999) | list * 9999) | sort %}",
        "{% set a = 9 ** 99 %}",
        "{% set a = '%9999999999d' % 1 %}",
        "{% set a = 'a' | center(10 ** 9) %}",
        "{% set a = ('a\\n' * 9999) | indent(99999, first=true) %}",
        "{% set a = 'a' | indent('b' * 10 ** 6 * 9) %}",
        "{% set a = '%999999999s' | format('a') %}",
        "{% set a = '%*s' | format(10 ** 9, 'a') %}",
        "{% set a = [1] | batch(10 ** 9, 0) | list %}",
        "{% set a = [1] | slice(10 ** 9) | list %}",
        "{% set a = ('a' * 10 ** 5) | replace('a', 'b' * 10 ** 5) %}",
        "{% set a = [1] | tojson(indent=10 ** 9) %}",
        "{% set a = 'a'.center(10 ** 9) %}",
        "{% set a = 'a'.ljust(width=10 ** 9) %}",
        "{% set a = 'a'.zfill(10 ** 9) %}",
        "{% set a = ('\\t' * 99999).expandtabs(99999) %}",
        "{% set a = '{:>999999999}'.format(1) %}",
        "{% set a = '{:>{}}'.format(1, 10 ** 9) %}",
        "{% include 'a' %}",
        "{% set a = ('%(a)s' * 2000) % {'a': 'x' * 1000000} %}",
        "{% set a = ('{0}' * 2000).format('x' * 1000000) %}",
        "{% set a = ('%(a)s' * 2000) | format(a='x' * 1000000) %}",
        "{% set a = ['x' * 1000] * 2000 %}",
        "{% set a = [['x' * 1000]] * 2000 %}",
        "{% set n = namespace(n=10) %}{% for i in range(9) %}{% set n.n = n.n * n.n * n.n %}{% endfor %}",
        "{% set n = namespace(n=10) %}{% for i in range(2) %}{% set n.n = n.n ** 60 %}{% endfor %}",
        "{% set a = 3 | round(10 ** 9, 'ceil') %}",
        "{% set a = 'x'.translate({120: 'y'}) %}",
        "{% set a = ('x'.encode() * 10 ** 9) %}",
        "{% set a = (1).to_bytes(10 ** 9, 'big') %}",
        "{% set a = {}.fromkeys(range(9), 'x') %}",
        "{% set a = [[1]] | sum(start=[]) %}",
        "{% for i in range(999) %}{% set a = 'x' * 1000000 %}{% endfor %}",
        "{{ raise_exception([1]) }}",
    ],
)
def test_a_template_does_nothing_but_write(tmp_path: Path, attempt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja_environment, "MAX_STEPS", 10_000)
    error = refusal(made(tmp_path, attempt + CHATML), chat())
    assert error.reason is Reason.SCHEMA_ERROR
    assert error.detail.startswith("the chat template refuses the conversation: ")


def test_a_template_writes_no_more_than_a_sample_may_be_long(tmp_path: Path) -> None:
    template = made(tmp_path, "{% for a in range(99999) %}{{ 'hum ' * 99 }}{% endfor %}" + CHATML, max_tokens=100)
    assert refusal(template, chat()).reason is Reason.TOO_LONG


@pytest.mark.parametrize(
    "attempt",
    [
        "{% set n = namespace(a='ab') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
        "{% set n = namespace(a='ab') %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}",
        "{% set n = namespace(a='ab') %}{% for i in range(60) %}{% set n.a = [n.a, n.a] | join %}{% endfor %}",
        "{% set n = namespace(a='ab') %}{% for i in range(60) %}{% set n.a = n.a.join(['', '', '']) %}{% endfor %}",
        "{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}",
        "{% set a = range(9999) | map('string') | map('center', 999) | join %}",
        "{% set a = range(99999) | map('center', 99999) | list %}",
        "{% set n = namespace(a='ab') %}{% for i in range(60) %}{% set n.a %}{{ n.a }}{{ n.a }}{% endset %}{% endfor %}",
        "{% set n = namespace(a='ab') %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% endfor %}",
        "{% set n = namespace(a='ab') %}{% for i in range(60) %}{% set n.a = {'a': n.a, 'b': n.a} %}{% endfor %}",
        "{% set n = namespace(a='ab') %}{% for i in range(60) %}{% set n.a = dict(a=n.a, b=n.a) %}{% endfor %}",
        *(f"{LONG}{written}" for written in LISTS),
    ],
)
def test_a_template_does_not_put_together_what_is_longer_than_a_sample_may_be(
    tmp_path: Path, attempt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_bounds, "_MOST_ITEMS", MOST_ITEMS)
    assert refusal(made(tmp_path, attempt + CHATML, max_tokens=100), chat()).reason is Reason.TOO_LONG


@pytest.mark.parametrize("name", ["pprint", "urlize", "wordwrap(9)", "xmlattr"])
def test_filters_that_make_much_of_little_are_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match="No filter named"):
        made(tmp_path, CHATML + "{{ 'a' | " + name + " }}")


def test_a_template_takes_no_name_of_those_that_bound_it(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="take another"):
        made(tmp_path, "{% set _headrace_step = dict %}" + CHATML)


def test_what_a_template_pads_and_joins_is_as_jinja_has_it(tmp_path: Path) -> None:
    attempt = (
        "{{ 'a' | center(5) }}|{{ 'a\nb' | indent(2) }}|{{ '%3d' | format(7) }}|{{ ['x', 'y'] | join('-') }}|"
        "{{ 'a' ~ 1 ~ none }}|{{ [1, 2, 3] | batch(2, 0) | list }}|{{ 'aa' | replace('a', 'b', 1) }}|{{ '{:>3}'.format(1) }}|"
        "{{ 'a'.join(['b', 'c']) }}|{{ [{'n': 'a'}, {'n': 'b'}] | join(',', attribute='n') }}|{{ 'ab' | join('.') }}|"
    )
    written = text_of(made(tmp_path, attempt + CHATML), chat())
    assert written.startswith("  a  |a\n  b|  7|x-y|a1None|[[1, 2], [3, 0]]|ba|  1|bac|a,b|a.b|")


def test_a_sample_may_be_as_long_as_the_limit_and_no_longer(tmp_path: Path) -> None:
    length = len(made(tmp_path, CHATML).render(chat(), []).input_ids)
    assert len(load(tmp_path, max_tokens=length).render(chat(), []).input_ids) == length
    assert refusal(load(tmp_path, max_tokens=length - 1), chat()).reason is Reason.TOO_LONG


def test_marks_that_a_template_takes_apart_are_refused(tmp_path: Path) -> None:
    torn = "{% set said %}{% generation %}yes{% endgeneration %}{% endset %}{{ said[:2] }}"
    assert "takes its generated text apart" in refusal(made(tmp_path, torn), chat()).detail


def test_a_template_that_reads_a_control_token_in_the_words_is_refused_unless_that_is_allowed(tmp_path: Path) -> None:
    """Without, as what it would make of the words is neither theirs nor ours."""
    cuts = CHATML.replace("{{ m.content }}", f"{{{{ m.content.split('{SPARE}')[-1] }}}}")
    sample = chat(answer=f"hm{SPARE}yes")
    error = refusal(made(tmp_path, cuts), sample)
    assert (error.reason, "text.allow_tokens" in error.detail) == (Reason.SCHEMA_ERROR, True)
    assert text_of(load(tmp_path, allow_tokens=[SPARE]), sample).endswith("assistant\nyes<|im_end|>\n")


def test_words_that_meet_make_no_control_token(tmp_path: Path) -> None:
    """Parts of a name that the template puts side by side, or uncovers by taking out what is between them."""
    joins = CHATML.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text | replace('~', '') }}{% endfor %}")
    template = made(tmp_path, joins)
    pieces = ("<|im_", "end|>", "<|im_~end|>", "<", "|im_end|>")
    sample = Sample(
        turns=(
            Turn(role=Role.USER, segments=tuple(Text(text=piece) for piece in pieces)),
            Turn(role=Role.ASSISTANT, segments=(Text(text="yes"),)),
        )
    )
    ids = template.render(sample, []).input_ids.tolist()
    assert ids.count(template.encoder.control["<|im_end|>"]) == 2
    assert "user\n<|im_end|><|im_end|><|im_end|><|im_end|>\n" in template.encoder.decode(ids)


def test_a_text_of_all_stand_ins_is_refused_and_one_of_some_is_not(tmp_path: Path) -> None:
    template = made(tmp_path, CHATML)
    braille = "".join(map(chr, range(0x2800, 0x2900)))
    said = text_of(template, chat(answer=f"<b>{braille}"))
    assert said.endswith(f"<b>{braille}<|im_end|>\n")
    hexagrams = "".join(map(chr, range(0x4DC0, 0x4E00)))
    assert refusal(template, chat(answer=f"<b>{braille}{hexagrams}")).reason is Reason.ENCODING_ERROR


@pytest.mark.parametrize("template", ["chatml", "chat_template"])
def test_allowed_tokens_of_the_data_are_themselves_and_others_are_counted(tmp_path: Path, template: str) -> None:
    path = folder(tmp_path, {"chat_template.jinja": CHATML}, "<|box|>", "<|other|>")
    sample = chat(answer="a<|box|>(1,2)<|other|><|im_end|>")
    plain, allowing = (load(path, template=template, allow_tokens=names) for names in ([], ["<|box|>"]))
    box = Tokenizer.from_file(f"{path}/tokenizer.json").token_to_id("<|box|>")
    without, with_box = plain.render(sample, []), allowing.render(sample, [])
    assert without.input_ids.tolist().count(box) == 0
    assert with_box.input_ids.tolist().count(box) == with_box.labels.tolist().count(box) == 1
    assert (without.num_disarmed, with_box.num_disarmed) == (3, 2)
    assert text_of(plain, sample) == text_of(allowing, sample)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            {"allow_tokens": ["<|im_end|>"], "template": "chatml"},
            "text.allow_tokens: <|im_end|> is a control token of the template",
        ),
        ({"allow_tokens": ["<|audio_pad|>"], "template": "chatml"}, "<|audio_pad|> is a control token of the template"),
        ({"allow_tokens": ["<|absent|>"], "template": "chatml"}, "lacks the allowed token <|absent|>"),
        ({"allow_tokens": ["<|absent|>"]}, "lacks the allowed token <|absent|>"),
        ({"allow_tokens": [SPARE], "image_token": SPARE}, "is a control token of the template"),
        ({"image_token": "<|absent|>"}, "lacks the control token <|absent|>"),
        ({"image_token": SPARE}, "for a part of type image the chat template writes nothing, not <|spare|>"),
    ],
)
def test_tokens_that_a_job_names_are_there_and_have_no_other_meaning(tmp_path: Path, spec: dict[str, Any], sentence: str) -> None:
    path = folder(tmp_path, {"chat_template.jinja": CHATML})
    with pytest.raises(SpecError) as caught:
        load(path, **spec)
    assert sentence in str(caught.value)


SHOWN = CHATML.replace(
    "{{ m.content }}",
    "{% for p in m.content %}{{ p.text if p.type == 'text' else '<|vision_start|>" + SPARE + "<|vision_end|>' }}{% endfor %}",
)


def test_a_placeholder_that_nobody_knows_is_named_by_the_job(tmp_path: Path) -> None:
    picture = chat(Image(data=b""))
    unknown = made(tmp_path, SHOWN)
    assert unknown.vocabulary.image_token == NO_TOKEN
    with pytest.raises(BadSampleError, match=r"name it in text\.image_token") as caught:
        unknown.render(picture, [2])
    assert caught.value.reason is Reason.UNSUPPORTED_MEDIA
    template = load(tmp_path, image_token=SPARE)
    assert f"user\n<|vision_start|>{SPARE}{SPARE}<|vision_end|><|im_end|>" in text_of(template, picture, 2)
    assert SPARE in text_of(template, chat(SPARE)), "which is text there"
    assert template.render(chat(SPARE), []).input_ids.tolist().count(template.vocabulary.image_token) == 0


def test_a_template_that_leaves_media_out_is_refused(tmp_path: Path) -> None:
    first = SHOWN.replace("in m.content %}", "in m.content[:2] %}").replace(SPARE, "<|image_pad|>")
    template = made(tmp_path, first)
    turns = chat(Image(data=b"")).turns
    three = (Turn(role=Role.USER, segments=(Image(data=b""),) * 3), turns[1])
    with pytest.raises(BadSampleError, match="writes 2 placeholders for 3 parts of type image") as caught:
        template.render(Sample(turns=three), [1, 1, 1])
    assert caught.value.reason is Reason.PLACEHOLDER_MISMATCH


def test_an_answer_is_learnt_with_its_end_and_no_blank_behind_it(tmp_path: Path) -> None:
    sequence = made(tmp_path, CHATML).render(chat(), [])
    template = load(tmp_path)
    assert template.encoder.decode(sequence.labels[sequence.labels != LABEL_IGNORED].tolist()) == "yes<|im_end|>"


def test_a_job_makes_its_samples_by_the_template(tmp_path: Path) -> None:
    """Through the whole preprocessing: a picture has as many placeholders as merged patches."""
    path = folder(tmp_path, {"chat_template.jinja": SHOWN.replace(SPARE, "<|image_pad|>")})
    text = {"tokenizer": f"{path}/tokenizer.json", "template": "chat_template"}
    spec = parse(JobSpec, {"name": "j", "sources": [{"path": "x"}], "text": text}, "job spec")
    picture = io.BytesIO()
    Picture.new("RGB", (280, 140)).save(picture, "PNG")
    messages = [{"role": "user", "content": "<image>Hm?"}, {"role": "assistant", "content": "A hen."}]
    record = Record(key="k", fields={"messages": messages, "image": picture.getvalue()}, load=str.encode)
    processor = SampleProcessor(spec)
    row = processor.decode(record, spec.sources[0])
    assert row.image_grids.tolist() == [[1, 10, 20]]
    assert row.input_ids.tolist().count(processor.vocabulary.image_token) == 50


def test_the_work_for_marked_answers_grows_as_their_number(tmp_path: Path) -> None:
    marked = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    template = made(tmp_path, marked)
    turns = chat().turns

    def events(num_turns: int) -> int:
        counted = 0

        def count(*_: Any) -> None:
            nonlocal counted
            counted += 1

        sample = Sample(turns=turns * num_turns)
        sys.setprofile(count)
        try:
            template.render(sample, [])
        finally:
            sys.setprofile(None)
        return counted

    assert events(200) < 3 * events(100)
