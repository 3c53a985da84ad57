"""Turns whose media are places: what the text of a record becomes before its media are found."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from headrace.mapping import MappingSpec
from headrace.preprocessor.records import unused_media
from headrace.preprocessor.records.medium import Medium
from headrace.preprocessor.records.template_fields import NAME
from headrace.preprocessor.records.turn import Role, Text


class MediaKind(StrEnum):
    """The kind of a medium."""

    IMAGE = "image"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a medium in a turn's text."""

    kind: MediaKind
    index: int | None = None
    """Index in the record's list of media of that kind; None means the next one."""
    medium: Medium | None = None
    """The medium itself where the text holds or names it, instead of the record's list."""


Piece = Text | Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A turn whose media are places, not yet loaded."""

    role: Role
    pieces: list[Piece]
    learnt: bool = True
    """Whether the turn is learnt, if its role is one whose words are learnt at all."""
    weight: float = 1.0
    """By how much the loss of its tokens counts if it is."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the turn's message for a template, such as `tool_calls` and `reasoning_content`."""

    @property
    def empty(self) -> bool:
        """Whether the turn has no medium, no text except white space and what is masked, and no field beside them that counts."""
        return not self.extra.keys() - {NAME} and not any(
            isinstance(piece, Place) or (piece.learnt and piece.text.strip()) for piece in self.pieces
        )


def split(text: str, spec: MappingSpec, *, learnt: bool = True) -> list[Piece]:
    """Cut text at its placeholders, without empty pieces. Raises BadSampleError for placeholders of other trainers."""
    unused_media.check_text(text, spec)
    places = {spec.image_placeholder: Place(kind=MediaKind.IMAGE), spec.audio_placeholder: Place(kind=MediaKind.AUDIO)}
    parts = re.split("(" + "|".join(map(re.escape, places)) + ")", text)
    return [places.get(part) or Text(text=part, learnt=learnt) for part in parts if part]
