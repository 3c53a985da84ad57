"""JSONL shards: lines, and media files that must lie inside of the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.manifest import ShardInfo
from headrace.message_codec import rejection_message
from headrace.preprocessor.job_work import JobWork
from headrace.preprocessor.sources.jsonl import JsonlShard
from headrace.quarantine import BadSampleError, Reason
from headrace.sample import SampleRef
from headrace.spec import parse_spec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "a.jpg").write_bytes(b"picture")
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "out.jpg").symlink_to(tmp_path / "secret")
    (folder / "in.jpg").symlink_to(folder / "images" / "a.jpg")
    os.mkfifo(folder / "pipe.jpg")
    (folder / "s.jsonl").write_bytes(b'{"caption": "one"}\n\n  \nnot json\n{"caption": "two"}\r\n\xff\n{"caption": "last"}')
    return folder


def test_bad_lines_are_rejected_and_the_others_go_on(folder: Path) -> None:
    with JsonlShard(str(folder / "s.jsonl")) as shard:
        assert [shard.key(row) for row in range(shard.num_rows)] == ["0", "3", "4", "5", "6"]
        good = {"0": "one", "4": "two", "6": "last"}
        bad = {"3": Reason.SCHEMA_ERROR, "5": Reason.ENCODING_ERROR}
        for row in range(shard.num_rows):
            key = shard.key(row)
            if key in good:
                assert shard.read(row).fields == {"caption": good[key]}
            else:
                with pytest.raises(BadSampleError) as caught:
                    shard.read(row)
                assert caught.value.reason is bad[key]


def test_media_inside(folder: Path) -> None:
    with JsonlShard(str(folder / "s.jsonl")) as shard:
        load = shard.read(0).load
        assert load("images/a.jpg") == load("./images/a.jpg") == load("in.jpg") == b"picture"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../secret", Reason.UNSAFE_MEMBER_NAME),
        ("images/../../secret", Reason.UNSAFE_MEMBER_NAME),
        ("/etc/hostname", Reason.UNSAFE_MEMBER_NAME),
        ("out.jpg", Reason.UNSAFE_MEMBER_NAME),
        ("file:///etc/hostname", Reason.UNSAFE_MEMBER_NAME),
        ("a\0b", Reason.UNSAFE_MEMBER_NAME),
        ("gone.jpg", Reason.MISSING_MEDIA),
        ("images/a.jpg/b", Reason.MISSING_MEDIA),
        ("n" * 300, Reason.MISSING_MEDIA),
        ("images", Reason.UNSUPPORTED_MEMBER_TYPE),
        ("", Reason.UNSUPPORTED_MEMBER_TYPE),
        ("pipe.jpg", Reason.UNSUPPORTED_MEMBER_TYPE),
        ("\ud800", Reason.ENCODING_ERROR),
    ],
)
def test_media_that_are_refused(folder: Path, name: str, reason: Reason) -> None:
    with JsonlShard(str(folder / "s.jsonl")) as shard, pytest.raises(BadSampleError) as caught:
        shard.read(0).load(name)
    assert caught.value.reason is reason


def test_remote(folder: Path) -> None:
    for name, data in {"s.jsonl": b'{"caption": "one"}', "images/a.jpg": b"picture"}.items():
        with fsspec.open(f"memory://jsonl/{name}", "wb") as file:
            file.write(data)
    with JsonlShard("memory://jsonl/s.jsonl") as shard:
        record = shard.read(0)
        assert record.load("images/a.jpg") == b"picture"
        for name, reason in {"gone.jpg": Reason.MISSING_MEDIA, "../s.jsonl": Reason.UNSAFE_MEMBER_NAME}.items():
            with pytest.raises(BadSampleError) as caught:
                record.load(name)
            assert caught.value.reason is reason


@given(st.lists(st.sampled_from([b"{}", b"", b"  ", b'{"a": 1}', b"[" * 70, b" x "]), max_size=30), st.booleans())
def test_lines_are_found_as_splitlines_finds_them(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ends: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "s.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n" * ends)
    with JsonlShard(str(path)) as shard:
        keys = [shard.key(row) for row in range(shard.num_rows)]
    assert keys == [str(index) for index, line in enumerate(lines) if line.strip()]


def test_line_that_spans_chunks(tmp_path: Path) -> None:
    texts = ["x" * (2**20 - 20), "y" * (3 * 2**20), "z"]
    path = tmp_path / "s.jsonl"
    path.write_text("".join(f'{{"caption": "{text}"}}\n' for text in texts))
    with JsonlShard(str(path)) as shard:
        assert [shard.read(row).fields["caption"] for row in range(3)] == texts


SURROGATES = {
    "a text": {"caption": "a \ud800 b"},
    "a value of a wrong kind": {"conversations": "\udfff"},
    "a field's name": {"\udc00": "x"},
    "a turn's key": {"messages": [{"\udc00": "x"}]},
    "a role": {"messages": [{"role": "\ud834", "content": "x"}]},
    "a medium's name": {"caption": "x", "image": "\udc00.jpg"},
}


def test_a_lone_surrogate_is_its_samples_damage(tmp_path: Path) -> None:
    """JSON can write what UTF-8 cannot; no message could carry it."""
    path = tmp_path / "s.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*SURROGATES.values(), {"caption": "good"}]))
    job = JobWork("job", parse_spec({"name": "job", "sources": [{"path": str(tmp_path), "name": "s"}]}))
    job.shards = (ShardInfo(source=0, url=str(path), name="s/s.jsonl"),)
    good, rejected = job.probe([SampleRef(sample_id=row, shard=0, row=row) for row in range(len(SURROGATES) + 1)])
    assert [sample_id for sample_id, _ in good] == [len(SURROGATES)]
    assert [item.sample_id for item in rejected] == list(range(len(SURROGATES)))
    for item in rejected:
        assert rejection_message(item).SerializeToString()
        assert item.reason in (Reason.ENCODING_ERROR, Reason.SCHEMA_ERROR)
    assert "\\udc00" in rejected[2].detail
