"""Turns a record into a sample: an ordered list of turns of segments.

Shapes of the text, told apart by their values:

    "a caption"                                       plain caption; not under texts, conversations or messages
    ["some text", "<image>", "more text"]             interleaved document
    [{"user": "...", "assistant": "..."}, ...]        question and answer pairs
    [{"from": "human", "value": "..."}, ...]          conversation
    [{"role": "user", "content": "..."}, ...]         messages; content may be a list of typed parts

Lists may be JSON in a string. Rows without any of these may have a question and an answer in fields of their own.

Placeholders in strings stand for the media, each kind in its own order, and their numbers must agree. Exceptions: a caption or
conversation without any placeholder has its images, then its recordings, in front of it; media that the text itself holds or
names are where it does so; and text inside of typed parts is never searched, so a placeholder's name in it is text. Nothing is
put between the items of a document.

Captions and documents are one turn with the role DOCUMENT. These functions know nothing of tokens or of what is inside media.

    turn.py             a sample and its turns; draft.py: the same with places, before the media are found
    shapes.py           which fields are the text, and which shape it has
    conversation.py     lists of turns; typed_part.py: their typed parts; learning.py: which of their words are learnt
    template_fields.py  what turns have beside their words, for templates
    question_answer.py  a question and an answer in fields of their own
    interleaved.py      documents
    media_lists.py      the media beside the text; medium.py: one medium as records hold it; placing.py: which stands where
    key_path.py         dotted paths, by which a mapping names fields
    unused_media.py     refusal of media that nothing takes
    names_used.py       which names of a mapping a record has
    filtering.py        which records and samples a source's filter admits
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.mapping import MappingSpec
from headrace.preprocessor.records import key_path, learning, media_lists, placing, shapes, unused_media
from headrace.preprocessor.records.draft import MediaKind, Piece
from headrace.preprocessor.records.media_lists import Listed
from headrace.preprocessor.records.medium import Medium
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.records.template_fields import tools_of
from headrace.preprocessor.records.turn import Audio, Image, Role, Sample, Segment, Text, Turn

__all__ = ["Audio", "Image", "Role", "Sample", "Segment", "Text", "Turn", "to_sample"]


def to_sample(record: Record, spec: MappingSpec) -> Sample:
    """Build the sample of a record, loading its media.

    Raises BadSampleError with schema_error (the field and what was expected), placeholder_mismatch, missing_media,
    unused_media, corrupt_media (a data URL that is none), empty_sample (no text and no media, or a conversation without an
    answer), and whatever `record.load` raises.
    """
    named = {kind: media_lists.list_media(record, kind, spec) for kind in MediaKind}
    has_media = bool(record.members) or any(found is not None and found.media for found in named.values())
    parsed = shapes.parse(record, named[MediaKind.IMAGE], spec, has_media=has_media)
    own = {kind: [place.medium for place in parsed.places(kind) if place.medium is not None] for kind in MediaKind}
    listed = {kind: _beside(record, kind, named[kind], parsed, bool(own[kind]), spec) for kind in MediaKind}
    _check_unused(record, parsed, own, listed, spec)
    placing.put_in_front(parsed, listed, spec)
    learning.check_learnable(parsed.turns)
    arranged = {kind: placing.arrange(kind, parsed, listed[kind]) for kind in MediaKind}

    part = unused_media.part_of(record.fields, spec) if len(own[MediaKind.AUDIO] or listed[MediaKind.AUDIO].whole) == 1 else None

    def segment(piece: Piece) -> Segment:
        if isinstance(piece, Text):
            return piece
        medium = next(arranged[piece.kind])
        data = record.load(medium) if isinstance(medium, str) else medium
        return Image(data=data) if piece.kind is MediaKind.IMAGE else Audio(data=data, part=part)

    turns = (
        Turn(role=turn.role, segments=tuple(map(segment, turn.pieces)), learnt=turn.learnt, weight=turn.weight, extra=turn.extra)
        for turn in parsed.turns
    )
    return Sample(turns=tuple(turns), tools=tools_of(record.fields, spec))


def _beside(
    record: Record, kind: MediaKind, named: Listed | None, parsed: shapes.Parsed, has_own: bool, spec: MappingSpec
) -> Listed:
    """Return the media of one kind beside the text: `named` ones, or else members of a tar, if the text has none of its own."""
    if named is None:
        return Listed() if has_own else media_lists.list_members(record, kind, spec)
    if parsed.takes_images and kind is MediaKind.IMAGE:
        return Listed(field=named.field)
    return named


def _check_unused(
    record: Record,
    parsed: shapes.Parsed,
    own: Mapping[MediaKind, list[Medium]],
    listed: Mapping[MediaKind, Listed],
    spec: MappingSpec,
) -> None:
    media = [medium for kind in MediaKind for medium in (*own[kind], *listed[kind].whole)]
    settled = [kind for kind in MediaKind if media_lists.named(kind, spec) is not None]
    taken = [kind for kind in MediaKind if own[kind] or listed[kind].media]
    unused_media.check_members(record, {medium.lower() for medium in media if isinstance(medium, str)}, settled, spec)
    used = {*(key_path.field_of(record.fields, path) for path in parsed.paths), *(found.field for found in listed.values())}
    unused_media.check_fields(record, used, taken, settled, spec)
    if any(isinstance(medium, str) for medium in (*own[MediaKind.AUDIO], *listed[MediaKind.AUDIO].whole)):
        unused_media.check_whole(record.fields, spec)
    names = {medium for medium in media if isinstance(medium, str)}
    for path in parsed.paths if any(turn.role is not Role.DOCUMENT for turn in parsed.turns) else ():
        value = key_path.find(record.fields, path)
        unused_media.check_turns(path, key_path.parse_json(value) if isinstance(value, str) else value, names, spec)
    if not media:
        unused_media.check_elsewhere(record, used, spec, is_pair=parsed.is_pair)
