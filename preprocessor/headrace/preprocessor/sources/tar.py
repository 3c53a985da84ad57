"""A strict reader of tar headers: POSIX ustar and pax, GNU long names, base-256 sizes.

It reports damage and continues behind it, where Python's tarfile ends without an error at the first bad header. Only headers
are read, never the data of members. Blocks of zeros are skipped wherever they occur, so that concatenated archives are read
whole and a missing end marker does no harm. The formats: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Extended
Header"; GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace.preprocessor.sources.blob import Blob
from headrace.quarantine import Reason

BLOCK = 512
_ZEROS = bytes(BLOCK)
_SCAN_BYTES = 2**20
_MAX_EXTENSION_BYTES = 2**20  # a pax header holds names and times: a megabyte is damage

_REGULAR = frozenset(b"\x0007")
_DIRECTORY = ord("5")
_OCTAL = frozenset(b"01234567")
_WITHOUT_DATA = frozenset(b"123456")  # links, devices, folders, pipes: no data follows, whatever their size field says
_EXTENSIONS = frozenset(b"xgLK")


@dataclass(frozen=True, slots=True, kw_only=True)
class TarMember:
    """A complete member of a tar archive. `name` is as stored and has not been checked."""

    name: str
    offset: int
    """Offset of the first data byte in the archive."""
    size: int
    regular: bool
    directory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A damaged place in a tar archive. `name` is the member's, a guess if its header is bad, or None if not known."""

    reason: Reason
    detail: str
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    name: bytes
    size: int
    kind: int
    sparse: bool = False


class _HeaderError(ValueError):
    """Raised for a block that is not a tar header."""


def scan(blob: Blob) -> Iterator[TarMember | Damage]:
    """Yield the members of a tar archive and the damage in it, in the archive's order.

    After a bad header the scan continues at the next block whose magic and checksum are those of a header. Damage has one of
    the reasons archive_truncated, archive_corrupt (a bad header) and encoding_error (a name that is not UTF-8).
    """
    if blob.size == 0:
        yield Damage(reason=Reason.ARCHIVE_TRUNCATED, detail="the archive has 0 bytes")
    offset = 0
    pending: dict[str, bytes] = {}
    while offset < blob.size:
        block = blob.pread(offset, BLOCK)
        if block == _ZEROS[: len(block)]:
            offset += BLOCK
            continue
        if len(block) < BLOCK:
            yield Damage(reason=Reason.ARCHIVE_TRUNCATED, detail=f"the archive ends inside of the header at byte {offset}")
            return
        try:
            header = _apply(_parse(block), pending)
            data = offset + BLOCK
            if data + header.size > blob.size:
                yield _truncated(header, blob.size - data)
                return
            if header.kind in _EXTENSIONS:
                pending |= _extension(header, blob.pread(data, min(header.size, _MAX_EXTENSION_BYTES + 1)))
            else:
                pending = {}
                yield _member(header, data)
            offset = data + -(-header.size // BLOCK) * BLOCK
        except _HeaderError as err:
            pending = {}
            yield Damage(reason=Reason.ARCHIVE_CORRUPT, detail=f"header at byte {offset}: {err}", name=_guess(block))
            offset = _resynchronise(blob, offset + BLOCK)


def is_header(block: bytes) -> bool:
    """Whether a block is a sound header of today's kind, which has the magic; a member's data may hold such blocks too."""
    return block[257:262] == b"ustar" and _checksum_holds(block)


def _parse(block: bytes) -> _Header:
    if not _checksum_holds(block):
        raise _HeaderError("wrong checksum")
    name = _string(block[:100])
    if block[257:263] == b"ustar\0" and (prefix := _string(block[345:500])):
        name = prefix + b"/" + name
    kind = block[156]
    return _Header(name=name, size=0 if kind in _WITHOUT_DATA else _number(block[124:136]), kind=kind)


def _apply(header: _Header, pending: dict[str, bytes]) -> _Header:
    """Return the header updated with what the extension headers before it say. Raises _HeaderError."""
    if header.kind in _EXTENSIONS or not pending:
        return header
    size = header.size
    if "size" in pending and header.kind not in _WITHOUT_DATA:
        if not pending["size"].isdigit() or len(pending["size"]) > 20:
            raise _HeaderError(f"pax size {pending['size']!r} is not a number")
        size = int(pending["size"])
    return replace(
        header, name=pending.get("path", header.name), size=size, sparse=any(key.startswith("GNU.sparse") for key in pending)
    )


def _member(header: _Header, data: int) -> TarMember | Damage:
    try:
        name = header.name.decode()
    except UnicodeDecodeError:
        shown = header.name.decode(errors="backslashreplace")
        return Damage(reason=Reason.ENCODING_ERROR, detail=f"the name {shown!r} is not UTF-8", name=shown)
    directory = header.kind == _DIRECTORY or (header.kind in _REGULAR and name.endswith("/"))
    regular = header.kind in _REGULAR and not header.sparse and not directory
    return TarMember(name=name, offset=data, size=header.size, regular=regular, directory=directory)


def _truncated(header: _Header, left: int) -> Damage:
    name = None if header.kind in _EXTENSIONS else header.name.decode(errors="backslashreplace")
    return Damage(reason=Reason.ARCHIVE_TRUNCATED, detail=f"{left} of {header.size} bytes of {name} are there", name=name)


def _extension(header: _Header, payload: bytes) -> dict[str, bytes]:
    """Return what an extension header says of the next member. Global pax headers (comments, times) are of no interest."""
    if len(payload) > _MAX_EXTENSION_BYTES:
        raise _HeaderError(f"extension header of {header.size} bytes")
    if header.kind == ord("x"):
        return _pax(payload)
    return {"path": _string(payload)} if header.kind == ord("L") else {}


def _pax(payload: bytes) -> dict[str, bytes]:
    """Parse pax records "LENGTH KEY=VALUE\\n" whose length counts all of it: b"13 path=a.jpg\\n" has 14 bytes and is damaged."""
    records = {}
    position = 0
    while position < len(payload):
        digits, space, _ = payload[position : position + 21].partition(b" ")
        if not space or not digits.isdigit():
            raise _HeaderError("pax record without a length")
        end = position + int(digits)
        key, equals, value = payload[position + len(digits) + 1 : end].partition(b"=")
        if end > len(payload) or not equals or not value.endswith(b"\n"):
            raise _HeaderError("pax record of a wrong length")
        records[key.decode(errors="backslashreplace")] = value[:-1]
        position = end
    return records


def _checksum_holds(block: bytes) -> bool:
    """Whether a header's checksum is the sum of its bytes, with blanks for the checksum; old tars summed signed bytes."""
    try:
        stored = _number(block[148:156])
    except _HeaderError:
        return False
    total = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    if stored == total:
        return True
    negative = sum(1 for byte in block[:148] + block[156:] if byte > 127)
    return stored == total - 256 * negative


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # base 256, for sizes from 8 GiB on
        if field[0] != 0x80:
            raise _HeaderError("negative number")
        return int.from_bytes(field[1:], "big")
    digits = _string(field).strip()
    if not _OCTAL.issuperset(digits):
        raise _HeaderError(f"{digits!r} is not an octal number")
    return int(digits or b"0", 8)


def _string(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def _guess(block: bytes) -> str | None:
    return _string(block[:100]).decode(errors="replace") or None


def _resynchronise(blob: Blob, offset: int) -> int:
    """Return the offset of the next sound header from `offset` (a multiple of BLOCK) on; the blob's size if there is none."""
    while offset < blob.size:
        chunk = blob.pread(offset, _SCAN_BYTES)
        for start in range(0, len(chunk) - BLOCK + 1, BLOCK):
            if is_header(chunk[start : start + BLOCK]):
                return offset + start
        offset += _SCAN_BYTES
    return blob.size
