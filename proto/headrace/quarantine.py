"""Quarantine of samples that cannot be used: the reasons, and the error and the record that carry one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from headrace.errors import HeadraceError
from headrace.printable import printable, sendable
from headrace.thumbnail_check import is_thumbnail

IMAGE, AUDIO, TEXT = "image", "audio", "text"
MODALITIES = (IMAGE, AUDIO, TEXT)
MAX_DETAIL = 1000  # characters: the detail stays small whatever the record holds


class Reason(StrEnum):
    """The class of damage for which a sample is quarantined. Every quarantined sample has exactly one."""

    CORRUPT_MEDIA = "corrupt_media"  # the bytes are not a whole image or recording
    EMPTY_MEDIA = "empty_media"  # no bytes, or no audio frames
    TOO_LARGE = "too_large"  # more pixels or bytes than the limit
    TOO_SMALL = "too_small"  # an image with a side below the limit
    BAD_ASPECT_RATIO = "bad_aspect_ratio"  # longer side over shorter side beyond the limit
    UNSUPPORTED_MEDIA = "unsupported_media"  # well-formed, in a format that is not supported
    TOO_LONG = "too_long"  # more tokens or seconds than the limit
    TOO_SHORT = "too_short"  # fewer seconds or tokens to learn than the limit
    FILTERED = "filtered"  # the source's filter does not admit it
    ENCODING_ERROR = "encoding_error"  # not valid UTF-8
    SCHEMA_ERROR = "schema_error"  # annotation missing or of the wrong shape
    EMPTY_SAMPLE = "empty_sample"  # nothing to train on
    PLACEHOLDER_MISMATCH = "placeholder_mismatch"  # placeholders and media differ in number
    MISSING_MEDIA = "missing_media"  # the record names a medium that it does not contain
    UNUSED_MEDIA = "unused_media"  # the mapping neither uses nor explicitly ignores a medium
    ARCHIVE_TRUNCATED = "archive_truncated"  # the container ends early
    ARCHIVE_CORRUPT = "archive_corrupt"  # the container is damaged
    EMPTY_ARCHIVE = "empty_archive"  # the container has no member
    DUPLICATE_KEY = "duplicate_key"  # a key is not unique
    UNSAFE_MEMBER_NAME = "unsafe_member_name"  # a member's path leads outside the data set
    KILLED_PREPROCESSORS = "killed_preprocessors"  # processes that touched it died
    UNSUPPORTED_MEMBER_TYPE = "unsupported_member_type"  # the member is a link, device or pipe
    OTHER = "other"  # a reason of a newer release, which the detail begins with


_OF_TEXT = (Reason.ENCODING_ERROR, Reason.TOO_LONG, Reason.TOO_SHORT)
"""Reasons that are a text's unless a medium is blamed."""
_T = TypeVar("_T")


def refusal(reason: str, detail: str) -> tuple[Reason, str]:
    """Return reason and detail of a refusal that another process has sent or stored, perhaps one of a newer release."""
    try:
        return Reason(reason), detail
    except ValueError:
        return Reason.OTHER, f"{reason}: {detail}"


class BadSampleError(HeadraceError):
    """One sample cannot be used and is quarantined; the job goes on. The caller adds the sample's name.

    Lone surrogates in `detail`, which JSON strings may hold, are escaped: it is sent in messages, which need UTF-8.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        detail = sendable(detail)
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.modality = TEXT if reason in _OF_TEXT else ""
        """Of the segment that is at fault, one of MODALITIES; empty where it is none of them, or nobody has said."""
        self.medium = b""
        """The file of that segment, where it has one."""


def blaming(modality: str, work: Callable[..., _T], medium: bytes, *args: Any) -> _T:
    """Return `work(medium, *args)`, and have a BadSampleError that it raises say which segment is at fault."""
    try:
        return work(medium, *args)
    except BadSampleError as err:
        err.modality, err.medium = modality, medium
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A quarantined sample or shard. `sample_id` and `row` (of its shard) are None if the damage has no place in the job's order.

    `name` and `detail` can be sent and shown whatever the record holds: lone surrogates and, in `detail`, control characters are
    escaped, and `detail` is cut to MAX_DETAIL characters. A `modality` that is none of MODALITIES, and a `thumbnail` that any
    viewer may not decode, are left out.
    """

    name: str
    reason: Reason
    detail: str
    sample_id: int | None = None
    row: int | None = None
    modality: str = ""
    """Of the segment that is at fault; empty where it is none of them, or an older release says nothing of it."""
    thumbnail: bytes = field(default=b"", repr=False, compare=False)
    """Of an image of which something can be seen, as `is_thumbnail` takes it; empty where there is none."""

    def __post_init__(self) -> None:
        detail = printable(self.detail)
        object.__setattr__(self, "detail", detail if len(detail) <= MAX_DETAIL else f"{detail[:MAX_DETAIL]}…")
        object.__setattr__(self, "name", sendable(self.name))
        if self.modality not in MODALITIES:
            object.__setattr__(self, "modality", "")
        if not is_thumbnail(self.thumbnail):
            object.__setattr__(self, "thumbnail", b"")


def rejection_of_killer(name: str, deaths: int, sample_id: int | None = None, row: int | None = None) -> Rejected:
    """Return the quarantine record of a sample, or a shard, that killed `deaths` preprocessors, one after the other."""
    detail = f"killed {deaths} preprocessors, one after the other: it is not touched again"
    return Rejected(name=name, reason=Reason.KILLED_PREPROCESSORS, detail=detail, sample_id=sample_id, row=row)
