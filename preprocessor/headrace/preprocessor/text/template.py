"""Renders the turns of a sample to token ids and labels, by a prompt template.

A turn is rendered as its frame's head, its content, and the frame's end and tail. Loss is on the words and the end of the turns
that are to be learnt; heads, tails and media never carry any. Text between two control tokens is tokenised in one piece, whether
it is from a turn or from a frame, as if the prompt had been written as one string; a token with both in it counts as words.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from headrace.errors import SpecError
from headrace.manifest import Vocabulary
from headrace.preprocessor.records.draft import MediaKind
from headrace.preprocessor.records.record_to_sample import Audio, Image, Role, Sample, Segment, Text, Turn
from headrace.preprocessor.records.template_fields import NAME, no_place
from headrace.preprocessor.text import TextEncoder, load_encoder
from headrace.preprocessor.text.media_markup import MediumTokens
from headrace.preprocessor.text.sequence import NO_TOKEN, PromptTemplate, SequenceBuilder, TokenSequence, count_disarmed
from headrace.preprocessor.text.templates import TEMPLATES, Frame, Template
from headrace.preprocessor.text.tokenizer_template import load_tokenizer_template
from headrace.quarantine import BadSampleError, Reason
from headrace.text_spec import TextSpec, TooLong


def load_template(spec: TextSpec) -> PromptTemplate:
    """Load the prompt template and the tokenizer that a spec names. Raises SpecError if they do not fit each other."""
    if spec.template == "chat_template":
        return load_tokenizer_template(spec)
    template = TEMPLATES[spec.template].with_tokens(spec.image_token, spec.audio_token)
    encoder = load_encoder(spec.tokenizer, template.required, template.of_media, spec.allow_tokens)
    for kind, token in (("image", spec.image_token), ("audio", spec.audio_token)):
        if token and token not in encoder.control:
            raise SpecError(f"text.{kind}_token: {encoder.name} lacks the control token {token}; add it to its added tokens")
    return ChatTemplate(encoder, spec.max_tokens, template, spec.too_long)


class ChatTemplate(PromptTemplate):
    """Renders samples with one prompt template and one tokenizer. Stateless and thread-safe."""

    def __init__(
        self,
        encoder: TextEncoder,
        max_tokens: int,
        template: Template = TEMPLATES["chatml"],
        too_long: TooLong = "refuse",
    ) -> None:
        """`encoder` must know the template's control tokens; `too_long`: what becomes of a sequence of more than `max_tokens`.

        Those around media may be missing, as long as there are no such media.
        """
        self.encoder = encoder
        self._max_tokens = max_tokens
        self._too_long = too_long
        self._template = template
        control = encoder.control
        image, audio = (
            control.get(markup.token, NO_TOKEN) if markup is not None else NO_TOKEN for markup in (template.image, template.audio)
        )
        self.vocabulary = Vocabulary(size=encoder.vocab_size, image_token=image, audio_token=audio)
        self._control_names = re.compile("(" + "|".join(map(re.escape, template.control)) + ")")
        self._begin = self._pieces(template.begin)
        self._frames = {role: self._frame(frame) for role, frame in template.roles.items()}
        self._opening = self._frame(template.opening) if template.opening else self._frames.get(Role.SYSTEM)
        self._missing = [token for token in template.of_media if token not in control]

    def render(self, sample: Sample, media_tokens: Sequence[MediumTokens]) -> TokenSequence:
        """Render a sample to token ids and labels; `media_tokens` are the tokens of each medium, in order.

        Raises BadSampleError with too_long, encoding_error, unsupported_media (a medium that the template has no place for, or
        the tokenizer no token) or schema_error (tools, thoughts or a turn that the template has no place for).
        """
        _check_words_only(sample)
        builder = SequenceBuilder(self.encoder, self._max_tokens, self._too_long)
        builder.begin(self._begin)
        media, numbers, beginning = iter(media_tokens), Counter[type](), self._beginning(sample)
        for index, turn in enumerate(self._turns(sample)):
            opening = self._opening if index == 0 and turn.role is Role.SYSTEM else None
            frame = opening or self._frames[turn.role]
            items = self._items(turn, frame)
            is_medium_first = bool(items) and not isinstance(items[0], Text)
            builder.add(frame.head_before_media if is_medium_first else frame.head, loss=False)
            builder.add([beginning] * (index == 0), loss=False)
            for item in items:
                if isinstance(item, Text):
                    builder.add([item.text], loss=turn.loss if item.learnt else 0.0)
                else:
                    numbers[type(item)] += 1
                    self._add_medium(builder, item, next(media), numbers[type(item)])
            builder.add(frame.end, loss=turn.loss)
            builder.add(frame.tail, loss=False)
        return builder.finish(num_disarmed=count_disarmed(sample, self.encoder))

    def _turns(self, sample: Sample) -> tuple[Turn, ...]:
        """Return the sample's turns, with the system turn that the template wants in front, or without one it does not take."""
        template, turns = self._template, sample.turns
        if turns[0].role is Role.DOCUMENT:
            return turns
        if template.system_joint is not None and turns[0].role is Role.SYSTEM:
            turns = turns[1:]
        for index, turn in enumerate(turns):
            if turn.role not in template.roles:
                raise BadSampleError(Reason.SCHEMA_ERROR, f"turn {index}: the template has no place for the role {turn.role}")
            if template.alternate and (turn.role is Role.USER) != (index % 2 == 0):
                raise BadSampleError(Reason.SCHEMA_ERROR, f"turn {index}: in the template a user and the assistant alternate")
        if template.system is None:
            return turns
        given = turns[0].role is Role.SYSTEM
        if not template.system_beside_images and any(isinstance(segment, Image) for segment in sample.segments):
            if given and any(not isinstance(segment, Text) or segment.text.strip() for segment in turns[0].segments):
                raise BadSampleError(Reason.SCHEMA_ERROR, "the template has no place for a system turn beside images")
            return turns[1:] if given else turns
        return turns if given else (Turn(role=Role.SYSTEM, segments=(Text(text=template.system),)), *turns)

    def _beginning(self, sample: Sample) -> str:
        """Return what a system turn puts in front of the first question's words, where it is no turn of its own."""
        first, joint = sample.turns[0], self._template.system_joint
        if joint is None or first.role is not Role.SYSTEM:
            return ""
        texts = [segment.text for segment in first.segments if isinstance(segment, Text)]
        if len(texts) < len(first.segments):
            raise BadSampleError(Reason.SCHEMA_ERROR, "turn 0: the template has no place for media in a system turn")
        return "".join(texts) + joint

    def _items(self, turn: Turn, frame: _Frame) -> list[Segment]:
        """Return the text and media of a turn in the order in which the template puts them."""
        gap, trim = self._template.media_gap, frame.trim
        if frame.trim_pieces:
            return _merged(item for string in _strings(turn.segments) for item in _trimmed(string))
        if gap is None or turn.role is Role.DOCUMENT:
            return _trimmed(_merged(turn.segments)) if trim else _merged(turn.segments)
        words = _merged(_joined(turn.segments, self._template.joint))
        media = (segment for segment in turn.segments if not isinstance(segment, Text))
        return [*(item for medium in media for item in (medium, Text(text=gap))), *(_trimmed(words) if trim else words)]

    def _add_medium(self, builder: SequenceBuilder, medium: Image | Audio, tokens: MediumTokens, number: int) -> None:
        """Add a medium, the `number`-th of its kind in the sample."""
        kind, what = ("image", "an image") if isinstance(medium, Image) else ("audio", "a recording")
        markup = self._template.image if isinstance(medium, Image) else self._template.audio
        if markup is None:
            detail = f"the template has no place for {what}; name its placeholder in text.{kind}_token"
            raise BadSampleError(Reason.UNSUPPORTED_MEDIA, detail)
        if isinstance(medium, Image) and self._template.tokens_per_image:
            tokens = self._template.tokens_per_image
        with builder.medium(MediaKind.IMAGE if isinstance(medium, Image) else MediaKind.AUDIO):
            for piece in markup.pieces(tokens, number):
                if isinstance(piece, int):
                    builder.add_control(self._control_id(markup.token), count=piece, loss=False)
                else:
                    builder.add(map(self._checked, self._pieces(piece)), loss=False)

    def _control_id(self, token: str) -> int:
        self._checked(token)
        return self.encoder.control[token]

    def _checked(self, piece: str | int) -> str | int:
        """Return a piece of the markup of media. Raises BadSampleError if it is a control token that the tokenizer lacks."""
        if piece in self._missing:
            detail = f"{self.encoder.name} lacks the control token {piece}; add it to its added tokens"
            raise BadSampleError(Reason.UNSUPPORTED_MEDIA, detail)
        return piece

    def _frame(self, frame: Frame) -> _Frame:
        head_before_media = frame.head if frame.head_before_media is None else frame.head_before_media
        return _Frame(
            head=self._pieces(frame.head),
            head_before_media=self._pieces(head_before_media),
            end=self._pieces(frame.end),
            tail=self._pieces(frame.tail),
            trim=frame.trim,
            trim_pieces=frame.trim_pieces,
        )

    def _pieces(self, markup: str) -> list[str | int]:
        """Cut markup into text and control ids."""
        control = self.encoder.control
        return [control.get(piece, piece) for piece in self._control_names.split(markup) if piece]


def _check_words_only(sample: Sample) -> None:
    """Raise BadSampleError (schema_error) if a sample has more than these templates have a place for: words and media."""
    if sample.tools:
        raise no_place("tools", "tools")
    for index, turn in enumerate(sample.turns):
        for name in turn.extra:
            if name != NAME:
                raise no_place(f"turn {index}: {name}", name)
        if turn.role is Role.TOOL:
            raise BadSampleError(
                Reason.SCHEMA_ERROR,
                f"turn {index} has the role 'tool', which has no place in this template: name it in the mapping's user_roles, or "
                "take the tokenizer's own template (text.template: chat_template)",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """A `Frame` whose markup is cut into text and control ids."""

    head: list[str | int]
    head_before_media: list[str | int]
    end: list[str | int]
    tail: list[str | int]
    trim: bool
    trim_pieces: bool


def _strings(segments: Iterable[Segment]) -> list[list[Segment]]:
    """Return text and media in their own order, the texts of one string together."""
    strings: list[list[Segment]] = []
    for segment in segments:
        if isinstance(segment, Text) and segment.goes_on and strings:
            strings[-1].append(segment)
        else:
            strings.append([segment])
    return strings


def _joined(segments: Iterable[Segment], joint: str) -> list[Text]:
    """Return the texts of a turn, with `joint` in front of each string but the first."""
    texts = [segment for segment in segments if isinstance(segment, Text)]
    return [
        dataclasses.replace(text, text=joint + text.text) if index and not text.goes_on else text
        for index, text in enumerate(texts)
    ]


def _merged(segments: Iterable[Segment]) -> list[Segment]:
    """Return text and media in their own order, with neighbouring texts that are learnt alike put together."""
    merged: list[Segment] = []
    for learnt, group in groupby(segments, key=lambda segment: segment.learnt if isinstance(segment, Text) else None):
        if learnt is None:
            merged += group
        else:
            merged.append(Text(text="".join(text.text for text in group if isinstance(text, Text)), learnt=learnt))
    return merged


def _trimmed(items: list[Segment]) -> list[Segment]:
    """Strip white space from both ends of a turn, where media do not count as white space."""
    for index, strip in ((0, str.lstrip), (-1, str.rstrip)):
        if items and isinstance(end := items[index], Text):
            items[index] = dataclasses.replace(end, text=strip(end.text))
    return items
