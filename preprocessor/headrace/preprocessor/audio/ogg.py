"""Checks Ogg files, whose decoder passes over damaged pages and over all but the first of several streams.

A page has a checksum. libsndfile drops a page whose checksum disagrees, and reads on as if it were not there. Of a chained file,
as internet radio writes one for each piece, it reads the first piece alone. The format: RFC 3533, section 6.
"""

from __future__ import annotations

import zlib

from headrace.quarantine import BadSampleError, Reason

_CAPTURE = b"OggS"
_HEADER_BYTES = 27
_BEGINS = 2  # flag of the first page of a stream
_CHECKSUM = slice(22, 26)
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def check(data: bytes) -> None:
    """Raise BadSampleError with corrupt_media if an Ogg file's pages are damaged, unsupported_media if it has several streams.

    Files of other formats are left alone.
    """
    if not data.startswith(_CAPTURE):
        return
    position, begun = 0, False
    while data.startswith(_CAPTURE, position) and position + _HEADER_BYTES <= len(data):
        sizes = position + _HEADER_BYTES
        body = sizes + data[position + 26]
        end = body + sum(data[sizes:body])
        page = bytearray(data[position:end])
        if end > len(data) or _checksum(page) != int.from_bytes(data[position : position + 26][_CHECKSUM], "little"):
            raise BadSampleError(Reason.CORRUPT_MEDIA, f"the Ogg page at byte {position} is damaged")
        begins = bool(page[5] & _BEGINS)
        if begins and begun:
            raise BadSampleError(Reason.UNSUPPORTED_MEDIA, "Ogg streams one after the other are not taken; make each a recording")
        begun |= not begins
        position = end
    if data.find(_CAPTURE, position) >= 0:
        raise BadSampleError(Reason.CORRUPT_MEDIA, f"there is something else than an Ogg page at byte {position}")


def _checksum(page: bytearray) -> int:
    """Return a page's checksum, computed with zeros in its place: that of zlib, but with the bits of each byte the other way."""
    page[_CHECKSUM] = bytes(4)
    reflected = zlib.crc32(page.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int.from_bytes(reflected.to_bytes(4, "big").translate(_REVERSED)[::-1], "big")
