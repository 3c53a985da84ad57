"""Renders samples by the chat template that lies beside a tokenizer, with the tokens that `transformers` gives.

    sample -> messages -> text of the template -> control tokens, media and words -> token ids and labels

Only control tokens that the template itself has written are control tokens (disguise). What is learnt is what the template marks
with `{% generation %}`, else what an answer adds to its prompt (learnt_spans).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from headrace.errors import SpecError
from headrace.manifest import Vocabulary
from headrace.preprocessor.records.draft import MediaKind
from headrace.preprocessor.records.record_to_sample import Audio, Image, Role, Sample, Text, Turn
from headrace.preprocessor.records.template_fields import THOUGHT_FIELDS, no_place
from headrace.preprocessor.text import TextEncoder, load_encoder
from headrace.preprocessor.text.disguise import Disguises
from headrace.preprocessor.text.jinja_environment import JinjaTemplate, Rendering, Steps, TodayUnknownError
from headrace.preprocessor.text.learnt_spans import Span, common_spans, derived_spans
from headrace.preprocessor.text.media_markup import Markup, MediumTokens
from headrace.preprocessor.text.placeholders import TOKENS, Placeholder, find_placeholder
from headrace.preprocessor.text.sequence import NO_TOKEN, PromptTemplate, SequenceBuilder, TokenSequence, count_disarmed
from headrace.preprocessor.text.tokenizer_folder import TokenizerFolder, read_folder
from headrace.quarantine import BadSampleError, Reason
from headrace.text_spec import TextSpec

_NOTED = ("tool_calls", *THOUGHT_FIELDS)
"""Fields of a message that must not get lost: a template that asks for none of their names refuses the sample."""
_CUT_TOKENS = 1 << 18
"""Tokens that a conversation may at least have where it is cut: a template writes it whole first, which is bounded."""
_QUESTION, _ANSWER = "headrace asks", "headrace answers"


def load_tokenizer_template(spec: TextSpec) -> TokenizerTemplate:
    """Load the tokenizer that a spec names and the chat template beside it. Raises SpecError if they do not fit each other."""
    folder = read_folder(spec.tokenizer)
    named = tuple(token for token in (spec.image_token, spec.audio_token) if token)
    known = (*folder.named_tokens.values(), *(token for tokens in TOKENS.values() for token in tokens))
    optional = tuple(dict.fromkeys(token for token in known if token not in (*named, *spec.allow_tokens)))
    encoder = load_encoder(spec.tokenizer, named, optional, spec.allow_tokens, every_special=True)
    return TokenizerTemplate(encoder, folder, spec)


class TokenizerTemplate(PromptTemplate):
    """Renders samples with a tokenizer's own chat template. Stateless and thread-safe."""

    def __init__(self, encoder: TextEncoder, folder: TokenizerFolder, spec: TextSpec) -> None:
        """`encoder` must have all special tokens of the tokenizer as control tokens.

        Raises SpecError if the template is no Jinja, asks for a date that `spec` does not name, or does not write the
        placeholders that it names.
        """
        self.encoder = encoder
        self._max_tokens, self._too_long = spec.max_tokens, spec.too_long
        self._named_tokens = folder.named_tokens
        variables = {**folder.named_tokens, **spec.chat_template_kwargs}
        most_tokens = spec.max_tokens if spec.too_long == "refuse" else max(spec.max_tokens, _CUT_TOKENS)
        max_characters = most_tokens * encoder.longest
        self._template = JinjaTemplate(folder.template, variables, spec.today, max_characters)
        self._tool_template = JinjaTemplate(folder.tool_template, variables, spec.today, max_characters)
        self._control = _control_pattern(encoder)
        tags = {*encoder.added_tokens, *self._template.constants, *self._tool_template.constants} - encoder.control.keys()
        self._disguises = Disguises(encoder.control, tags)
        self._takes_strings, self._takes_parts = self._understood()
        self._placeholders = {
            kind: find_placeholder(kind, self._try_parts, encoder, named)
            for kind, named in ((MediaKind.IMAGE, spec.image_token), (MediaKind.AUDIO, spec.audio_token))
        }
        image, audio = (
            encoder.control[placeholder.markup.token] if placeholder else NO_TOKEN for placeholder in self._placeholders.values()
        )
        self.vocabulary = Vocabulary(size=encoder.vocab_size, image_token=image, audio_token=audio)
        begin = folder.named_tokens.get("bos_token", "")
        self._begins_with_bos = begin in encoder.control and (self._try(_QUESTION) or "").startswith(begin)

    def render(self, sample: Sample, media_tokens: Sequence[MediumTokens]) -> TokenSequence:
        """Render a sample to token ids and labels; `media_tokens` are the tokens of each medium, in order.

        Raises BadSampleError with too_long, encoding_error, unsupported_media (a medium for which the template has no known
        placeholder), placeholder_mismatch (the template leaves some out) or schema_error (the template refuses the conversation,
        has no place for what is in it, or does not tell what is learnt).
        """
        media = {kind: _Media(kind, placeholder) for kind, placeholder in self._placeholders.items()}
        for medium, tokens in zip((item for item in sample.segments if not isinstance(item, Text)), media_tokens, strict=True):
            media[_kind(medium)].expect(tokens)
        builder = SequenceBuilder(self.encoder, self._max_tokens, self._too_long)
        if any(isinstance(segment, Text) and not segment.learnt for segment in sample.segments):
            raise BadSampleError(
                Reason.SCHEMA_ERROR,
                "a chat template does not tell where thoughts end: set the mapping's thinking to keep or drop",
            )
        if sample.turns[0].role is Role.DOCUMENT:
            self._add_document(builder, sample.turns[0], media)
        else:
            self._add_conversation(builder, sample, media)
        for kind in media.values():
            kind.check_all_there()
        return builder.finish(num_disarmed=count_disarmed(sample, self.encoder))

    def _add_document(self, builder: SequenceBuilder, turn: Turn, media: Mapping[MediaKind, _Media]) -> None:
        """Add a caption or document: no template knows these, so it is its text between the tokens of beginning and end."""
        begin, end = (self._named_tokens.get(name, "") for name in ("bos_token", "eos_token"))
        if end not in self.encoder.control:
            raise BadSampleError(Reason.SCHEMA_ERROR, "a document ends with the eos_token, and tokenizer_config.json names none")
        if self._begins_with_bos:
            builder.begin([self.encoder.control[begin]])
        for segment in turn.segments:
            if isinstance(segment, Text):
                builder.add([segment.text], loss=turn.loss)
            else:
                head, tail = media[_kind(segment)].around
                builder.add(self._pieces(head), loss=False)
                self._add_medium(builder, media[_kind(segment)])
                builder.add(self._pieces(tail), loss=False)
        builder.add_control(self.encoder.control[end], loss=turn.loss)

    def _add_conversation(self, builder: SequenceBuilder, sample: Sample, media: Mapping[MediaKind, _Media]) -> None:
        text, worn, spans = self._rendered(sample)
        written = {kind.written: kind for kind in media.values()}
        place, left = 0, deque(span for span in spans if span.start < span.stop)
        for match in self._control.finditer(worn):
            start, stop = self._widened(worn, match, place)
            _add_words(builder, text, (place, start), left)
            if match[0] in written:
                self._add_medium(builder, written[match[0]])
            else:
                builder.add_control(self.encoder.control[match[0]], loss=left[0].weight if left and left[0].start < stop else 0.0)
            place = stop
        _add_words(builder, text, (place, len(text)), left)

    def _add_medium(self, builder: SequenceBuilder, media: _Media) -> None:
        markup, tokens = media.next()
        opening, closing = ({piece for piece in self._pieces(text) if isinstance(piece, int)} for text in media.around)
        with builder.medium(media.kind, opening, closing):
            for piece in markup.pieces(tokens):
                if isinstance(piece, int):
                    builder.add_control(self.encoder.control[markup.token], count=piece, loss=False)
                else:
                    builder.add(self._pieces(piece), loss=False)

    def _rendered(self, sample: Sample) -> tuple[str, str, list[_Learnt]]:
        """Return the text of a conversation, the same in disguise, in which all control tokens are the template's, and what is
        learnt of it."""
        template = self._tool_template if sample.tools else self._template
        _check_noted(sample, template)
        messages, tools = [self._message(turn) for turn in sample.turns], list(sample.tools) or None
        disguise = self._disguises.disguise_of([messages, tools], num_marks=2)
        begin, end = disguise.marks
        run = partial(template.render, steps=Steps(), marks=(begin, end))
        plain = worn = run(messages, tools)
        if disguise.needed:
            messages, tools = disguise.put_on(messages), disguise.put_on(tools)
            worn = run(messages, tools)
            if Rendering(disguise.take_off(worn.text), worn.generated) != plain:
                raise BadSampleError(
                    Reason.SCHEMA_ERROR,
                    "the chat template reads control tokens or their characters in the text, which are no control tokens there: "
                    "take them out of it, or name those that data may write in text.allow_tokens",
                )
        if template.has_generation and all(turn.loss == 1 for turn in sample.turns if turn.role is Role.ASSISTANT):
            return plain.text, worn.text, [_Learnt(*span) for span in worn.generated]

        def first_turns(num_turns: int, *, add_generation_prompt: bool = False) -> str:
            return run(messages[:num_turns], tools, add_generation_prompt=add_generation_prompt).text

        answers = [index for index, turn in enumerate(sample.turns) if turn.loss]
        spans = derived_spans(worn.text, answers, len(messages), self._control, first_turns)
        of_answers = [common_spans([span], worn.generated) if template.has_generation else [span] for span in spans]
        weights = [sample.turns[index].loss for index in answers]
        learnt = [_Learnt(*span, weight) for found, weight in zip(of_answers, weights, strict=True) for span in found]
        return plain.text, worn.text, learnt

    def _message(self, turn: Turn) -> dict[str, Any]:
        """Return a turn as the message that a template gets; thoughts have the names that `transformers` gives them, too."""
        texts = [segment.text for segment in turn.segments if isinstance(segment, Text)]
        one_text = len(turn.segments) == len(texts) and (len(texts) < 2 or turn.role is Role.ASSISTANT)
        if self._takes_parts and not (self._takes_strings and one_text):
            content: Any = [_part(segment) for segment in turn.segments or [Text(text="")]]
        else:
            content = "".join(texts)
        message = {"role": str(turn.role), "content": content, **turn.extra}
        thought = next((turn.extra[name] for name in THOUGHT_FIELDS if turn.extra.get(name) is not None), None)
        return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}

    def _understood(self) -> tuple[bool, bool]:
        """Return whether the template takes texts as strings, and whether as lists of parts. Raises SpecError."""
        parts = self._try([{"type": "text", "text": _QUESTION}])
        strings = self._try(_QUESTION)
        takes_parts = parts is not None and _QUESTION in parts and "'type'" not in parts
        return (strings is not None and _QUESTION in strings) or not takes_parts, takes_parts

    def _try_parts(self, content: list[dict[str, object]]) -> str | None:
        return self._try(content) if self._takes_parts else None

    def _try(self, content: Any) -> str | None:
        """Return how the template renders a question and its answer; None if it refuses them. Raises SpecError."""
        answers = [[{"type": "text", "text": _ANSWER}], _ANSWER] if isinstance(content, list) else [_ANSWER]
        for answer in answers:  # some take parts from a user, and a text from the assistant
            messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
            try:
                return self._template.render(messages, None, Steps()).text
            except TodayUnknownError as err:
                raise SpecError(err.detail) from err
            except BadSampleError:
                continue
        return None

    def _widened(self, text: str, match: re.Match[str], place: int) -> Span:
        """Return the characters that a control token takes, some of which swallow the white space beside them."""
        start, stop = match.span()
        token = self.encoder.added_tokens.get(match[0])
        if token is not None and token.lstrip:
            start = place + len(text[place:start].rstrip())
        if token is not None and token.rstrip:
            stop = len(text) - len(text[stop:].lstrip())
        return start, stop

    def _pieces(self, markup: str) -> list[str | int]:
        """Cut markup into text and control ids."""
        control = self.encoder.control
        return [control.get(piece, piece) for piece in re.split(f"({self._control.pattern})", markup) if piece]


class _Media:
    """The media of one kind in a sample: their placeholder, and the tokens of those that are still to come."""

    def __init__(self, kind: MediaKind, placeholder: Placeholder | None) -> None:
        self.kind = kind
        self._placeholder = placeholder
        self._tokens: list[MediumTokens] = []
        self._num_written = 0
        self.written = placeholder.written if placeholder else ""
        self.around = (placeholder.head, placeholder.tail) if placeholder else ("", "")

    def expect(self, tokens: MediumTokens) -> None:
        """Say that one more medium has these tokens. Raises BadSampleError (unsupported_media) if none has a placeholder."""
        if self._placeholder is None:
            raise BadSampleError(
                Reason.UNSUPPORTED_MEDIA,
                f"the chat template has no known placeholder for a part of type {self.kind}; name it in text.{self.kind}_token",
            )
        self._tokens.append(tokens)

    def next(self) -> tuple[Markup, MediumTokens]:
        """Return markup and tokens of the next medium. Raises BadSampleError if there is none any more."""
        if self._placeholder is None or self._num_written == len(self._tokens):
            raise BadSampleError(
                Reason.PLACEHOLDER_MISMATCH,
                f"the chat template writes more than {len(self._tokens)} placeholders: {self.written}",
            )
        self._num_written += 1
        return self._placeholder.markup, self._tokens[self._num_written - 1]

    def check_all_there(self) -> None:
        """Raise BadSampleError (placeholder_mismatch) if the template has left out a medium."""
        if self._num_written < len(self._tokens):
            raise BadSampleError(
                Reason.PLACEHOLDER_MISMATCH,
                f"the chat template writes {self._num_written} placeholders for {len(self._tokens)} parts of type {self.kind}",
            )


class _Learnt(NamedTuple):
    """Characters [start, stop) of a text that are learnt, and by how much their loss counts."""

    start: int
    stop: int
    weight: float = 1.0


def _add_words(builder: SequenceBuilder, text: str, words: Span, spans: deque[_Learnt]) -> None:
    """Add the characters `words` of a text, learnt where they are in `spans`, which are in order; take those out that end there.

    So each span is looked at once, where its words are, however many there are.
    """
    place, stop = words
    while spans and spans[0].start < stop:
        begin, end = max(spans[0].start, place), min(spans[0].stop, stop)
        if begin < end:
            builder.add([text[place:begin]], loss=False)
            builder.add([text[begin:end]], loss=spans[0].weight)
            place = end
        if spans[0].stop > stop:
            break
        spans.popleft()
    builder.add([text[place:stop]], loss=False)


def _check_noted(sample: Sample, template: JinjaTemplate) -> None:
    """Raise BadSampleError (schema_error) if a template does not ask for something that a sample has beside its words."""
    if sample.tools and "tools" not in template.constants:
        raise no_place("tools", "tools")
    for index, turn in enumerate(sample.turns):
        for name in _NOTED:
            names = THOUGHT_FIELDS if name in THOUGHT_FIELDS else (name,)
            if turn.extra.get(name) is not None and template.constants.isdisjoint(names):
                raise no_place(f"turn {index}: {name}", name)


def _part(segment: Text | Image | Audio) -> dict[str, str]:
    return {"type": "text", "text": segment.text} if isinstance(segment, Text) else {"type": _kind(segment)}


def _kind(medium: Image | Audio) -> MediaKind:
    return MediaKind.IMAGE if isinstance(medium, Image) else MediaKind.AUDIO


def _control_pattern(encoder: TextEncoder) -> re.Pattern[str]:
    """Return what finds control tokens in a rendered text, the longest of those that begin at one place."""
    names = sorted(encoder.control, key=len, reverse=True)
    single = {name for name in names if name in encoder.added_tokens and encoder.added_tokens[name].single_word}
    return re.compile("|".join(rf"(?<!\w){re.escape(n)}(?!\w)" if n in single else re.escape(n) for n in names) or "(?!)")
