"""Checks of containers before FFmpeg opens them: that they are whole, and that their tables ask for no more than they hold.

FFmpeg takes a file that ends early for a shorter recording, and makes room for as many samples as a table of MPEG-4 says, which
may be a few bytes that speak of billions. The formats: ISO/IEC 14496-12 (boxes), ISO/IEC 13818-7 (ADTS), RFC 8794 (EBML).
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.quarantine import BadSampleError, Reason

_PARENTS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf", b"edts")
_RUN_TABLES = (b"stts", b"ctts")
_MOST_BOXES = 100_000
_MOST_EDITS = 100
_MOST_INDEXED = 4_000_000
"""Entries that FFmpeg may make: it lists the samples of a file anew for each of its edits, at some 24 bytes each. Ten hours of
AAC at 96 kHz have 3.4 million samples."""
_EBML, _SEGMENT, _CLUSTER = 0x1A45DFA3, 0x18538067, 0x1F43B675
_ADTS_HEADER_BYTES = 7


def check(data: bytes, kind: str) -> None:
    """Raise BadSampleError (corrupt_media) if a file of kind MPEG-4, AAC or Matroska ends early, or its tables are impossible."""
    if kind == "MPEG-4":
        _check_boxes(data)
    elif kind == "AAC":
        _check_adts(data)
    else:
        _check_ebml(data)


def _check_boxes(data: bytes) -> None:
    num_samples = num_edits = num_bytes = 0
    for number, (name, begin, end) in enumerate(_boxes(data, 0, len(data))):
        if number >= _MOST_BOXES:
            raise _corrupt(f"more than {_MOST_BOXES} boxes")
        if name == b"stsz":
            size, count = _numbers(data, begin + 4, end, 2)
            num_samples += count
            num_bytes += count * max(1, size)
        elif name == b"stz2":
            num_samples += (count := _numbers(data, begin + 8, end, 1)[0])
            num_bytes += count
        elif name == b"trun":
            num_samples += (count := _numbers(data, begin + 4, end, 1)[0])
            num_bytes += count
        elif name in _RUN_TABLES:
            (entries,) = _numbers(data, begin + 4, end, 1)
            counts = _numbers(data, begin + 8, end, 2 * min(entries, len(data)))[::2]
            if sum(counts) > len(data):
                raise _corrupt(f"a table of {sum(counts)} samples in {len(data)} bytes")
        elif name == b"elst":
            num_edits += _numbers(data, begin + 4, end, 1)[0]
    if num_bytes > len(data):
        raise _corrupt(f"samples of {num_bytes} bytes or more in a file of {len(data)}")
    if num_edits > _MOST_EDITS:
        raise _corrupt(f"{num_edits} edits, and at most {_MOST_EDITS} are taken")
    if num_samples * max(1, num_edits) > _MOST_INDEXED:
        detail = f"{num_edits} edits of {num_samples} samples, and together they may have {_MOST_INDEXED} entries"
        raise BadSampleError(Reason.TOO_LARGE, f"{detail}: encode the recording anew")


def _boxes(data: bytes, begin: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, begin and end of the content of all boxes within a range, those inside of others too."""
    open_until = [stop]
    position = begin
    while open_until:
        if position + 8 > open_until[-1]:
            position = open_until.pop()
            continue
        size, name, head = int.from_bytes(data[position : position + 4], "big"), data[position + 4 : position + 8], 8
        if size == 1:
            size, head = int.from_bytes(data[position + 8 : position + 16], "big"), 16
        elif size == 0:
            size = open_until[-1] - position
        if size < head or position + size > open_until[-1]:
            raise _corrupt(f"the box {name!r} at byte {position} has {size} bytes, and {open_until[-1] - position} are left")
        yield name, position + head, position + size
        if name in _PARENTS:
            open_until.append(position + size)
            position += head
        else:
            position += size


def _numbers(data: bytes, begin: int, end: int, count: int) -> list[int]:
    """Return `count` numbers of 32 bits. Raises BadSampleError if they do not lie before `end`."""
    if begin + 4 * count > end:
        raise _corrupt(f"a table at byte {begin} is longer than its box")
    return [int.from_bytes(data[at : at + 4], "big") for at in range(begin, begin + 4 * count, 4)]


def _check_adts(data: bytes) -> None:
    position = 0
    while position < len(data) and not data.startswith(b"TAG", position):
        if data[position] != 0xFF or position + _ADTS_HEADER_BYTES > len(data) or data[position + 1] & 0xF6 != 0xF0:
            raise _corrupt(f"there is no frame of ADTS at byte {position}")
        length = (data[position + 3] & 3) << 11 | data[position + 4] << 3 | data[position + 5] >> 5
        if length < _ADTS_HEADER_BYTES or position + length > len(data):
            raise _corrupt(f"the frame at byte {position} has {length} bytes, and {len(data) - position} are left")
        position += length


def _check_ebml(data: bytes) -> None:
    """Look at each element of a file; of a Segment or Cluster of unknown size, as live streams have them, at those inside too."""
    position, is_live = 0, False
    while position < len(data):
        name, position = _vint(data, position, keep_marker=True)
        size, begin = _vint(data, position, keep_marker=False)
        if not is_live and name not in (_EBML, _SEGMENT):
            return  # what is behind the Segment is left to the demuxer
        if name in (_SEGMENT, _CLUSTER) and size == (1 << 7 * (begin - position)) - 1:
            position, is_live = begin, True
            continue
        if begin + size > len(data):
            raise _corrupt(f"the element at byte {begin} has {size} bytes, and {len(data) - begin} are left")
        position = begin + size


def _vint(data: bytes, position: int, *, keep_marker: bool) -> tuple[int, int]:
    """Return a number of variable length, and where it ends."""
    first = data[position] if position < len(data) else 0
    length = 9 - first.bit_length()
    if first == 0 or position + length > len(data):
        raise _corrupt(f"there is no element at byte {position}")
    value = int.from_bytes(data[position : position + length], "big")
    return value if keep_marker else value & (1 << 7 * length) - 1, position + length


def _corrupt(detail: str) -> BadSampleError:
    return BadSampleError(Reason.CORRUPT_MEDIA, detail)
