"""Rows that name media in files: where the files are, and the usual names of the columns that name them.

The names of columns become those that mappings look for by themselves:

    metadata.jsonl, .csv, .parquet    Hugging Face's ImageFolder and AudioFolder: `file_name` becomes `image` or `audio`,
                                      `file_names` `images` or `audios`, `input_file_name` `input`; `transcription` `text`
    manifests of NeMo                 `audio_filepath` becomes `audio`, and a missing `offset` beside a `duration` is 0

What the source's mapping names or ignores stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from headrace.mapping import MappingSpec
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.records.unused_media import AUDIO_EXTENSIONS, IMAGE_EXTENSIONS
from headrace.preprocessor.sources.base import Shard
from headrace.preprocessor.sources.blob import BlobCache
from headrace.preprocessor.sources.media_files import MediaFiles, media_files
from headrace.quarantine import BadSampleError, Reason
from headrace.source_spec import SourceSpec

_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.json", "metadata.parquet")
_FILE = "file_name"
_NEMO = "audio_filepath"
_MEDIA = ("images", "image", "audios", "audio")
_IMG2DATASET = {"url", "key", "status", "error_message"}
"""Columns that tell a table of img2dataset, which has rows for images that could not be downloaded too."""
_TEXTS = frozenset(("texts", "conversations", "messages", "caption", "text", "txt"))


class NamedMedia:
    """The media that the rows of one file name."""

    def __init__(self, url: str, source: SourceSpec | None, cache: BlobCache | None = None) -> None:
        """`source` says where the media are and what its mapping names; None: those beside the file, and the usual mapping."""
        self._url = url
        self._cache = cache
        self._source = source
        self._mapping = source.mapping if source else MappingSpec()
        self._is_metadata = url.rpartition("/")[2] in _METADATA

    @cached_property
    def files(self) -> MediaFiles:
        """The files. Raises DatasetError where headrace.preprocessor.access forbids to read there."""
        return media_files(self._url, self._source, self._cache)

    def check_access(self) -> None:
        """Raise DatasetError where headrace.preprocessor.access forbids to read the files."""
        _ = self.files

    def record(self, key: str, fields: dict[str, Any]) -> Record:
        """Return the record of a row, under the usual names."""
        named = {self._mapping.text, self._mapping.images, self._mapping.audios, *self._mapping.ignore}
        changes: dict[str, str] = {}
        if isinstance(fields.get(_NEMO), str) and self._mapping.audios is None and fields.keys().isdisjoint(("audio", "audios")):
            changes[_NEMO] = "audio"
        if self._is_metadata:
            changes |= {name: column for name, value in fields.items() if (column := _column(name, value))}
            if _TEXTS.isdisjoint(fields):
                changes["transcription"] = "text"
        changes = {name: new for name, new in changes.items() if name in fields and name not in named and new not in fields}
        fields = {changes.get(name, name): value for name, value in fields.items()}
        if _NEMO in changes and "duration" in fields:
            fields.setdefault("offset", 0)  # NeMo reads `duration` seconds from there on, which may be less than the file
        return Record(key=key, fields=fields, load=lambda name: self.files.load(name))

    def stored_paths(self, paths: Collection[str] | None) -> Collection[str] | None:
        """Return the paths of rows as they are stored from which `record` makes fields at `paths`; None: all may be needed."""
        return None if paths is None or self._is_metadata else (*paths, _NEMO)

    def with_bytes(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields with the bytes of the file in each `{bytes, path}` of media that has a path alone.

        Raises BadSampleError as `Record.load` does.
        """
        media = {*_MEDIA, self._mapping.images, self._mapping.audios}
        return {name: self._with_bytes(value) if name in media else value for name, value in fields.items()}

    def _with_bytes(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._with_bytes(item) for item in value]
        if (
            isinstance(value, dict)
            and value.keys() == {"bytes", "path"}
            and value["bytes"] is None
            and isinstance(value["path"], str)
        ):
            return {**value, "bytes": self.files.load(value["path"])}
        return value


class TableShard(Shard):
    """A shard of a table, such as Parquet, whose rows may hold media or name them."""

    def __init__(self, table: Shard, url: str, source: SourceSpec, cache: BlobCache | None = None) -> None:
        """`table` is the shard at `url`, which this one takes over."""
        self._table = table
        self._media = NamedMedia(url, source, cache)
        self.num_rows = table.num_rows
        self.rows_fetched_together = table.rows_fetched_together
        self.rejected = table.rejected

    def key(self, row: int) -> str:
        """Return the key of the row at `row`."""
        return self._table.key(row)

    def read(self, row: int) -> Record:
        """Return the record at `row`. Raises BadSampleError where it is damaged, or where img2dataset found no image for it."""
        record = self._table.read(row)
        if record.fields.keys() >= _IMG2DATASET and record.fields["status"] != "success":
            raise BadSampleError(Reason.MISSING_MEDIA, f"img2dataset got no image: {record.fields['error_message']}")
        return self._media.record(record.key, self._media.with_bytes(dict(record.fields)))

    def annotations(self, paths: Collection[str] | None) -> Iterator[Mapping[str, Any] | None]:
        """Yield the fields of each row, without loading what they name; see `Shard.annotations`."""
        for fields in self._table.annotations(self._media.stored_paths(paths)):
            yield None if fields is None else self._media.record("", dict(fields)).fields

    def prefetch(self, rows: Sequence[int]) -> None:
        """Ask for rows; see `Shard.prefetch`."""
        self._table.prefetch(rows)

    def close(self) -> None:
        """Close the file."""
        self._table.close()


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
