"""The tar header reader: agrees with tarfile on sound archives, and tells what is wrong with the others."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from headrace.preprocessor.sources.blob import Blob
from headrace.preprocessor.sources.tar import Damage, TarMember, scan
from headrace.quarantine import Reason
from tests.examples import with_examples

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


class Bytes(Blob):
    """A file in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def pread(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]

    def close(self) -> None:
        pass


def archive(members: dict[str, bytes], tar_format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def contents(data: bytes) -> dict[str, bytes]:
    entries = list(scan(Bytes(data)))
    assert all(isinstance(entry, TarMember) for entry in entries), entries
    return {entry.name: data[entry.offset : entry.offset + entry.size] for entry in entries if isinstance(entry, TarMember)}


def damage(data: bytes) -> list[tuple[Reason, str | None]]:
    return [(entry.reason, entry.name) for entry in scan(Bytes(data)) if isinstance(entry, Damage)]


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=60)


@given(st.dictionaries(NAMES, st.binary(max_size=1500), max_size=6), st.sampled_from(FORMATS[1:]))
def test_reads_what_tarfile_writes(members: dict[str, bytes], tar_format: int) -> None:
    assert contents(archive(members, tar_format)) == members


@pytest.mark.parametrize("tar_format", FORMATS)
@pytest.mark.parametrize("length", [99, 100, 101, 155, 170])
def test_long_names(tar_format: int, length: int) -> None:
    name = "folder/" * 10 + "n" * (length - 70)
    assert contents(archive({name: b"x"}, tar_format)) == {name: b"x"}


def test_name_longer_than_a_block() -> None:
    name = "d/" * 600 + "n.jpg"
    for tar_format in FORMATS[1:]:
        assert contents(archive({name: b"x", "b.jpg": b"y"}, tar_format)) == {name: b"x", "b.jpg": b"y"}


def test_concatenated_archives_are_read_whole() -> None:
    assert contents(archive({"a": b"1"}) + archive({"b": b"2"})) == {"a": b"1", "b": b"2"}


def test_base_256_size() -> None:
    """GNU tar writes sizes from 8 GiB on in base 256; the member is then missing from a short file."""
    info = tarfile.TarInfo("big.bin")
    info.size = 9 * 2**30
    assert damage(info.tobuf(tarfile.GNU_FORMAT)) == [(Reason.ARCHIVE_TRUNCATED, "big.bin")]


def test_pax_size_wins_over_the_header() -> None:
    info = tarfile.TarInfo("big.bin")
    info.pax_headers = {"size": str(9 * 2**30)}
    assert damage(info.tobuf(tarfile.PAX_FORMAT)) == [(Reason.ARCHIVE_TRUNCATED, "big.bin")]


def test_scan_goes_on_behind_a_bad_header() -> None:
    data = bytearray(archive({"a": b"1", "b": b"2", "c": b"3"}, tarfile.USTAR_FORMAT))
    data[1024] ^= 1
    entries = list(scan(Bytes(bytes(data))))
    assert [entry.name for entry in entries] == ["a", "c", "c"]
    assert isinstance(entries[1], Damage)
    assert entries[1].reason is Reason.ARCHIVE_CORRUPT


def test_negative_size_is_a_bad_header() -> None:
    """A size of -1 with a sound checksum must not send the reader backwards."""
    header = bytearray(tarfile.TarInfo("a").tobuf(tarfile.USTAR_FORMAT))
    header[124:136] = b"-0000000512\0"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    assert damage(bytes(header)) == [(Reason.ARCHIVE_CORRUPT, "a")]


@pytest.mark.parametrize("payload", [b"0 path=x\n", b"99 path=x\n", b"path=x\n", b"9 path x\n", b"8 path=x\n"])
def test_malformed_pax_record(payload: bytes) -> None:
    info = tarfile.TarInfo("pax")
    info.type = tarfile.XHDTYPE
    info.size = len(payload)
    data = info.tobuf(tarfile.USTAR_FORMAT) + payload.ljust(512, b"\0") + archive({"next": b"1"}, tarfile.USTAR_FORMAT)
    entries = list(scan(Bytes(data)))
    assert [type(entry) for entry in entries] == [Damage, TarMember]
    assert entries[1].name == "next"


def test_name_that_is_not_utf8() -> None:
    header = bytearray(tarfile.TarInfo("aXb.json").tobuf(tarfile.USTAR_FORMAT))
    header[1] = 0xE9
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    assert damage(bytes(header)) == [(Reason.ENCODING_ERROR, "a\\xe9b.json")]


def test_sum_of_signed_bytes_is_a_checksum_too() -> None:
    """Some old writers summed the header as signed chars, which differs where a name is not ASCII."""
    header = bytearray(tarfile.TarInfo("é.json").tobuf(tarfile.GNU_FORMAT))
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % (sum(header) - 256 * sum(byte > 127 for byte in header))
    assert contents(bytes(header)) == {"é.json": b""}


def test_every_cut_is_reported_or_at_a_boundary() -> None:
    """Wherever an archive is cut, its whole members come out unchanged, and a partial one is reported."""
    members = {"a.txt": b"x" * 700, "b.txt": b"y" * 10, "c.txt": b"z" * 600}
    data = archive(members, tarfile.USTAR_FORMAT)
    boundaries = {0: 0, 512 + 700: 1, 1536 + 512 + 10: 2, 2560 + 512 + 600: 3}
    for cut in range(1, 2560 + 1536 + 1, 3):
        entries = list(scan(Bytes(data[:cut])))
        whole = [entry for entry in entries if isinstance(entry, TarMember)]
        assert len(whole) == max(count for end, count in boundaries.items() if end <= cut)
        for entry in whole:
            assert data[entry.offset : entry.offset + entry.size] == members[entry.name]
        started = sum(start < cut for start in (0, 1536, 2560))
        broken = [entry for entry in entries if isinstance(entry, Damage)]
        assert len(broken) == started - len(whole)
        assert all(entry.reason is Reason.ARCHIVE_TRUNCATED for entry in broken)


@with_examples(200, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 255)), min_size=1, max_size=8))
def test_any_damage_ends_in_entries_inside_of_the_file(changes: list[tuple[int, int]]) -> None:
    data = bytearray(archive({"a" * 120: b"1" * 600, "b": b"2" * 100}, tarfile.GNU_FORMAT)[:4096])
    for position, value in changes:
        data[position] = value
    for entry in scan(Bytes(bytes(data))):
        if isinstance(entry, TarMember):
            assert 0 <= entry.offset <= entry.offset + entry.size <= len(data)


def test_zero_bytes_and_only_zeros(tmp_path: Path) -> None:
    assert damage(b"") == [(Reason.ARCHIVE_TRUNCATED, None)]
    assert damage(bytes(10_240)) == []
    assert damage(bytes(100)) == []
