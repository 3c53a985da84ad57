"""Media inside of typed parts: the forms that Qwen-VL's and OpenAI's data have, and what two things said at once become."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.preprocessor.records.record_to_sample import Image, to_sample
from headrace.preprocessor.sources import open_shard
from headrace.source_spec import SourceSpec
from tests.unit.preprocessor.conftest import WriteTar
from tests.unit.preprocessor.records.conversing import asked, refusal, said

ENCODED = base64.b64encode(b"b.jpg").decode()
WHAT = {"type": "text", "text": "What?"}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "b.jpg"},
        {"type": "image", "image": b"b.jpg"},
        {"type": "image", "image": {"bytes": b"b.jpg", "path": "z.jpg"}},
        {"type": "image", "image": {"path": "b.jpg"}},
        {"type": "image", "image": {"url": "b.jpg"}},
        {"type": "image", "image": f"data:image/jpeg;base64,{ENCODED}"},
        {"type": "image", "image_url": "b.jpg", "max_pixels": 1024},
        {"type": "image_url", "image_url": "b.jpg"},
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{ENCODED}", "detail": "auto"}},
        {"type": "image", "image": "file://b.jpg"},
        {"type": "image", "path": "b.jpg"},
        {"type": "image", "url": "b.jpg"},
        {"type": "image", "bytes": b"b.jpg", "path": None},
        {"type": "image", "base64": ENCODED},
        {"type": "image", "data": f"data:;base64,{ENCODED}"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": ENCODED}},
        {"image": "b.jpg"},
        {"type": None, "text": None, "image": "b.jpg"},
    ],
    ids=str,
)
def test_an_image_inside_of_a_part_takes_its_place(part: dict[str, Any]) -> None:
    assert said(asked([WHAT, part])) == ["user: What?[b.jpg]", "assistant: A barn."]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "audio", "audio": "b.jpg"},
        {"type": "audio", "audio_url": "b.jpg"},
        {"type": "audio_url", "audio_url": {"url": "b.jpg"}},
        {"type": "input_audio", "input_audio": {"data": ENCODED, "format": "wav"}},
        {"audio": "b.jpg"},
    ],
    ids=str,
)
def test_a_recording_inside_of_a_part_takes_its_place(part: dict[str, Any]) -> None:
    assert said(asked([part, WHAT])) == ["user: (b.jpg)What?", "assistant: A barn."]


def test_parts_of_one_row_of_a_table_have_all_fields() -> None:
    """Those that a part does not have are null there, or objects of nulls."""
    nothing = {"text": None, "image": {"bytes": None, "path": None}, "audio": None, "index": None}
    parts = [nothing | {"type": "image", "image": {"bytes": b"a", "path": None}}, nothing | WHAT]
    assert said(asked(parts)) == ["user: [a]What?", "assistant: A barn."]
    assert said(asked([nothing | {"type": "image"}, nothing | WHAT], images=["a"])) == ["user: [a]What?", "assistant: A barn."]


@pytest.mark.parametrize("url", ["https://example.org/a.jpg", "HTTP://example.org/a.jpg"])
def test_nothing_is_downloaded_from_an_address_in_the_data(url: str) -> None:
    sentence = f"is the address {url}, and nothing is downloaded from where data say"
    assert refusal(asked([{"type": "image", "image": url}])) == (
        f"missing_media: messages[0].content[0].image {sentence}: download it beforehand and write the name of its file there"
    )
    assert sentence in refusal(asked([{"type": "image_url", "image_url": {"url": url}}]))
    assert sentence in refusal({"caption": "A barn.", "image": url})
    assert sentence in refusal({"caption": "A barn.", "images": [url]})


def test_all_parts_say_which_medium_they_are_or_none_does() -> None:
    mixed = [{"type": "image", "image": "a"}, {"type": "image"}]
    assert "1 of 2 places for an image say which one it is" in refusal(asked(mixed, images=["b"]))
    assert said(asked([{"type": "image", "image": "a"}, {"type": "audio"}], audios=["b"]))[0] == "user: [a](b)"


def test_a_list_beside_the_parts_may_only_say_the_same() -> None:
    parts = [{"type": "image", "image": "a"}, {"type": "image", "image": "b"}]
    assert said(asked(parts, images=["a", "b"]))[0] == said(asked(parts))[0] == "user: [a][b]"
    assert refusal(asked(parts, images=["b", "a"])).startswith("placeholder_mismatch: images lists other media")
    assert refusal(asked(parts, image="c")).startswith("placeholder_mismatch: image lists other media")
    assert said(asked(parts, image="c"), ignore=("image",))[0] == "user: [a][b]"


def test_members_that_no_part_names_are_refused() -> None:
    parts = [{"type": "image", "image": "1.jpg"}, {"type": "image", "image": "0.JPG"}]
    assert said(asked(parts), ("0.jpg", "1.jpg"))[0] == "user: [1.jpg][0.JPG]"
    assert refusal(asked(parts[:1]), ("0.jpg", "1.jpg")).startswith("unused_media: nothing uses the member 0.jpg")
    assert said(asked([{"type": "image"}, {"type": "image"}]), ("0.jpg", "1.jpg"))[0] == "user: [0.jpg][1.jpg]"


@pytest.mark.parametrize(
    ("part", "detail"),
    [
        ({"type": "video"}, "expected a part of type text, image or audio, got the type 'video'"),
        ({"type": "thinking", "thinking": "Hm."}, "got the type 'thinking'"),
        ({"type": ["image"]}, "got the type ['image']"),
        ({"image": "a", "audio": "b"}, "got the fields image, audio"),
        ({"a": 1}, "got the fields a"),
        ("What?", "expected a part of type text, image or audio, got What?"),
        ({"type": "image", "image": 7}, "content[0].image: expected a name or {bytes, path}, got int"),
        ({"type": "image", "image": ["a"]}, "content[0].image: expected a name or {bytes, path}, got list"),
        ({"type": "image", "image": {"width": 3}}, "content[0].image: expected a name or {bytes, path}, got dict"),
        ({"type": "image", "image": "a", "path": "b"}, "says in image and in path which medium it is"),
        ({"type": "image", "image": "a", "index": 0}, "says in image and in index which medium it is"),
        ({"type": "image", "image": "a", "text": "A barn."}, "is of the type 'image' and has 'text' too"),
        ({"type": "image", "image": "a", "audio": "b"}, "is of the type 'image' and has 'audio' too"),
        ({"type": "text", "text": "What?", "image": "a"}, "is of the type 'text' and has 'image' too"),
        ({"type": "text", "text": "What?", "video": "a"}, "is of the type 'text' and has 'video' too"),
    ],
    ids=str,
)
def test_parts_that_are_not_understood_are_named(part: Any, detail: str) -> None:
    error = refusal(asked([part]))
    assert error.startswith("schema_error: messages[0].content[0]")
    assert detail in error


def test_a_field_that_says_it_twice_can_be_ignored() -> None:
    part = {"type": "image", "image": "a", "url": "https://example.org/a.jpg"}
    assert "says in image and in url" in refusal(asked([part]))
    assert said(asked([part]), ignore=("url",))[0] == "user: [a]"


def test_a_data_url_that_is_no_base64_is_refused() -> None:
    assert refusal(asked([{"type": "image", "image": "data:image/png;base64,%%%"}])).startswith(
        "corrupt_media: messages[0].content[0].image is not base64"
    )
    assert "expected a data URL in base64" in refusal(asked([{"type": "image", "image": "data:image/svg+xml,<svg/>"}]))
    assert refusal(asked([{"type": "image", "base64": "a.jpg"}])).startswith("corrupt_media: messages[0].content[0].base64")


def test_as_lines_members_and_rows(tmp_path: Path, write_tar: WriteTar, jpeg: bytes, source: SourceSpec) -> None:
    """The same sample as JSONL beside a file, as the json of a tar, and as nested structs of Parquet."""
    record = asked([{"type": "image", "image": "a.jpg"}, WHAT])
    (tmp_path / "a.jpg").write_bytes(jpeg)
    (tmp_path / "lines.jsonl").write_text(json.dumps(record))
    in_tar = asked([{"type": "image", "image": "jpg"}, WHAT])
    row = asked(
        [
            {"type": "image", "text": None, "image": {"bytes": jpeg, "path": "a.jpg"}},
            {"type": "text", "text": "What?", "image": None},
        ],
        [{"type": "text", "text": "A barn.", "image": None}],
    )
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    samples = []
    for path in (tmp_path / "lines.jsonl", write_tar({"k.jpg": jpeg, "k.json": in_tar}), tmp_path / "rows.parquet"):
        with open_shard(str(path), source) as shard:
            samples.append(to_sample(shard.read(0), source.mapping))
    assert samples[0] == samples[1] == samples[2]
    assert samples[0].turns[0].segments[0] == Image(data=jpeg)
