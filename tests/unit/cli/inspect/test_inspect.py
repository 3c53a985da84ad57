"""`headrace inspect` as its user meets it: what it reports of a data set, and how it refuses."""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import soundfile
from PIL import Image

from headrace.cli.main import main
from tests.unit.cli.inspect.tars import write_tar

EXAMPLE = Path(__file__).parents[4] / "examples" / "data"

Inspect = Callable[..., dict[str, Any]]


def picture(width: int, height: int, kind: str = "PNG") -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (width, height), (90, 120, 30)).save(data, kind)
    return data.getvalue()


def recording(seconds: float) -> bytes:
    data = io.BytesIO()
    soundfile.write(data, np.zeros(int(seconds * 16000), np.float32), 16000, format="FLAC")
    return data.getvalue()


def talk(question: str, answer: str = "Yes.") -> bytes:
    return json.dumps({"texts": [{"user": question, "assistant": answer}]}).encode()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data")


def write_data(folder: Path) -> Path:
    """Two shards: four good samples (text; image; text and two images; text, image, audio) and two refused ones."""
    folder.mkdir()
    write_tar(
        folder / "a.tar",
        {
            "talk.json": talk("Is it?"),
            "still.txt": b" ",
            "still.jpg": picture(280, 140, "JPEG"),
            "pair.json": talk("<image><image> Alike?"),
            "pair.1.png": picture(560, 56),
            "pair.2.png": picture(56, 112),
        },
    )
    write_tar(
        folder / "b.tar",
        {
            "all.json": talk("<image><audio> So?"),
            "all.png": picture(28, 84),
            "all.flac": recording(2.0),
            "cut.json": talk("<image> What?"),
            "cut.png": picture(100, 100)[:20],
            "few.json": talk("<image> Where?"),
        },
    )
    return folder


@pytest.fixture
def inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Inspect:
    """inspect(PATH, OPTION...) gives the JSON object, which is all of standard output."""

    def call(path: Path, *options: str) -> dict[str, Any]:
        assert main(["inspect", str(path), "--out", str(tmp_path / "out"), "--format", "json", *options]) == 0
        report = json.loads(capsys.readouterr().out)
        assert isinstance(report, dict)
        return report

    return call


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is said of that data."""
    folder, said = tmp_path_factory.mktemp("inspected"), io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["inspect", str(write_data(folder / "data")), "--out", str(folder / "out"), "--format", "json"]) == 0
    found = json.loads(said.getvalue())
    assert isinstance(found, dict)
    return found


def test_it_counts_samples_media_and_modalities(report: dict[str, Any]) -> None:
    assert Path(report["path"]).name == "data"
    assert (report["shards"], report["samples"], report["not_probed"]) == (2, 4, 0)
    assert (report["images"], report["recordings"]) == (4, 1)
    assert report["modalities"] == {"text": 3, "image": 3, "audio": 1}
    assert report["combinations"] == {"text": 1, "image": 1, "text+image": 1, "text+image+audio": 1}


def test_refused_samples_are_named_with_their_reasons(report: dict[str, Any]) -> None:
    refused = {item["sample"]: item for item in report["refused"]}
    assert {name: item["reason"] for name, item in refused.items()} == {
        "data/b.tar/cut": "corrupt_media",
        "data/b.tar/few": "placeholder_mismatch",
    }
    assert refused["data/b.tar/few"]["detail"] == "1 image placeholders for 0 media"


def test_image_sizes_are_those_of_the_files_and_tokens_those_of_the_patch_grid(report: dict[str, Any]) -> None:
    found = report["histograms"]
    assert (found["image_side_px"]["min"], found["image_side_px"]["p50"], found["image_side_px"]["max"]) == (84, 112, 560)
    # 28 x 28 pixels a token: 10 x 5; 20 x 2 + 2 x 4; 28 x 84 is scaled up to the least area, 56 * 56: 2 x 4
    assert (found["image_tokens"]["count"], found["image_tokens"]["min"], found["image_tokens"]["max"]) == (3, 8, 50)


def test_audio_is_in_seconds_and_counts_samples_that_have_some(report: dict[str, Any]) -> None:
    assert report["histograms"]["audio_s"] == dict.fromkeys(("min", "p10", "p50", "p90", "p99", "max"), 2.0) | {"count": 1}


def test_text_tokens_are_what_is_left_without_the_media(tmp_path: Path, inspect: Inspect) -> None:
    data = tmp_path / "one.tar"
    write_tar(data, {"a.json": talk("<image><audio> So?"), "a.png": picture(280, 140), "a.flac": recording(2.0)})
    found = inspect(data)["histograms"]
    assert found["image_tokens"]["max"] == 50
    assert found["tokens"]["max"] - found["text_tokens"]["max"] == 50 + 25, "2 s are 200 frames of 10 ms, 8 to a token"
    assert 0 < found["target_tokens"]["max"] < found["text_tokens"]["max"]


def test_tokens_of_tiles_are_counted_without_their_padding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two rows of three tiles of 2 x 2 tokens, four rows with a newline each, and the whole image in 2 x 2 tokens."""
    data, job = tmp_path / "one.tar", tmp_path / "job.yaml"
    write_tar(data, {"a.json": talk("<image> So?"), "a.png": picture(280, 140)})
    image = {"fit": "anyres", "side": 28, "merge": 1, "max_tiles_per_side": 3}
    job.write_text(json.dumps({"name": "j", "sources": [{"path": str(data)}], "image": image}))
    options = ["--out", str(tmp_path / "out"), "--format", "json"]
    assert main(["inspect", "--spec", str(job), *options]) == 0
    found = json.loads(capsys.readouterr().out)["histograms"]
    assert found["image_tokens"]["max"] == 4 * (6 + 1) + 4
    assert found["tokens"]["max"] - found["text_tokens"]["max"] == 32
    assert main(["inspect", "--spec", str(job), "--preview", *options]) == 0


def test_fewer_pixels_are_fewer_image_tokens_and_the_same_sizes(data: Path, report: dict[str, Any], inspect: Inspect) -> None:
    full, small = report, inspect(data, "--max-pixels", str(112 * 112))
    assert small["histograms"]["image_side_px"] == full["histograms"]["image_side_px"]
    assert small["histograms"]["image_tokens"]["max"] < full["histograms"]["image_tokens"]["max"]
    assert small["histograms"]["text_tokens"] == full["histograms"]["text_tokens"]


def test_the_picture_is_there(report: dict[str, Any]) -> None:
    assert matplotlib.image.imread(report["picture"]).shape[1] > 1000


def test_the_example_is_whole_and_has_every_modality(inspect: Inspect) -> None:
    report = inspect(EXAMPLE)
    assert report["refused"] == []
    assert min(report["modalities"].values()) > 0
    assert sum(report["combinations"].values()) == report["samples"] == report["histograms"]["tokens"]["count"]
    assert report == inspect(EXAMPLE), "threads do not change it"


def test_a_limit_leaves_samples_out_and_damage_of_the_archive_in(data: Path, inspect: Inspect) -> None:
    (data / "c.tar").write_bytes(b"x" * 700)
    report = inspect(data, "--limit", "2")
    assert report["not_probed"] == 4
    assert report["samples"] + len([item for item in report["refused"] if item["reason"] != "archive_corrupt"]) == 2
    assert [item["sample"] for item in report["refused"] if item["reason"] == "archive_corrupt"] == ["data/c.tar"]


def test_no_good_sample_means_no_picture_but_a_report(tmp_path: Path, inspect: Inspect) -> None:
    write_tar(tmp_path / "bad.tar", {"a.json": talk("<image>")})
    report = inspect(tmp_path / "bad.tar")
    assert (report["samples"], report["tokens"], report["histograms"], report["picture"]) == (0, 0, {}, None)
    assert [item["reason"] for item in report["refused"]] == ["placeholder_mismatch"]


def test_the_table_says_the_same(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n in range(5):
        write_tar(data / f"more-{n}.tar", {"bad.json": b"{"})
    assert main(["inspect", str(data), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "7 shards, 4 samples, 4 images, 1 recording" in out
    for title in ("Image size (px)", "Image tokens", "Audio (s)", "Text tokens", "All tokens", "Targets"):
        assert title in out
    assert "  data/b.tar/few: 1 image placeholders for 0 media\n" in out
    assert "refused as schema_error: 5\n" in out
    assert "data/more-2.tar/bad" in out
    assert "data/more-3.tar/bad" not in out
    assert "and 2 more" in out


def test_a_data_set_whose_videos_nothing_uses_says_that_it_is_refused_as_a_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "video.tar"
    write_tar(data, {f"{n}.{kind}": content for n in range(3) for kind, content in (("mp4", b"film"), ("txt", b"A film."))})
    assert main(["inspect", str(data), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "every sample is refused: a job on this data would fail\nrefused as unused_media: 3\n" in out
    assert "video.tar/0: nothing uses the member mp4: list 'mp4' under the mapping's ignore to train without it\n" in out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["empty"], "holds no shard"),
        (["."], "holds no sample in 1 shard"),
        ([".", "--limit", "0"], "--limit must be at least 1"),
        ([".", "--max-pixels", "9"], "max_pixels (9) is below"),
        ([".", "--tokenizer", "nowhere.json"], "nowhere.json"),
        ([".", "--out", "empty.jsonl/out"], "cannot write to empty.jsonl/out"),
    ],
)
def test_what_the_user_can_fix_is_one_sentence_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").touch()
    assert main(["inspect", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headrace inspect: ")
    assert err.count("\n") == 1
    assert sentence in err
