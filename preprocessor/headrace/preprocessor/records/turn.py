"""What a sample is made of: turns, which are texts, images and recordings in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    """The speaker of a turn. A caption or document is one turn with the role DOCUMENT, which has no speaker."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    DOCUMENT = "document"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A piece of text, which may contain anything, control tokens' names included."""

    text: str
    learnt: bool = True
    """Whether the text is learnt if its turn is; thoughts can be masked, which are then read and not learnt."""
    goes_on: bool = False
    """Whether it goes on in the string of the text before it: a thought and what is said behind it are one string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The bytes of an image file."""

    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Audio:
    """The bytes of an audio file."""

    data: bytes
    part: tuple[float, float] | None = None
    """Where the part of it that is meant begins, and how long that is, in seconds; None: all of it."""


Segment = Text | Image | Audio


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one role says: text and media in order."""

    role: Role
    segments: tuple[Segment, ...]
    learnt: bool = True
    """Whether the turn is learnt, if its role is one whose words are learnt at all."""
    weight: float = 1.0
    """By how much the loss of its tokens counts if it is."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the turn's message for a template, such as `tool_calls` and `reasoning_content`."""

    @property
    def loss(self) -> float:
        """By how much the loss of this turn's text counts, but for masked pieces of it; 0: it is not learnt."""
        return self.weight if self.learnt and self.role in (Role.ASSISTANT, Role.DOCUMENT) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One or more turns; at least one of them carries loss."""

    turns: tuple[Turn, ...]
    tools: tuple[Any, ...] = ()
    """Tools that the assistant may call, as plain data; usually JSON schemas of functions."""

    @property
    def segments(self) -> Iterator[Segment]:
        """The segments of all turns in order."""
        return (segment for turn in self.turns for segment in turn.segments)

    def with_recordings(self, changed: Callable[[Audio], Audio]) -> Sample:
        """Return the sample with each recording as `changed` returns it."""
        if not any(isinstance(segment, Audio) for segment in self.segments):
            return self

        def change(segment: Segment) -> Segment:
            return changed(segment) if isinstance(segment, Audio) else segment

        return replace(self, turns=tuple(replace(turn, segments=tuple(map(change, turn.segments))) for turn in self.turns))

    def with_pieces(self, counts: Sequence[int]) -> Sample:
        """Return the sample with each recording in so many pieces, one after the other; each stands for the whole file."""
        if all(count == 1 for count in counts):
            return self
        count_of = iter(counts)

        def pieces(segment: Segment) -> tuple[Segment, ...]:
            return (segment,) * (next(count_of) if isinstance(segment, Audio) else 1)

        turns = (
            replace(turn, segments=tuple(piece for segment in turn.segments for piece in pieces(segment))) for turn in self.turns
        )
        return replace(self, turns=tuple(turns))
