"""Documents: texts with media between them, without turns.

["some text", "<image>", "more text"]                               placeholders for the record's images and recordings
texts: ["some text", null, "more"], images: [null, "a.jpg", null]   OBELICS: one of both at each place
text_list: ["A sentence.", ...], image_info: [{"image_name": "a.jpg", "matched_text_index": 0}, ...]
                                                                    MMC4: images in front of the sentences that they match
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.mapping import MappingSpec
from headrace.preprocessor.records.draft import Draft, MediaKind, Piece, Place, split
from headrace.preprocessor.records.media_lists import Listed
from headrace.preprocessor.records.medium import medium_of
from headrace.preprocessor.records.record import schema_error
from headrace.preprocessor.records.turn import Role
from headrace.quarantine import BadSampleError, Reason

SENTENCES, MATCHES = "text_list", "image_info"
"""The fields of MMC4."""
_ENCODED, _NAME = "image_base64", "image_name"


def join(texts: list[str], spec: MappingSpec) -> Draft:
    """Return the document of these texts, with nothing between them. Raises BadSampleError."""
    return Draft(role=Role.DOCUMENT, pieces=[piece for text in texts for piece in split(text, spec)])


def alternate(field: str, texts: Sequence[str | None], listed: Listed | None, spec: MappingSpec) -> Draft:
    """Return the document in which each place has a text or an image, and null in the other list.

    Raises BadSampleError (schema_error) if the lists differ in length, or a place has none of both or both.
    """
    image_field, images = (listed.path, listed.media or ()) if listed else ("images", ())
    if len(images) != len(texts):
        raise BadSampleError(
            Reason.SCHEMA_ERROR, f"{field} and {image_field} have nulls in each other's place, so they must be of one length"
        )
    pieces: list[Piece] = []
    for index, (text, image) in enumerate(zip(texts, images, strict=True)):
        if (text is None) == (image is None):
            raise BadSampleError(
                Reason.SCHEMA_ERROR,
                f"{field}[{index}] and {image_field}[{index}] are {'both null' if text is None else 'both there'}: one of two "
                "belongs there",
            )
        if text is not None:
            pieces += split(text, spec)
        else:
            pieces.append(Place(kind=MediaKind.IMAGE, medium=image))
    return Draft(role=Role.DOCUMENT, pieces=pieces)


def match(fields: Mapping[str, Any], spec: MappingSpec) -> Draft:
    """Return the document of a row of MMC4: sentences with a blank between them, and each image in front of the one it matches.

    Raises BadSampleError (schema_error) if the row has another shape or an index is out of range.
    """
    sentences, matches = fields[SENTENCES], fields.get(MATCHES) or []
    if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
        raise schema_error(SENTENCES, "a list of strings", sentences)
    if not isinstance(matches, list):
        raise schema_error(MATCHES, "a list", matches)
    before: list[list[Piece]] = [[] for _ in sentences]
    for number, item in enumerate(matches):
        name = f"{MATCHES}[{number}]"
        index = item.get("matched_text_index") if isinstance(item, Mapping) else None
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(sentences):
            raise schema_error(f"{name}.matched_text_index", f"an index of {SENTENCES}", repr(index))
        if item.get(_ENCODED):
            medium = medium_of(f"{name}.{_ENCODED}", {"base64": item[_ENCODED]})
        elif item.get(_NAME):
            medium = medium_of(f"{name}.{_NAME}", item[_NAME])
        else:
            raise schema_error(name, f"{_ENCODED} or {_NAME}", "neither")
        before[index].append(Place(kind=MediaKind.IMAGE, medium=medium))
    pieces: list[Piece] = []
    for index, sentence in enumerate(sentences):
        pieces += [*before[index], *split(sentence if index == len(sentences) - 1 else f"{sentence} ", spec)]
    return Draft(role=Role.DOCUMENT, pieces=pieces)
