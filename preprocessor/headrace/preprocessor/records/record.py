"""One row of a data set, the same for every format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One row of a shard, media not yet read."""

    key: str
    """Unique in its shard."""
    fields: Mapping[str, Any]
    """The annotation: JSON-like values. A medium stands in it as a name for `load`, as bytes, or as `{bytes, path}`."""
    load: Callable[[str], bytes]
    """The bytes of the medium with a name (tar: the member's extension; JSONL: a path). Thread-safe. Raises BadSampleError
    with missing_media, unsafe_member_name, unsupported_member_type, too_large or archive_truncated."""
    members: tuple[str, ...] = ()
    """Names that `load` knows without any annotation, in natural order (only tar samples have such)."""
