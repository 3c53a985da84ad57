"""The contact sheet: what its cards hold. What it looks like is for eyes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer

from headrace.cli.inspect import preview as preview_module
from headrace.cli.inspect.contact_sheet import CaptionedPicture, Card, Token, cut, draw_sheet, lay_out
from headrace.cli.inspect.preview import reassemble, tokens_of
from headrace.cli.main import main
from headrace.preprocessor.image import to_patches
from headrace.preprocessor.job_work import JobWork
from headrace.preprocessor.sources import list_shards
from headrace.preprocessor.text import BUNDLED
from headrace.preprocessor.text.template import load_template
from headrace.preprocessor.text.templates import TEMPLATES
from headrace.sample import LABEL_IGNORED, SampleRef
from headrace.spec import ImageSpec, load_spec_yaml
from headrace.text_spec import TextSpec
from tests.examples import with_examples
from tests.unit.cli.inspect.tars import write_tar

LEARNT, REFUSED = {(252, 220, 203), (246, 195, 167)}, (179, 38, 30)
IMAGE_CHIP, AUDIO_CHIP = (18, 128, 122), (106, 76, 147)

TOKENS = st.lists(
    st.builds(
        Token,
        text=st.text(st.characters(codec="utf-8"), max_size=30),
        kind=st.sampled_from(["text", "control", "image", "audio"]),
        learnt=st.booleans(),
        count=st.integers(1, 400),
    ),
    max_size=60,
)


def colours(picture: Image.Image) -> set[tuple[int, ...]]:
    packed = np.unique(np.asarray(picture.convert("RGB"), np.int64) @ [1 << 16, 1 << 8, 1]).tolist()
    return {(colour >> 16, colour >> 8 & 255, colour & 255) for colour in packed}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three samples: an image and a recording; text; an image that is cut off."""
    picture, recording = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (280, 140), (90, 120, 30)).save(picture, "PNG")
    soundfile.write(recording, np.sin(np.arange(16_000) / 9), 16_000, format="FLAC")

    def talk(question: str) -> bytes:
        return json.dumps({"texts": [{"user": question, "assistant": "Yes. " * 500}]}).encode()

    members = {
        "a.json": talk("<image><audio> So? \U0001f99c"),
        "a.png": picture.getvalue(),
        "a.flac": recording.getvalue(),
        "b.json": talk("Is it?"),
        "c.json": talk("<image> What?"),
        "c.png": picture.getvalue()[:60],
    }
    write_tar(tmp_path / "data.tar", members)
    return tmp_path / "data.tar"


def preview(data: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    out = data.parent / "out"
    assert main(["inspect", str(data), "--out", str(out), "--format", "json", "--preview", *options]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["preview"] == str(out / "preview.png")
    return report


def test_the_sheet_has_media_tokens_with_and_without_loss_and_the_refused(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sheet = Image.open(preview(data, capsys)["preview"])
    found = colours(sheet)
    assert found >= LEARNT | {REFUSED, IMAGE_CHIP, AUDIO_CHIP}
    assert (90, 120, 30) in found, "the picture itself"
    assert sheet.width == 1880, "three columns"


@pytest.mark.slow
def test_as_many_samples_as_asked_for_spread_over_the_data(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sheet = Image.open(preview(data, capsys, "1")["preview"])
    assert sheet.width < 700, "one card"
    assert (90, 120, 30) not in colours(sheet), "the one in the middle, which is text"


def test_no_sheet_unless_asked_for(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(data), "--out", str(data.parent / "out"), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["preview"] is None
    assert not (data.parent / "out" / "preview.png").exists()


def test_the_table_names_the_sheet(data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data.parent)
    assert main(["inspect", "data.tar", "--out", "o", "--preview"]) == 0
    assert "o/preview.png" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--preview", "0"], "--preview must be 1 to 60 samples, got 0"),
        (["--preview", "61"], "--preview must be 1 to 60 samples, got 61"),
        (["--preview", "--template", "alpaca"], "text.template"),
        (["--preview", "--template", "llava"], "lacks the control token <s>"),
    ],
)
def test_what_the_user_can_fix_is_one_sentence(
    data: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    assert main(["inspect", str(data), "--out", str(data.parent / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


@pytest.fixture
def job(data: Path) -> Path:
    """The spec of a job with settings of its own for all that a sample becomes."""
    tokenizer = Tokenizer.from_file(str(BUNDLED))
    tokenizer.add_special_tokens([*TEMPLATES["llama3"].control, "<img>", "<snd>"])
    tokenizer.save(str(data.parent / "tokenizer.json"))
    spec = {
        "name": "own",
        "sources": [{"path": str(data)}],
        "image": {"patch": 16, "merge": 1, "max_pixels": 20_000},
        "audio": {"mel_bins": 40, "hop_s": 0.02, "frames_per_token": 4},
        "text": {
            "tokenizer": str(data.parent / "tokenizer.json"),
            "template": "llama3",
            "image_token": "<img>",
            "audio_token": "<snd>",
        },
    }
    (data.parent / "job.yaml").write_text(yaml.safe_dump(spec))
    return data.parent / "job.yaml"


def test_of_a_job_the_sheet_shows_what_its_preprocessor_delivers(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Card] = []

    def draw(cards: list[Card], **options: str) -> Image.Image:
        drawn.extend(cards)
        return draw_sheet(cards, **options)

    monkeypatch.setattr(preview_module, "draw_sheet", draw)
    assert main(["inspect", "--spec", str(job), "--out", str(job.parent / "out"), "--format", "json", "--preview"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(job)

    spec = load_spec_yaml(job)
    work = JobWork(spec.name, spec)
    work.shards = tuple(list_shards(spec))
    batch, refused = work.decode_batch([SampleRef(sample_id=n, shard=0, row=n) for n in range(3)])
    work.close()
    assert [(card.name, card.reason, card.detail) for card in drawn[2:]] == [
        (item.name, item.reason, item.detail) for item in refused
    ]
    template = load_template(spec.text)
    for card, row in zip(drawn[:2], batch.to_pylist(), strict=True):
        ids, labels = np.array(row["input_ids"], np.int32), np.array(row["labels"], np.int32)
        assert list(card.tokens) == list(tokens_of(ids, labels, template))
        patches = np.array(row["patches"], np.uint8).reshape(-1, 3 * 16 * 16)
        assert len(card.images) == len(row["image_grids"])
        for shown, (_, height, width) in zip(card.images, row["image_grids"], strict=True):
            np.testing.assert_array_equal(np.asarray(shown.picture), reassemble(patches, height, width, spec.image))
        assert [shown.picture.size for shown in card.spectra] == [(frames, 40) for frames in row["mel_frames"]]
    assert drawn[0].images[0].picture.size == (192, 96), "within 20,000 pixels, of patches of 16"
    assert "<|start_header_id|>" in {token.text for token in drawn[0].tokens}


@with_examples(50)
@given(
    rows=st.integers(1, 4), columns=st.integers(1, 4), patch=st.integers(1, 4), merge=st.integers(1, 3), seed=st.integers(0, 99)
)
def test_patches_become_the_image_again(rows: int, columns: int, patch: int, merge: int, seed: int) -> None:
    spec = ImageSpec(patch=patch, merge=merge)
    height, width = rows * merge, columns * merge
    pixels = np.random.default_rng(seed).integers(0, 256, (height * patch, width * patch, 3), np.uint8)
    np.testing.assert_array_equal(reassemble(to_patches(pixels, spec), height, width, spec), pixels)


def test_placeholders_are_one_chip_and_every_token_has_its_mask() -> None:
    template = load_template(TextSpec())
    control, encode = template.encoder.control, template.encoder.encode
    image = [control["<|vision_start|>"], *[control["<|image_pad|>"]] * 391, control["<|vision_end|>"]]
    answer = encode("a \U0001f99c")
    ids = np.array([*image, *answer, control["<|audio_pad|>"]], np.int32)
    labels = np.full(len(ids), LABEL_IGNORED, np.int32)
    labels[393:-1] = answer
    shown = list(tokens_of(ids, labels, template))
    assert [token.text for token in shown[:3]] == ["<|vision_start|>", "<image x 391>", "<|vision_end|>"]
    assert [token.kind for token in shown[:3]] == ["control", "image", "control"]
    assert "".join(token.text for token in shown[3:-1]) == "a \U0001f99c"
    assert [token.learnt for token in shown] == [False] * 3 + [True] * (len(shown) - 4) + [False]
    assert (shown[-1].text, shown[-1].kind) == ("<audio x 1>", "audio")
    assert sum(token.count for token in shown) == len(ids)


@with_examples(100)
@given(tokens=TOKENS, width=st.integers(1, 40))
def test_lines_hold_every_token_and_are_not_too_long(tokens: list[Token], width: int) -> None:
    lines = lay_out(tokens, width)
    fragments = [fragment for line in lines for fragment in line]
    assert all(line for line in lines)
    assert all(fragment.column + len(fragment.text) <= width for fragment in fragments)
    assert sum(fragment.count for fragment in fragments) == sum(token.count for token in tokens)
    assert sum(len(fragment.text) for fragment in fragments) == sum(max(1, len(token.text)) for token in tokens)


@with_examples(100)
@given(tokens=TOKENS, most=st.integers(5, 20))
def test_a_long_text_is_cut_in_its_middle_and_the_rest_counted(tokens: list[Token], most: int) -> None:
    lines = lay_out(tokens, 20)
    head, left_out, tail = cut(lines, most, 3)
    assert len(head) + bool(left_out) + len(tail) == min(len(lines), most)
    if left_out:
        assert head + lines[len(head) : -3] + tail == lines
        kept = sum(fragment.count for line in head + tail for fragment in line)
        assert left_out.startswith(f"\u2026 {sum(token.count for token in tokens) - kept:,} tokens left out")


def test_a_line_ends_behind_a_line_feed_which_is_seen() -> None:
    tokens = [Token(text=text, kind="text", learnt=False) for text in ("a\n", "\n\n", "b", "\t\x00\u4f60")]
    assert [[fragment.text for fragment in line] for line in lay_out(tokens, 20)] == [["a⏎"], ["⏎⏎"], ["b", "⇥□□"]]


def test_any_card_can_be_drawn() -> None:
    strip = CaptionedPicture(picture=Image.new("RGB", (28, 28 * 400)), caption="c" * 300, cell_px=28)
    long = tuple(Token(text="word\n", kind="text", learnt=True) for _ in range(500))
    cards = [
        Card(name="n" * 300, detail="d"),
        Card(
            name="many",
            detail="",
            images=(strip,) * 9,
            spectra=(CaptionedPicture(picture=Image.new("RGB", (3, 128)), caption="s"),) * 5,
        ),
        Card(name="long", detail="", tokens=long, images=(strip,)),
        Card(name="refused", reason="corrupt_media", detail="x" * 2000),
    ]
    sheet = draw_sheet(cards, title="t" * 500, subtitle="s" * 500)
    assert sheet.width == 1880
    assert REFUSED in colours(sheet)
