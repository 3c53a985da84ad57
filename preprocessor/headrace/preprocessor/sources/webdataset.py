"""WebDataset tar shards: members with the same key make up a sample.

A member's key is its name up to the first dot of the last part, folders included ("train/0001.2.webp": key "train/0001",
extension "2.webp"). Extensions are compared in lower case. The annotation is KEY.json, or KEY.txt for a plain caption;
other members are media if the annotation names them or if their extension is a medium's.

Members of a sample need not be next to each other, since the whole archive is indexed before anything is read. Folders,
members without an extension and names that begin with a dot are skipped. Packed archives (.tar.gz, .tgz, .tar.zst, .tar.bz2)
are unpacked into an unnamed temporary file; packed data under the name .tar are rejected as archive_corrupt.
A json member that is a list of turns is the conversation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from headrace.preprocessor.records.record import Record
from headrace.preprocessor.sources.annotation import as_object, parse_json, parse_text
from headrace.preprocessor.sources.base import MAX_ANNOTATION_BYTES, MAX_MEDIUM_BYTES, Shard, check_size
from headrace.preprocessor.sources.blob import Blob, BlobCache, open_blob
from headrace.preprocessor.sources.sample_index import SampleIndex, Span
from headrace.preprocessor.sources.tar import Damage, TarMember, scan
from headrace.preprocessor.sources.tar_walk import walking
from headrace.preprocessor.sources.unpacked import unpack
from headrace.quarantine import BadSampleError, Reason, Rejected

_PACKED = re.compile(rb"(?P<gzip>\x1f\x8b)|(?P<zstd>\x28\xb5\x2f\xfd)|(?P<bz2>BZh[1-9]1AY&SY)")
_TEXTS = ("txt", "text", "transcript")
_TURNS = {"conversations": {"from", "value"}, "messages": {"role", "content"}}
_ENDS = {"gzip": "gz", "zstd": "zst", "bz2": "bz2"}


class WebDatasetShard(Shard):
    """A shard that is one WebDataset tar archive, plain or packed."""

    def __init__(self, url: str, cache: BlobCache | None = None, parts: Collection[str] | None = None) -> None:
        """`parts`: extensions of the members that samples have; None: all."""
        index = _Index()
        self._parts = parts
        self._blob = open_blob(url, cache, in_parts=url.endswith(".tar"))
        packing = _PACKED.match(self._blob.pread(0, 10))
        codec = packing and packing.lastgroup
        if codec is None:
            with walking(self._blob, cache, url) as headers:
                index.add_archive(headers)
        elif url.endswith(".tar"):
            index.reject(
                "", Reason.ARCHIVE_CORRUPT, f"{codec} data under the name .tar; name it .tar.{_ENDS[codec]} or unpack it"
            )
        else:
            self._blob, failure = unpack(self._blob, url, codec)
            index.add_archive(self._blob)
            if failure:
                index.reject("", failure.reason, failure.detail)
        self._samples = SampleIndex(item for item in index.samples.items() if item[0] not in index.rejected_keys)
        self.num_rows = len(self._samples)
        self.rejected = tuple(index.rejected)
        places = enumerate(index.samples) if index.rejected_keys else ()
        self.rejected_at = {key: place for place, key in places if key in index.rejected_keys}
        """Numbers that rejected samples have among all of the archive's, by key."""

    def key(self, row: int) -> str:
        """Return the key of the sample at `row`."""
        return self._samples.key(row)

    def read(self, row: int) -> Record:
        """Return the record at `row`: the fields of KEY.json, and KEY.txt as the field `txt`. Raises BadSampleError.

        KEY.text or KEY.transcript stand for KEY.txt where there is none.
        """
        spans = self._spans(row)
        fields: dict[str, Any] = {}
        text = next((name for name in _TEXTS if name in spans), None)
        if text is not None:
            fields["txt"] = parse_text(self._annotation(spans[text], text), f"the {text} member")
        if "json" in spans:
            fields |= _annotated(self._annotation(spans["json"], "json"))
        if text is None and "json" not in spans:
            raise BadSampleError(Reason.SCHEMA_ERROR, f"no json or txt member, only {', '.join(spans)}")
        members = tuple(sorted(spans.keys() - {"json", text}, key=_natural))
        return Record(key=self.key(row), fields=fields, load=self._loader(spans), members=members)

    def extensions(self, row: int) -> tuple[str, ...]:
        """Return the extensions of the members of the sample at `row`, in the archive's order."""
        return tuple(self._spans(row))

    def loader(self, row: int) -> Callable[[str], bytes]:
        """Return a function that reads a member of the sample at `row` by its extension; see `Record.load`."""
        return self._loader(self._spans(row))

    def prefetch(self, rows: Sequence[int]) -> None:
        """Ask for the members of samples; see `Shard.prefetch`."""
        spans = (span for row in rows for span in self._spans(row).values())
        self._blob.prefetch([(span.offset, span.offset + span.size) for span in spans])

    def fetch_whole(self) -> None:
        """Prepare to read all of the archive. Raises DatasetError where that fails."""
        self._blob.fetch_whole()

    def annotations(self, paths: Collection[str] | None) -> Iterator[Mapping[str, Any] | None]:
        """Yield the fields of each sample; see `Shard.annotations`."""
        self.fetch_whole()
        yield from super().annotations(paths)

    def close(self) -> None:
        """Close the archive."""
        self._blob.close()

    def _spans(self, row: int) -> dict[str, Span]:
        spans = self._samples.spans(row)
        return spans if self._parts is None else {name: span for name, span in spans.items() if name in self._parts}

    def _loader(self, spans: Mapping[str, Span]) -> Callable[[str], bytes]:
        def load(extension: str) -> bytes:
            span = spans.get(extension.lower())
            if span is None:
                raise BadSampleError(Reason.MISSING_MEDIA, f"no member with the extension {extension!r}")
            check_size(f"the {extension} member", span.size, MAX_MEDIUM_BYTES)
            return self._bytes(span)

        return load

    def _annotation(self, span: Span, extension: str) -> bytes:
        check_size(f"the {extension} member", span.size, MAX_ANNOTATION_BYTES)
        return self._bytes(span)

    def _bytes(self, span: Span) -> bytes:
        data = self._blob.pread(span.offset, span.size)
        if len(data) < span.size:
            raise BadSampleError(Reason.ARCHIVE_TRUNCATED, "the archive has become shorter since it was indexed")
        return data


def _annotated(data: bytes) -> dict[str, Any]:
    """Return the fields of a json member, a list of turns as the field that holds such a list. Raises BadSampleError."""
    document = parse_json(data, "the json member")
    if isinstance(document, list) and document and all(isinstance(turn, dict) for turn in document):
        for field, keys in _TURNS.items():
            if all(keys <= turn.keys() for turn in document):
                return {field: document}
    return as_object(document, "the json member")


class _Index:
    """Groups members into samples and collects their rejections; for each key only the first reason counts."""

    def __init__(self) -> None:
        self.samples: dict[str, dict[str, Span]] = {}
        self.rejected: list[Rejected] = []
        self.rejected_keys: set[str] = set()

    def reject(self, key: str, reason: Reason, detail: str) -> None:
        if not key or key not in self.rejected_keys:
            self.rejected.append(Rejected(name=key, reason=reason, detail=detail))
        if key:
            self.rejected_keys.add(key)

    def add_archive(self, blob: Blob) -> None:
        before: str | None = None
        corrupt: Damage | None = None
        for entry in scan(blob):
            if isinstance(entry, Damage) and entry.reason is Reason.ARCHIVE_CORRUPT:
                self._blame(corrupt, before, None)
                corrupt = entry
            elif isinstance(entry, Damage):
                self.reject(_split(entry.name or "")[0], entry.reason, entry.detail)
            else:
                key = self._add(entry)
                self._blame(corrupt, before, key)
                before, corrupt = key, None
        self._blame(corrupt, before, None)
        if not self.samples and not self.rejected:
            self.reject("", Reason.EMPTY_ARCHIVE, "the archive has no sample")

    def _blame(self, corrupt: Damage | None, before: str | None, after: str | None) -> None:
        """Charge a damaged header to the sample it names if a neighbouring member is of that sample, else to the archive."""
        if corrupt is not None:
            key = _split(corrupt.name or "")[0]
            self.reject(key if key in (before, after) else "", corrupt.reason, corrupt.detail)

    def _add(self, member: TarMember) -> str:
        name = re.sub(r"^(\./)+", "", member.name)
        key, extension = _split(name)
        if member.directory or name.rsplit("/", 1)[-1].startswith("."):
            return key
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            self.reject(key, Reason.UNSAFE_MEMBER_NAME, f"the member {name!r} leads outside")
        elif not member.regular:
            self.reject(key, Reason.UNSUPPORTED_MEMBER_TYPE, f"the member {name!r} is a link, a device, a pipe or sparse")
        elif extension:
            spans = self.samples.setdefault(key, {})
            if extension in spans:
                self.reject(key, Reason.DUPLICATE_KEY, f"the member {name!r} is there twice")
            spans[extension] = Span(offset=member.offset, size=member.size)
        return key


def _split(name: str) -> tuple[str, str]:
    """Split a member's name into its key and its extension in lower case."""
    folder, slash, last = name.rpartition("/")
    stem, _, extension = last.partition(".")
    return folder + slash + stem, extension.lower()


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts "2.jpg" before "10.jpg"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]
