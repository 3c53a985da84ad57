"""Renders the turns of a sample to token ids and labels, by a prompt template.

A turn is rendered as its frame's head, its content, and the frame's end and tail. Loss is on the words and the end of the turns
that are to be learnt; heads, tails and media never carry any. Text between two control tokens is tokenised in one piece, whether
it is from a turn or from a frame, as if the prompt had been written as one string; a token with both in it counts as words.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from headrace.errors import SpecError
from headrace.manifest import Vocabulary
from headrace.preprocessor.records.draft import MediaKind
from headrace.preprocessor.records.record_to_sample import Audio, Image, Role, Sample, Segment, Text, Turn
from headrace.preprocessor.records.template_fields import NAME, no_place
from headrace.preprocessor.text import TextEncoder, load_encoder
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
        self.vocabulary = Vocabulary(
            size=encoder.vocab_size,
            image_token=control.get(template.image_token, NO_TOKEN),
            audio_token=control.get(template.audio_token, NO_TOKEN),
        )
        self._control_names = re.compile("(" + "|".join(map(re.escape, template.control)) + ")")
        self._begin = self._pieces(template.begin)
        self._frames = {role: self._frame(frame) for role, frame in template.roles.items()}
        self._opening = self._frame(template.opening) if template.opening else self._frames[Role.SYSTEM]
        self._image, self._audio = self._pieces(template.image), self._pieces(template.audio)
        self._missing = [token for token in template.of_media if token not in control]

    def render(self, sample: Sample, media_tokens: list[int]) -> TokenSequence:
        """Render a sample to token ids and labels; `media_tokens` is the number of tokens of each medium, in order.

        Raises BadSampleError with too_long, encoding_error, unsupported_media (a recording that the template has no place for,
        a medium for which the tokenizer has no token) or schema_error (tools, thoughts or a system turn that the template has no
        place for).
        """
        _check_words_only(sample)
        builder = SequenceBuilder(self.encoder, self._max_tokens, self._too_long)
        builder.begin(self._begin)
        media = iter(media_tokens)
        for index, turn in enumerate(self._turns(sample)):
            frame = self._opening if index == 0 and turn.role is Role.SYSTEM else self._frames[turn.role]
            builder.add(frame.head, loss=False)
            for item in self._items(turn, trim=frame.trim):
                if isinstance(item, Text):
                    builder.add([item.text], loss=turn.loss and item.learnt)
                else:
                    self._add_medium(builder, item, next(media))
            builder.add(frame.end, loss=turn.loss)
            builder.add(frame.tail, loss=False)
        return builder.finish(num_disarmed=count_disarmed(sample, self.encoder))

    def _turns(self, sample: Sample) -> tuple[Turn, ...]:
        """Return the sample's turns, with the system turn that the template wants in front, or without one it does not take."""
        template, turns = self._template, sample.turns
        if template.system is None or turns[0].role is Role.DOCUMENT:
            return turns
        given = turns[0].role is Role.SYSTEM
        if not template.system_beside_images and any(isinstance(segment, Image) for segment in sample.segments):
            if given and any(not isinstance(segment, Text) or segment.text.strip() for segment in turns[0].segments):
                raise BadSampleError(Reason.SCHEMA_ERROR, "the template has no place for a system turn beside images")
            return turns[1:] if given else turns
        return turns if given else (Turn(role=Role.SYSTEM, segments=(Text(text=template.system),)), *turns)

    def _items(self, turn: Turn, *, trim: bool) -> list[Segment]:
        """Return the text and media of a turn in the order in which the template puts them."""
        gap = self._template.media_gap
        if gap is None or turn.role is Role.DOCUMENT:
            return _trimmed(_merged(turn.segments)) if trim else _merged(turn.segments)
        words = _merged([segment for segment in turn.segments if isinstance(segment, Text)], self._template.joint)
        media = (segment for segment in turn.segments if not isinstance(segment, Text))
        return [*(item for medium in media for item in (medium, Text(text=gap))), *(_trimmed(words) if trim else words)]

    def _add_medium(self, builder: SequenceBuilder, medium: Image | Audio, num_tokens: int) -> None:
        if isinstance(medium, Image):
            pieces, token, count = self._image, self.vocabulary.image_token, self._template.tokens_per_image or num_tokens
        elif self._audio:
            pieces, token, count = self._audio, self.vocabulary.audio_token, num_tokens
        else:
            raise BadSampleError(
                Reason.UNSUPPORTED_MEDIA, "the template has no place for a recording; name its placeholder in text.audio_token"
            )
        for piece in pieces:
            if piece in self._missing:
                raise BadSampleError(
                    Reason.UNSUPPORTED_MEDIA, f"{self.encoder.name} lacks the control token {piece}; add it to its added tokens"
                )
        with builder.medium(MediaKind.IMAGE if isinstance(medium, Image) else MediaKind.AUDIO):
            for piece in pieces:
                if piece == token:
                    builder.add_control(token, count=count, loss=False)
                else:
                    builder.add([piece], loss=False)

    def _frame(self, frame: Frame) -> _Frame:
        return _Frame(head=self._pieces(frame.head), end=self._pieces(frame.end), tail=self._pieces(frame.tail), trim=frame.trim)

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
    end: list[str | int]
    tail: list[str | int]
    trim: bool


def _merged(segments: Iterable[Segment], joint: str = "") -> list[Segment]:
    """Return text and media in their own order, with neighbouring texts that are learnt alike joined by `joint`."""
    merged: list[Segment] = []
    for learnt, group in groupby(segments, key=lambda segment: segment.learnt if isinstance(segment, Text) else None):
        if learnt is None:
            merged += group
        else:
            merged.append(Text(text=joint.join(text.text for text in group if isinstance(text, Text)), learnt=learnt))
    return merged


def _trimmed(items: list[Segment]) -> list[Segment]:
    """Strip white space from both ends of a turn, where media do not count as white space."""
    for index, strip in ((0, str.lstrip), (-1, str.rstrip)):
        if items and isinstance(end := items[index], Text):
            items[index] = dataclasses.replace(end, text=strip(end.text))
    return items
