"""WebDataset tar shards: members with the same key make up a sample.

A member's key is its name up to the first dot of the last part, folders included ("train/0001.2.webp": key "train/0001",
extension "2.webp"). Extensions are compared in lower case. The annotation is KEY.json, or KEY.txt for a plain caption;
other members are media if the annotation names them or if their extension is a medium's.

Members of a sample need not be next to each other, since the whole archive is indexed before anything is read. Folders,
members without an extension and names that begin with a dot are skipped. Gzipped archives (.tar.gz, .tgz) are unpacked into
an unnamed temporary file; gzip data under the name .tar is rejected as archive_corrupt.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from headrace.preprocessor.records.record import Record
from headrace.preprocessor.sources.annotation import parse_annotation, parse_text
from headrace.preprocessor.sources.base import MAX_ANNOTATION_BYTES, MAX_MEDIUM_BYTES, Shard, check_size
from headrace.preprocessor.sources.blob import Blob, BlobCache, BlobReader, open_blob
from headrace.preprocessor.sources.tar import Damage, TarMember, scan
from headrace.preprocessor.sources.unpacked import COPY_BYTES, Unpacking
from headrace.quarantine import BadSampleError, Reason, Rejected

_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    offset: int
    size: int


class WebDatasetShard(Shard):
    """A shard that is one WebDataset tar archive, plain or gzipped."""

    def __init__(self, url: str, cache: BlobCache | None = None) -> None:
        index = _Index()
        self._blob = open_blob(url, cache)
        if self._blob.pread(0, len(_GZIP_MAGIC)) != _GZIP_MAGIC:
            index.add_archive(self._blob)
        elif url.endswith(".tar"):
            index.reject("", Reason.ARCHIVE_CORRUPT, "gzip data under the name .tar; name it .tar.gz or unpack it")
        else:
            self._blob, failure = _unpacked(self._blob, url)
            index.add_archive(self._blob)
            if failure:
                index.reject("", *failure)
        self._keys = [key for key in index.samples if key not in index.rejected_keys]
        self._spans = [index.samples[key] for key in self._keys]
        self.num_rows = len(self._keys)
        self.rejected = tuple(index.rejected)

    def key(self, row: int) -> str:
        """Return the key of the sample at `row`."""
        return self._keys[row]

    def read(self, row: int) -> Record:
        """Return the record at `row`: the fields of KEY.json, and KEY.txt as the field `txt`. Raises BadSampleError."""
        spans = self._spans[row]
        fields = {}
        if "txt" in spans:
            fields["txt"] = parse_text(self._annotation(spans["txt"], "txt"), "the txt member")
        if "json" in spans:
            fields |= parse_annotation(self._annotation(spans["json"], "json"), "the json member")
        if not fields and spans.keys().isdisjoint(("json", "txt")):
            raise BadSampleError(Reason.SCHEMA_ERROR, f"no json or txt member, only {', '.join(spans)}")
        members = tuple(sorted(spans.keys() - {"json", "txt"}, key=_natural))
        return Record(key=self._keys[row], fields=fields, load=self.loader(row), members=members)

    def extensions(self, row: int) -> tuple[str, ...]:
        """Return the extensions of the members of the sample at `row`, in the archive's order."""
        return tuple(self._spans[row])

    def loader(self, row: int) -> Callable[[str], bytes]:
        """Return a function that reads a member of the sample at `row` by its extension; see `Record.load`."""
        spans = self._spans[row]

        def load(extension: str) -> bytes:
            span = spans.get(extension.lower())
            if span is None:
                raise BadSampleError(Reason.MISSING_MEDIA, f"no member with the extension {extension!r}")
            check_size(f"the {extension} member", span.size, MAX_MEDIUM_BYTES)
            return self._bytes(span)

        return load

    def close(self) -> None:
        """Close the archive."""
        self._blob.close()

    def _annotation(self, span: _Span, extension: str) -> bytes:
        check_size(f"the {extension} member", span.size, MAX_ANNOTATION_BYTES)
        return self._bytes(span)

    def _bytes(self, span: _Span) -> bytes:
        data = self._blob.pread(span.offset, span.size)
        if len(data) < span.size:
            raise BadSampleError(Reason.ARCHIVE_TRUNCATED, "the archive has become shorter since it was indexed")
        return data


class _Index:
    """Groups members into samples and collects their rejections; for each key only the first reason counts."""

    def __init__(self) -> None:
        self.samples: dict[str, dict[str, _Span]] = {}
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
            spans[extension] = _Span(offset=member.offset, size=member.size)
        return key


def _split(name: str) -> tuple[str, str]:
    """Split a member's name into its key and its extension in lower case."""
    folder, slash, last = name.rpartition("/")
    stem, _, extension = last.partition(".")
    return folder + slash + stem, extension.lower()


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts "2.jpg" before "10.jpg"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def _unpacked(packed: Blob, url: str) -> tuple[Blob, tuple[Reason, str] | None]:
    """Unpack a gzipped archive as far as it is sound; also return what ended it early, if anything. Closes `packed`."""
    unpacking = Unpacking(packed, url)
    failure = None
    try:
        with gzip.GzipFile(fileobj=io.BufferedReader(BlobReader(packed), COPY_BYTES)) as stream:
            while chunk := stream.read(COPY_BYTES):
                unpacking.write(chunk)
    except BadSampleError as err:
        failure = err.reason, err.detail
    except EOFError:
        failure = (Reason.ARCHIVE_TRUNCATED, "the gzip data ends early")
    except (gzip.BadGzipFile, zlib.error) as err:
        failure = (Reason.ARCHIVE_CORRUPT, f"the gzip data is damaged: {err}")
    except BaseException:
        unpacking.discard()
        raise
    finally:
        packed.close()
    return unpacking.finish(), failure
