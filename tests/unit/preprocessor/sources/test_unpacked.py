"""Packed shards that end early are unpacked as far as they go."""

from __future__ import annotations

import bz2
import gzip
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headrace.preprocessor.sources.blob import open_blob
from headrace.preprocessor.sources.unpacked import unpack
from headrace.quarantine import Reason

TEXT = "\n".join(map(str, np.random.default_rng(0).integers(0, 10**9, 250_000))).encode()
MOST_LOST = {"gzip": 0, "bz2": 0, "zstd": 2**16}
PACK = {"gzip": gzip.compress, "bz2": bz2.compress, "zstd": lambda data: pa.compress(data, "zstd", asbytes=True)}
UNPACK = {"gzip": lambda: zlib.decompressobj(31), "bz2": bz2.BZ2Decompressor}


@pytest.mark.parametrize("codec", PACK)
@pytest.mark.parametrize("share", [0.2, 0.9, 0.9999])
def test_what_is_sound_before_an_early_end_is_kept(codec: str, share: float, tmp_path: Path) -> None:
    packed = PACK[codec](TEXT)
    cut = packed[: int(share * len(packed))]
    (tmp_path / "cut").write_bytes(cut)
    blob, failure = unpack(open_blob(str(tmp_path / "cut")), "cut", codec)
    got = blob.pread(0, len(TEXT))
    assert failure is not None
    assert failure.reason is Reason.ARCHIVE_TRUNCATED
    assert TEXT.startswith(got)
    sound = len(UNPACK[codec]().decompress(cut)) if codec in UNPACK else int(share * len(TEXT)) - 2**18
    assert len(got) >= sound - MOST_LOST[codec]


@pytest.mark.parametrize("codec", PACK)
def test_a_whole_shard_is_whole(codec: str, tmp_path: Path) -> None:
    (tmp_path / "whole").write_bytes(PACK[codec](TEXT))
    blob, failure = unpack(open_blob(str(tmp_path / "whole")), "whole", codec)
    assert failure is None
    assert blob.pread(0, 2 * len(TEXT)) == TEXT


@pytest.mark.parametrize(
    ("codec", "damaged_byte"), [("gzip", 0), ("gzip", 60), ("bz2", 0), ("bz2", 60), ("zstd", 0)]
)  # a frame of zstd need not have a checksum
def test_damage_in_a_later_stream_is_said(codec: str, damaged_byte: int, tmp_path: Path) -> None:
    streams = [bytearray(PACK[codec](TEXT[begin : begin + 10_000])) for begin in range(0, 50_000, 10_000)]
    streams[3][damaged_byte] ^= 0xFF
    (tmp_path / "damaged").write_bytes(b"".join(streams))
    blob, failure = unpack(open_blob(str(tmp_path / "damaged")), "damaged", codec)
    assert failure is not None
    assert failure.reason is Reason.ARCHIVE_CORRUPT
    assert TEXT[:40_000].startswith(blob.pread(0, len(TEXT)))


def test_streams_of_bz2_one_after_the_other_are_one_shard(tmp_path: Path) -> None:
    (tmp_path / "whole").write_bytes(b"".join(bz2.compress(TEXT[begin : begin + 1000]) for begin in range(0, 50_000, 1000)))
    blob, failure = unpack(open_blob(str(tmp_path / "whole")), "whole", "bz2")
    assert failure is None
    assert blob.pread(0, 2 * len(TEXT)) == TEXT[:50_000]


def test_what_is_no_stream_behind_one_of_bz2_is_said(tmp_path: Path) -> None:
    (tmp_path / "more").write_bytes(bz2.compress(TEXT[:1000]) + b"more")
    blob, failure = unpack(open_blob(str(tmp_path / "more")), "more", "bz2")
    assert failure is not None
    assert failure.reason is Reason.ARCHIVE_CORRUPT
    assert blob.pread(0, len(TEXT)) == TEXT[:1000]
