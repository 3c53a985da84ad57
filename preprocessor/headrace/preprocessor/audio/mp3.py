"""Adds the missing length to MP3 streams: their frames are counted, and a frame with the number is put in front.

Encoders first write a silent frame, named Xing or Info, that holds the number of frames. If it is missing (radio, podcasts, old
encoders, streams cut out of others), libsndfile guesses the length from the first frame's bit rate, and reads no further than
its guess. Counting reads only the header of each frame.

The formats: ISO/IEC 11172-3 and 13818-3, section 2.4.1; the Xing frame as LAME writes it.
"""

from __future__ import annotations

import struct

_MPEG1_KBPS = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_MPEG2_KBPS = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_RATES = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8000)}  # Hz, by the header's version bits
_MPEG1 = 3
_MONO = 3
_SAME_STREAM = 0xFFFE0C00  # the header bits that all frames of a stream share: sync, version, layer and sample rate
_NAMES = (b"Xing", b"Info")
_TAGGED = 0x1  # flag of a Xing frame that holds the number of frames
_ROOMY = 9  # index of a bit rate whose frames have room for the number: 128 kbit/s, in MPEG 2 80
_FIRST_SYNC_BYTES, _RESYNC_BYTES = 2**16, 2**10  # how far mpg123, libsndfile's decoder, searches for a frame


def with_length(data: bytes) -> bytes:
    """Return an MP3 stream with its number of frames in front; `data` itself if it has one already or is not layer III."""
    begin = _sync(data, _behind_id3(data), _FIRST_SYNC_BYTES)
    if begin is None:
        return data
    first = int.from_bytes(data[begin : begin + 4], "big")
    if data.startswith(_NAMES, begin + 4 + _side_bytes(first)):
        return data
    count = 0
    position: int | None = begin
    while position is not None:
        while length := _length(data, position, first):
            count += position + length <= len(data)
            position += length
        position = _sync(data, position, _RESYNC_BYTES, first)
    return _length_frame(first, count) + data[begin:]


def _behind_id3(data: bytes) -> int:
    """Return where the stream begins, behind an ID3v2 tag if there is one; the tag's size has seven bits a byte."""
    if data[:3] != b"ID3" or len(data) < 10:
        return 0
    size = 0
    for byte in data[6:10]:
        size = size << 7 | byte & 0x7F
    return 10 + size + (10 if data[5] & 0x10 else 0)


def _sync(data: bytes, start: int, reach: int, like: int | None = None) -> int | None:
    """Return where the first frame header is within `reach` bytes from `start`; None if there is none.

    It must be followed by another header of its stream or by the end of the data, and belong to the stream of the header `like`
    unless that is None.
    """
    position = data.find(b"\xff", start, start + reach)
    while 0 <= position <= len(data) - 4:
        header = int.from_bytes(data[position : position + 4], "big")
        length = _length(data, position, header if like is None else like)
        if length and (position + length >= len(data) - 3 or _length(data, position + length, header)):
            return position
        position = data.find(b"\xff", position + 1, start + reach)
    return None


def _length(data: bytes, position: int, like: int) -> int:
    """Return the bytes of the frame whose header is at `position`; 0 if none of the same stream as the header `like` is there."""
    if position + 4 > len(data):
        return 0
    header = int.from_bytes(data[position : position + 4], "big")
    if (header ^ like) & _SAME_STREAM:
        return 0
    version, layer, bit_rate, rate = header >> 19 & 3, header >> 17 & 3, header >> 12 & 15, header >> 10 & 3
    if header >> 21 != 0x7FF or version == 1 or layer != 1 or bit_rate in (0, 15) or rate == 3:
        return 0
    kbps = (_MPEG1_KBPS if version == _MPEG1 else _MPEG2_KBPS)[bit_rate]
    return (144_000 if version == _MPEG1 else 72_000) * kbps // _RATES[version][rate] + (header >> 9 & 1)


def _side_bytes(header: int) -> int:
    """Return the number of bytes between the header and the name of a Xing frame."""
    mono = header >> 6 & 3 == _MONO
    return (17 if mono else 32) if header >> 19 & 3 == _MPEG1 else (9 if mono else 17)


def _length_frame(first: int, count: int) -> bytes:
    """Return a silent Xing frame saying that `count` frames follow, for the stream with the header `first`."""
    header = (first & ~0xF200 | _ROOMY << 12 | 0x10000).to_bytes(4, "big")  # no padding, no checksum
    frame = header + bytes(_side_bytes(first)) + _NAMES[0] + struct.pack(">II", _TAGGED, count)
    return frame.ljust(_length(header, 0, first), b"\0")
