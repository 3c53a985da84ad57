"""Rows that are annotations in one file and name media in others: what JSONL, JSON and CSV have in common.

The names of media become those that mappings look for by themselves:

    metadata.jsonl, metadata.csv    Hugging Face's ImageFolder and AudioFolder: `file_name` becomes `image` or `audio`,
                                    `file_names` `images` or `audios`, `input_file_name` `input`; `transcription` `text`
    manifests of NeMo               `audio_filepath` becomes `audio`

What the source's mapping names or ignores stays as it is.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from typing import Any

from headrace.mapping import MappingSpec
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.records.unused_media import AUDIO_EXTENSIONS, IMAGE_EXTENSIONS
from headrace.preprocessor.sources.base import MAX_ANNOTATION_BYTES, Shard, check_size
from headrace.preprocessor.sources.blob import Blob, BlobCache, open_blob
from headrace.preprocessor.sources.media_files import media_files
from headrace.preprocessor.sources.unpacked import CODECS, unpack
from headrace.quarantine import BadSampleError, Reason, Rejected
from headrace.spec import SourceSpec

_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.json")
_FILE = "file_name"
_NEMO = "audio_filepath"
_TEXTS = frozenset(("texts", "conversations", "messages", "caption", "text", "txt"))


class RowFileShard(Shard):
    """A shard that is one file, plain or packed, of rows at ranges of bytes."""

    what: str
    """What a row is called in errors."""

    def __init__(self, url: str, cache: BlobCache | None = None, source: SourceSpec | None = None) -> None:
        """`source` says where the media are and what its mapping names; None: those beside the file, and the usual mapping."""
        self._blob = open_blob(url, cache)
        self._media = media_files(url, source)
        self._mapping = source.mapping if source else MappingSpec()
        self._is_metadata = url.rpartition("/")[2] in _METADATA
        rejected: list[Rejected] = []
        if codec := next((codec for end, codec in CODECS.items() if url.endswith(end)), None):
            self._blob, failure = unpack(self._blob, url, codec)
            rejected += [_rejected(failure)] if failure else []
        self._numbers, self._bounds, failure = self._index(self._blob)
        self.num_rows = len(self._numbers)
        self.rejected = (*rejected, *([_rejected(failure)] if failure else []))

    def key(self, row: int) -> str:
        """Return the number of the row in the file, from 0, as a string."""
        return str(self._numbers[row])

    def read(self, row: int) -> Record:
        """Return the record at `row`. Raises BadSampleError where it is damaged or too large."""
        start, stop = self._bounds[2 * row], self._bounds[2 * row + 1]
        check_size(self.what, stop - start, MAX_ANNOTATION_BYTES)
        fields = self._parse(self._blob.pread(start, stop - start))
        return Record(key=self.key(row), fields=self._usual(fields), load=self._media.load)

    def close(self) -> None:
        """Close the file."""
        self._blob.close()

    @abstractmethod
    def _index(self, blob: Blob) -> tuple[array[int], array[int], BadSampleError | None]:
        """Return the numbers of the n rows, (n,), their bounds in bytes as start, stop, start, ..., (2n,), and any damage."""

    @abstractmethod
    def _parse(self, data: bytes) -> dict[str, Any]:
        """Return the fields of a row. Raises BadSampleError."""

    def _usual(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields with the names of media columns that mappings look for. Raises BadSampleError."""
        named = {self._mapping.text, self._mapping.images, self._mapping.audios, *self._mapping.ignore}
        changes: dict[str, str] = {}
        if isinstance(fields.get(_NEMO), str) and self._mapping.audios is None and fields.keys().isdisjoint(("audio", "audios")):
            changes[_NEMO] = "audio"
        if self._is_metadata:
            changes |= {name: column for name, value in fields.items() if (column := _column(name, value))}
            if _TEXTS.isdisjoint(fields):
                changes["transcription"] = "text"
        changes = {name: new for name, new in changes.items() if name in fields and name not in named and new not in fields}
        if _NEMO in changes and fields.get("offset"):
            detail = f"the recording begins at its second {fields['offset']}, and parts of recordings are not read: cut them out"
            raise BadSampleError(Reason.SCHEMA_ERROR, detail)
        return {changes.get(name, name): value for name, value in fields.items()}


def _column(name: str, value: Any) -> str | None:
    """Return the column that a column of file names stands for: by its own name, else by the kind of the first file."""
    several = name.endswith(f"{_FILE}s")
    stem = name.removesuffix("s" if several else "").removesuffix(_FILE)
    if not name.removesuffix("s").endswith(_FILE) or (stem and not stem.endswith("_")):
        return None
    if stem:
        return stem.removesuffix("_")
    first = value[0] if several and isinstance(value, list) and value else value
    ending = first.rpartition(".")[2].lower() if isinstance(first, str) else ""
    kind = "image" if ending in IMAGE_EXTENSIONS else "audio" if ending in AUDIO_EXTENSIONS else None
    return kind and kind + "s" * several


def _rejected(failure: BadSampleError) -> Rejected:
    return Rejected(name="", reason=failure.reason, detail=failure.detail)
