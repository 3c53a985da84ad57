"""Which medium stands at which place of a text.

Placeholders and typed parts take the record's media in order, or by their index, and a part that holds or names its own medium
takes that. Where a text has no placeholder at all, its media stand in front, as all trainers of such data put them there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from headrace.mapping import MappingSpec
from headrace.preprocessor.records.draft import MediaKind, Place
from headrace.preprocessor.records.media_lists import Listed
from headrace.preprocessor.records.medium import Medium
from headrace.preprocessor.records.shapes import Parsed
from headrace.preprocessor.records.turn import Role, Text
from headrace.quarantine import BadSampleError, Reason

_LIKE_A_PLACE = re.compile(
    r"[<\[][\w |/:-]{0,16}?(?:image|img|picture|photo|vision|video|audio|speech|media)[\w |.:#-]{0,24}[>\]]", re.IGNORECASE
)
"""What another trainer may have written in the place of a medium, such as `<img>`, `<image_1>` and `[IMG]`."""


def put_in_front(parsed: Parsed, listed: Mapping[MediaKind, Listed], spec: MappingSpec) -> None:
    """Give the media places in front of the first turn of a user, or of a caption, if the text has none for any medium.

    Raises BadSampleError with placeholder_mismatch if something in a conversation looks like a place for one.
    """
    if not parsed.may_lead or any(next(parsed.places(kind), None) for kind in MediaKind):
        return
    kinds = [kind for kind, found in listed.items() for _ in found.whole]
    first = next((turn for turn in parsed.turns if turn.role in (Role.USER, Role.DOCUMENT)), None)
    if not kinds or first is None:
        return
    if first.role is Role.USER:
        _check_no_other_place(parsed, len(kinds), spec)
    first.pieces[:0] = [Place(kind=kind) for kind in kinds]


def _check_no_other_place(parsed: Parsed, num_media: int, spec: MappingSpec) -> None:
    texts = (
        piece.text for turn in parsed.turns if turn.role is not Role.ASSISTANT for piece in turn.pieces if isinstance(piece, Text)
    )
    for text in texts:
        like = [match[0] for match in _LIKE_A_PLACE.finditer(text)]
        like += [name for name in (spec.image_placeholder, spec.audio_placeholder) if name in text]
        if other := next((name for name in like if name not in spec.ignore), None):
            raise BadSampleError(
                Reason.PLACEHOLDER_MISMATCH,
                f"0 placeholders for {num_media} media, and {other} in the text may be one: name it as the mapping's "
                "image_placeholder or audio_placeholder, or list it under its ignore where it is text",
            )


def arrange(kind: MediaKind, parsed: Parsed, listed: Listed) -> Iterator[Medium]:
    """Return the media of one kind in the order of their places.

    Raises BadSampleError with placeholder_mismatch if places and media do not match, missing_media if the list is null.
    """
    places = list(parsed.places(kind))
    own = [place.medium for place in places if place.medium is not None]
    if own:
        _check_own(kind, own, len(places), listed)
        return iter(own)
    if listed.media is None and places:
        raise BadSampleError(Reason.MISSING_MEDIA, f"{len(places)} {kind} placeholders, and null in the place of media")
    media = listed.whole
    indices = [place.index for place in places if place.index is not None]
    if not indices:
        if len(media) != len(places):
            raise BadSampleError(Reason.PLACEHOLDER_MISMATCH, f"{len(places)} {kind} placeholders for {len(media)} media")
        return iter(media)
    if len(indices) < len(places) or set(indices) != set(range(len(media))):
        raise BadSampleError(
            Reason.PLACEHOLDER_MISMATCH,
            f"{len(places)} {kind} parts with the indices {indices} for {len(media)} media: each part needs one, from "
            "0 on, and each medium a part",
        )
    return (media[index] for index in indices)


def _check_own(kind: MediaKind, own: list[Medium], num_places: int, listed: Listed) -> None:
    if len(own) < num_places:
        raise BadSampleError(
            Reason.PLACEHOLDER_MISMATCH,
            f"{len(own)} of {num_places} places for an {kind} say which one it is: all must, or none",
        )
    if listed.media and list(listed.whole) != own:
        raise BadSampleError(
            Reason.PLACEHOLDER_MISMATCH,
            f"{listed.path} lists other media than the text's own: list {listed.field!r} under the mapping's ignore, or take "
            "the parts' own out",
        )
