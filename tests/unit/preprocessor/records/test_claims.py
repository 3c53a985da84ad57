"""Media that nothing uses: refused with what to do, left out where the mapping says so; and what is no medium stays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.mapping import MappingSpec
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.records.record_to_sample import Audio, Image, Text, to_sample
from headrace.preprocessor.sources import open_shard
from headrace.quarantine import BadSampleError, Reason
from headrace.source_spec import SourceSpec
from headrace.spec import parse_spec
from tests.unit.preprocessor.conftest import WriteTar

CHAT = [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "this"}]
STRUCT = {"bytes": b"film", "path": "a.mp4"}


def shown(fields: dict[str, Any], members: tuple[str, ...] = (), **mapping: Any) -> list[str]:
    """The kinds of the segments."""
    sample = to_sample(Record(key="k", fields=fields, members=members, load=str.encode), MappingSpec(**mapping))
    return [type(segment).__name__ for segment in sample.segments]


def refusal(fields: dict[str, Any], members: tuple[str, ...] = (), **mapping: Any) -> str:
    with pytest.raises(BadSampleError) as caught:
        shown(fields, members, **mapping)
    assert caught.value.reason is Reason.UNUSED_MEDIA
    return caught.value.detail


@pytest.mark.parametrize(
    ("members", "named"),
    [
        (("mp4",), "mp4"),
        (("jpg", "seg.npy"), "seg.npy"),
        (("jpg", "clip.mp4"), "clip.mp4"),
        (("jpg", "depth.exr"), "depth.exr"),
        (("pdf",), "pdf"),
        (("jpg", "pickle"), "pickle"),
    ],
)
def test_a_member_that_nothing_uses_is_named(members: tuple[str, ...], named: str) -> None:
    assert f"nothing uses the member {named}: " in refusal({"txt": "A film."}, members)
    assert f"list {named!r} under the mapping's ignore" in refusal({"txt": "A film."}, members)
    assert shown({"txt": "A film."}, members, ignore=(named,))[-1] == "Text"
    assert shown({"txt": "A film."}, members, ignore=(named.rsplit(".", 1)[-1],))[-1] == "Text"


def test_a_picture_that_the_annotation_does_not_name_is_refused() -> None:
    fields = {"texts": ["<image>"], "images": ["0.jpg"]}
    assert "the member 1.jpg: name it in the mapping's images, or list" in refusal(fields, ("0.jpg", "1.jpg"))
    assert shown(fields, ("0.jpg", "1.jpg"), ignore=("1.jpg",)) == ["Image"]
    assert shown({"texts": ["<image>"], "images": ["JPG"]}, ("jpg",)) == ["Image"]
    assert "the member jpg" in refusal({"txt": "a", "images": None}, ("jpg",))


@pytest.mark.parametrize("field", ["mask", "seg_map", "depth", "image2", "image_2", "target_image", "image_b", "reference_image"])
def test_another_picture_beside_the_used_one_is_refused(field: str) -> None:
    fields = {"caption": "a cat", "image": "a.jpg", field: "b/a.jpg"}
    assert f"nothing uses 'b/a.jpg', which {field} names" in refusal(fields)
    assert shown(fields, ignore=(field,)) == shown(fields, images="image") == ["Image", "Text"]


@pytest.mark.parametrize(
    ("turn", "field"),
    [
        ({"content": "?", "image_path": "a.jpg"}, "messages[0].image_path"),
        ({"content": "?", "attachments": ["a.jpg"]}, "messages[0].attachments"),
        ({"content": "?", "media": [{"path": "a.mp4"}]}, "messages[0].media"),
        ({"content": [{"type": "text", "text": "?", "image_path": "a.jpg"}]}, "messages[0].content[0].image_path"),
    ],
)
def test_a_medium_that_a_turn_names_beside_its_words_is_refused(turn: dict[str, Any], field: str) -> None:
    fields = {"messages": [{"role": "user", **turn}, {"role": "assistant", "content": "red"}]}
    assert f"nothing uses what {field} holds" in refusal(fields)
    assert shown(fields, ignore=(field.rpartition(".")[2],)) == ["Text", "Text"]


@pytest.mark.parametrize("field", ["image_id", "imageId", "video_ids"])
def test_a_text_about_a_medium_that_is_elsewhere_is_refused(field: str) -> None:
    assert f"the medium of which {field} speaks" in refusal({"caption": "A man.", field: 17})
    assert shown({"caption": "A man.", field: 17}, ignore=(field,)) == ["Text"]
    assert shown({"caption": "A man.", "image": "a.jpg", field: 17}) == ["Image", "Text"]


def test_a_part_of_a_recording_is_not_the_recording() -> None:
    fields = {"audio": "a.wav", "start": 4.0, "end": 5.5, "text": "later words"}
    with pytest.raises(BadSampleError, match="schema_error: the recording is meant from its start 4 on"):
        shown(fields)
    assert shown(fields, ignore=("start",)) == shown({**fields, "start": 0.0}) == ["Audio", "Text"]
    assert shown({**fields, "audio": {"bytes": b"s", "path": "a.wav"}}) == ["Audio", "Text"], "in a table it is cut already"


def test_a_map_of_pictures_is_seen() -> None:
    assert "nothing uses what pictures holds" in refusal({"caption": "A man.", "pictures": [("front", b"j")]})


@pytest.mark.parametrize("field", ["file_name", "image_path", "original", "source_url"])
def test_another_name_of_the_used_picture_is_none(field: str) -> None:
    assert shown({"caption": "a cat", "image": "a.jpg", field: "b/a.jpg"}) == ["Image", "Text"]


@pytest.mark.parametrize(
    "members", [("jpg", "jpeg"), ("jpg", "seg.png"), ("jpg", "1.jpg"), ("0.jpg", "0.png"), ("left.jpg", "right.jpg")]
)
def test_which_picture_is_meant_must_be_said(members: tuple[str, str]) -> None:
    one, other = members
    assert f"nothing says which of the members {one}, {other} are meant" in refusal({"txt": "a cat"}, members)
    assert shown({"txt": "a cat"}, members, images=one) == ["Image", "Text"]
    assert shown({"txt": "a cat"}, members, ignore=(other,)) == ["Image", "Text"]
    assert shown({"texts": ["<image>", "<image>"], "images": [one, other]}, members) == ["Image", "Image"]


def test_a_former_path_means_the_only_picture_of_a_tar() -> None:
    """As annotations of LLaVA's have it after they and their pictures were packed."""
    fields = {"conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "A barn."}]}
    former = {**fields, "image": "coco/train2017/0001.jpg"}
    assert shown(former, ("jpg",)) == shown(former, ("jpeg",)) == shown(former, ("jpg", "cls")) == ["Image", "Text", "Text"]
    assert shown({"texts": ["<audio>"], "audio": "a/0001.wav"}, ("jpg", "wav"), ignore=("jpg",)) == ["Audio"]
    for members in (("seg.jpg",), ("png",), ("jpg", "1.jpg"), ("jpg", "png")):
        assert "nothing uses the member" in refusal(former, members), "which one it was is not certain"
    assert "nothing uses the member jpg" in refusal({**fields, "image": ["a/0001.jpg", "a/0002.jpg"]}, ("jpg",))


def test_two_recordings_are_told_apart_alike() -> None:
    assert "wav, flac are meant" in refusal({"txt": "hello"}, ("wav", "flac"))
    assert shown({"txt": "hello"}, ("0.wav", "1.flac", "jpg")) == ["Image", "Audio", "Audio", "Text"]
    assert shown({"txt": "hello"}, ("img_1.png", "img_2.jpg", "img_10.png")) == ["Image"] * 3 + ["Text"]


def test_a_picture_of_pnm_is_a_picture() -> None:
    """Which no decoder takes: the sample is refused for that, by name."""
    assert shown({"txt": "a cat"}, ("ppm",)) == ["Image", "Text"]


@pytest.mark.parametrize(
    "fields",
    [
        {"scan": {"bytes": b"x", "path": None}},
        {"img": {"bytes": None, "path": "a.jpg"}},
        {"video": STRUCT},
        {"frames": [STRUCT, STRUCT]},
        {"embedding": b"x"},
        {"file_name": "0001.jpg"},
        {"file_names": ["0001.jpg", "2.jpg"]},
        {"audio_filepath": "/data/speech/1"},
        {"audioFilePath": "x"},
        {"image_path": "0001"},
        {"image_url": "https://example.org/1"},
        {"video": "v_17"},
        {"videos": ["v_17"]},
        {"wav": "a"},
        {"source": "clips/a.mp4"},
        {"url": "https://example.org/a.jpg?size=full"},
        {"meta": {"file_name": "a.jpg"}},
        {"media": [{"kind": "image", "file": "a.jpg"}]},
        {"pages": [{"image": STRUCT, "number": 1}]},
        {"scans": [None, STRUCT]},
        {"picture": {"data": b"x", "format": "jpg"}},
        {"data": "iVBORw0KGgo" + "A" * 200},
        {"thumbnail": "data:image/png;base64," + "A" * 200},
    ],
    ids=str,
)
def test_a_field_that_holds_or_names_a_medium_that_nothing_uses_is_named(fields: dict[str, Any]) -> None:
    (name,) = fields
    assert re.search(rf"\b{name}\b", refusal({"text": "A caption.", **fields}))
    assert shown({"text": "A caption.", **fields}, ignore=(name,)) == ["Text"]


@pytest.mark.parametrize(
    "fields",
    [
        {
            "url": "https://example.org/page.html",
            "key": "000001",
            "sha256": "00ab",
            "exif": {"Image Model": "X"},
            "status": "success",
        },
        {"id": "coco/0001", "source": "a.b", "license": "CC-BY 4.0", "title": "How image files work.jpg, explained"},
        {"image_width": 640, "width": 640, "similarity": 0.3, "nsfw": None},
        {"image": [], "video": None, "videos": [], "file_name": "", "img": {"bytes": None, "path": None}},
        {"tokens": [1, 2], "meta": {"title": "A barn", "scores": [[0.5]]}, "language": "en", "url": "https://example.org/a.pdf"},
        {"code": "iVBORw0KGgo", "path": "/9j/short"},
    ],
    ids=str,
)
def test_what_is_no_medium_may_stand_beside_the_text(fields: dict[str, Any]) -> None:
    assert shown({"text": "A caption.", **fields}, ("cls", "idx", "meta.json", "caption.txt", "html", "__key__.txt")) == ["Text"]


def test_the_name_that_a_picture_had_may_stand_beside_it() -> None:
    fields = {"txt": "A caption.", "file_name": "0001.jpg", "image_path": "train2017/0001.jpg", "id": "0001.jpg"}
    assert shown(fields, ("jpg",)) == ["Image", "Text"]
    assert "'a.wav', which file_name names" in refusal({**fields, "file_name": "a.wav"}, ("jpg",))
    assert shown({**fields, "file_name": "a.wav"}, ("jpg", "wav")) == ["Image", "Audio", "Text"]


@pytest.mark.parametrize(
    "placeholder",
    [
        "<video>",
        "<|video_pad|>",
        "<|AUDIO|>",
        "<ImageHere>",
        "<|image|>",
        "<|image_1|>",
        "<|vision_start|><|image_pad|>",
        "<start_of_image>",
        "<image 1>",
        "<image_2>",
        "[IMG]",
        "<speech>",
        "<image-placeholder>",
        "<img>images/a.jpg</img>",
    ],
)
def test_another_trainers_placeholder_is_not_learnt(placeholder: str) -> None:
    fields = {"messages": [{"role": "user", "content": f"{placeholder} what?"}, {"role": "assistant", "content": "this"}]}
    assert f"{placeholder} in the text stands for a medium" in refusal(fields)
    assert shown(fields, ignore=(placeholder,)) == ["Text", "Text"]
    fields["messages"][0]["content"] = [{"type": "text", "text": placeholder}]
    assert shown(fields) == ["Text", "Text"], "text of a typed part is text"
    assert shown({"caption": f"{placeholder}", "image": "a"}, image_placeholder=placeholder) == ["Image"]


@pytest.mark.parametrize("text", ["<IMAGE>\nWhat?", "What?\n<img>", " <Image> \nWhat?"])
def test_a_placeholder_on_a_line_of_its_own_is_one(text: str) -> None:
    assert refusal({"caption": text}).startswith(f"{re.findall('<.*>', text)[0]} in the text")


def test_a_picture_that_img2dataset_could_not_fetch_is_missing() -> None:
    """Its row has a null in the place of the picture, and would be a caption alone."""
    failed = {"url": "https://example.org/1", "key": "1", "status": "failed_to_download", "error_message": "404", "jpg": None}
    row = Record(key="k", fields={"caption": "A barn.", **failed}, load=str.encode)
    with pytest.raises(BadSampleError, match="the status is failed_to_download") as caught:
        to_sample(row, MappingSpec(images="jpg"))
    assert caught.value.reason is Reason.MISSING_MEDIA
    assert shown({"text": "A log.", "status": "failed", "error_message": "404"}) == ["Text"]


@pytest.mark.parametrize(
    "text", ["[IMG]https://example.org/a.jpg[/IMG]", "<|image_pad|>", "<images 1>", "the <img> of HTML", "<img>"]
)
def test_what_only_looks_like_a_placeholder_is_text(text: str) -> None:
    assert shown({"caption": text}) == ["Text"]


def test_a_tar_of_films_and_captions_is_quarantined(write_tar: WriteTar, source: SourceSpec) -> None:
    path = write_tar({"a.mp4": b"film", "a.txt": b"A film.", "b.txt": b"No film."})
    without = parse_spec({"name": "j", "sources": [{"path": "/d", "mapping": {"ignore": ["mp4"]}}]}).sources[0]
    with open_shard(str(path), source) as shard:
        with pytest.raises(BadSampleError, match="unused_media: nothing uses the member mp4"):
            to_sample(shard.read(0), source.mapping)
        assert [type(segment) for segment in to_sample(shard.read(1), source.mapping).segments] == [Text]
        assert [type(segment) for segment in to_sample(shard.read(0), without.mapping).segments] == [Text]


def test_columns_of_parquet(tmp_path: Path, source: SourceSpec) -> None:
    pq.write_table(
        pa.Table.from_pylist([{"scan": {"bytes": b"x", "path": None}, "txt": "a cat", "width": 3}]), tmp_path / "a.parquet"
    )
    with open_shard(str(tmp_path / "a.parquet"), source) as shard:
        with pytest.raises(
            BadSampleError, match="nothing uses what scan holds: name it in the mapping's images or audios, or list"
        ):
            to_sample(shard.read(0), source.mapping)
        kinds = [type(segment) for segment in to_sample(shard.read(0), MappingSpec(images="scan")).segments]
        assert kinds == [Image, Text]
        assert [type(segment) for segment in to_sample(shard.read(0), MappingSpec(audios="scan")).segments] == [Audio, Text]


@pytest.mark.parametrize(
    ("column", "kind"), [("img", "Image"), ("jpg", "Image"), ("png", "Image"), ("wav", "Audio"), ("flac", "Audio")]
)
def test_a_column_called_like_a_format_holds_such_files(column: str, kind: str) -> None:
    """As in tables that are made of WebDataset."""
    for value in (b"x", {"bytes": b"x", "path": None}):
        assert shown({column: value, "txt": "a cat", "__key__": "1"}) == [kind, "Text"]
        assert shown({column: value, "txt": "a cat"}, ignore=(column,)) == ["Text"]
    assert f"which {column} names" in refusal({column: f"a.{'jpg' if kind == 'Image' else 'wav'}", "txt": "a cat"}), (
        "a name is none"
    )
    assert "what png holds" in refusal({"jpg": b"x", "png": b"y", "txt": "a cat"})
    assert f"what {column} holds" in refusal({column: b"x", ("image" if kind == "Image" else "audio"): b"y", "txt": "a cat"})
