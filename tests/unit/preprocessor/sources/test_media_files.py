"""Media that rows name by paths: where they are looked for, and what leads out of the data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest

from headrace.errors import DatasetError
from headrace.preprocessor.access import Access, granting
from headrace.preprocessor.sources.media_files import media_files
from headrace.quarantine import BadSampleError, Reason
from headrace.source_spec import SourceSpec
from tests.http_site import Site


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set beside another folder: annotations in one folder, pictures in another."""
    for name in ("set/annotations/a.jsonl", "set/pictures/1.jpg", "set/annotations/near.jpg", "elsewhere/2.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def load(folder: Path, name: str, path: str = "set", **fields: Any) -> str:
    source = SourceSpec(path=str(folder / path), **fields)
    return media_files(str(folder / "set/annotations/a.jsonl"), source).load(name).decode()


def reason(folder: Path, name: str, path: str = "set", **fields: Any) -> Reason:
    with pytest.raises(BadSampleError) as caught:
        load(folder, name, path, **fields)
    return caught.value.reason


def test_paths_lead_anywhere_in_the_sources_folder(folder: Path) -> None:
    assert load(folder, "near.jpg") == load(folder, "./near.jpg") == "set/annotations/near.jpg"
    assert load(folder, "../pictures/1.jpg") == load(folder, str(folder / "set/pictures/1.jpg")) == "set/pictures/1.jpg"
    assert load(folder, "../pictures/1.jpg", path="set/ann*/*.jsonl") == "set/pictures/1.jpg"
    assert reason(folder, "../pictures/1.jpg", path="set/annotations/a.jsonl") is Reason.UNSAFE_MEMBER_NAME
    assert reason(folder, "../../elsewhere/2.jpg") is Reason.UNSAFE_MEMBER_NAME
    assert reason(folder, str(folder / "elsewhere/2.jpg")) is Reason.UNSAFE_MEMBER_NAME


def test_a_media_root_is_where_paths_begin(folder: Path) -> None:
    elsewhere = str(folder / "elsewhere")
    assert load(folder, "2.jpg", media_root=elsewhere) == "elsewhere/2.jpg"
    assert load(folder, f"{elsewhere}/2.jpg", media_root=elsewhere) == "elsewhere/2.jpg"
    assert load(folder, "../pictures/1.jpg", "set/annotations", media_root=str(folder / "set/pictures")) == "set/pictures/1.jpg"
    assert load(folder, "near.jpg", media_root=elsewhere) == "set/annotations/near.jpg"
    assert reason(folder, "3.jpg", media_root=elsewhere) is Reason.MISSING_MEDIA
    assert reason(folder, "../set/pictures/1.jpg", "set/annotations", media_root=elsewhere) is Reason.UNSAFE_MEMBER_NAME


def test_a_link_to_a_folder_of_media_is_followed_to_the_media_root(folder: Path) -> None:
    (folder / "set/annotations/linked").symlink_to(folder / "elsewhere")
    assert reason(folder, "linked/2.jpg") is Reason.UNSAFE_MEMBER_NAME
    assert load(folder, "linked/2.jpg", media_root=str(folder / "elsewhere")) == "elsewhere/2.jpg"
    (folder / "set/annotations/inside").symlink_to(folder / "set/pictures")
    assert load(folder, "inside/1.jpg") == "set/pictures/1.jpg"


def test_a_link_is_followed_into_what_the_operator_declared(folder: Path) -> None:
    (folder / "set/annotations/linked").symlink_to(folder / "elsewhere")
    with granting(Access.of([folder / "set", folder / "elsewhere"], [])):
        assert load(folder, "linked/2.jpg") == "elsewhere/2.jpg"
        assert load(folder, "../../elsewhere/2.jpg") == "elsewhere/2.jpg"
    with granting(Access.of([folder / "set"], [])):
        assert reason(folder, "linked/2.jpg") is Reason.UNSAFE_MEMBER_NAME
        with pytest.raises(DatasetError, match="--data-root"):
            load(folder, "2.jpg", media_root=str(folder / "elsewhere"))
    with granting(Access.of([folder / "set/annotations"], [])):
        assert reason(folder, "../pictures/1.jpg") is Reason.UNSAFE_MEMBER_NAME


@pytest.mark.parametrize("beside", ["images", "image", "data", "audio", "media", "clips", "wavs"])
def test_the_only_usual_folder_beside_the_annotations_that_has_it(folder: Path, beside: str) -> None:
    """LLaVA's own: coco/train2017/1.jpg, which is below `images`."""
    path = folder / "set/annotations" / beside / "coco/1.jpg"
    path.parent.mkdir(parents=True)
    path.write_text("found")
    assert load(folder, "coco/1.jpg") == "found"
    assert reason(folder, "../coco/1.jpg") is Reason.MISSING_MEDIA
    assert reason(folder, "/coco/1.jpg") is Reason.UNSAFE_MEMBER_NAME


def test_a_picture_in_two_of_these_folders_is_neither(folder: Path) -> None:
    for beside in ("images", "data"):
        (folder / "set/annotations" / beside).mkdir()
        (folder / "set/annotations" / beside / "1.jpg").write_text(beside)
    with pytest.raises(BadSampleError, match="images and data have one, so say what it is relative to with media_root"):
        load(folder, "1.jpg")


def test_what_is_missing_is_said_with_the_remedy(folder: Path) -> None:
    with pytest.raises(BadSampleError, match=r"missing_media: no file 'coco/1.jpg' in .*annotations; say .* with media_root"):
        load(folder, "coco/1.jpg")
    with pytest.raises(BadSampleError, match=r"leads outside of the data set; name the folder .* as the source's media_root"):
        load(folder, "/mnt/coco/1.jpg")


def test_a_snapshot_of_the_hub_links_to_the_blobs_of_its_repository(tmp_path: Path) -> None:
    snapshot = tmp_path / "datasets--org--name/snapshots/rev"
    for name in ("datasets--org--name/blobs/0a", "datasets--org--other/blobs/0b", "datasets--org--name/blobs/0c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (snapshot / "images").mkdir(parents=True)
    (snapshot / "images/1.jpg").symlink_to("../../../blobs/0a")
    (snapshot / "images/2.jpg").symlink_to(tmp_path / "datasets--org--other/blobs/0b")
    (snapshot / "a.jsonl").symlink_to("../../blobs/0c")
    place = media_files(str(snapshot / "a.jsonl"), SourceSpec(path=str(snapshot)))
    assert place.load("images/1.jpg") == b"datasets--org--name/blobs/0a"
    with pytest.raises(BadSampleError, match="through a link"):
        place.load("images/2.jpg")


def remote(name: str, path: str = "memory://roots/set", **fields: Any) -> bytes:
    return media_files("memory://roots/set/annotations/a.jsonl", SourceSpec(path=path, **fields)).load(name)


def test_remote_media() -> None:
    for name in ("set/annotations/near.jpg", "set/pictures/1.jpg", "elsewhere/2.jpg"):
        with fsspec.open(f"memory://roots/{name}", "wb") as file:
            file.write(name.encode())
    assert remote("near.jpg") == b"set/annotations/near.jpg"
    assert remote("../pictures/1.jpg") == b"set/pictures/1.jpg"
    assert remote("2.jpg", media_root="memory://roots/elsewhere") == b"elsewhere/2.jpg"
    for name, expected in {
        "../../elsewhere/2.jpg": Reason.UNSAFE_MEMBER_NAME,
        "/roots/set/pictures/1.jpg": Reason.UNSAFE_MEMBER_NAME,
        "https://host/1.jpg": Reason.UNSAFE_MEMBER_NAME,
        "gone.jpg": Reason.MISSING_MEDIA,
    }.items():
        with pytest.raises(BadSampleError) as caught:
            remote(name)
        assert caught.value.reason is expected


def test_a_medium_on_the_web_takes_one_request(site: Site) -> None:
    site.files["set/1.jpg"] = b"x" * 100_000
    place = media_files(f"{site.url}/set/a.jsonl")
    assert place.load("1.jpg") == site.files["set/1.jpg"]
    with pytest.raises(BadSampleError, match="missing_media"):
        place.load("2.jpg")
    assert site.gets == ["", ""]
    assert not site.described.acquire(blocking=False)


def test_media_of_local_rows_may_be_remote_and_those_of_remote_rows_local(folder: Path) -> None:
    with fsspec.open("memory://far/2.jpg", "wb") as file:
        file.write(b"far")
    assert load(folder, "2.jpg", media_root="memory://far") == "far"
    assert remote("2.jpg", media_root=str(folder / "elsewhere")) == b"elsewhere/2.jpg"
    with pytest.raises(BadSampleError, match="missing_media"):
        remote("near.jpg", media_root=str(folder / "elsewhere"))
