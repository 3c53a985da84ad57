"""WebDataset archives: members of one key, as `webdataset.TarWriter` encodes them, read by `webdataset.WebDataset`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import Peer
from tests.layouts.layout import Layout
from tests.layouts.material import (
    COUNT,
    FILM,
    PDF,
    answer,
    caption,
    drawing,
    messages,
    picture,
    question,
    sharegpt,
    sound,
)
from tests.layouts.plain import Sample, audio, conversation, dialogue, document, filled, image, other

WEBDATASET = Peer(title="webdataset", module="torch_webdataset", requirements=("webdataset==1.0.*",))

Members = Mapping[str, Any]
Turns = tuple[tuple[str, str], ...]


def write_tar(path: Path, samples: Sequence[Members], key: str = "{:06d}", **options: Any) -> None:
    """Write one archive with the real writer; `key` is the format of a sample's key."""
    import webdataset

    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path), **options) as writer:
        for number, members in enumerate(samples):
            writer.write({"__key__": key.format(number), **members})


def read_tars(folder: Path, pattern: str = "**/*.tar") -> Iterator[dict[str, Any]]:
    """Yield the samples of all archives as the real reader gives them, with texts and JSON decoded and media as bytes."""
    import webdataset

    yield from webdataset.WebDataset(sorted(map(str, folder.glob(pattern))), shardshuffle=False).decode()


def tar(
    name: str,
    what: str,
    members: Callable[[int], Members],
    sample: Callable[[dict[str, Any]], Sample],
    *,
    file: str = "{:05d}.tar",
    shards: int = 1,
    key: str = "{:06d}",
    options: Mapping[str, Any] | None = None,
    **others: Any,
) -> Layout:
    """Return the layout of archives with these members for each number, and what a sample of the reader means."""

    def write(folder: Path) -> None:
        for shard in range(shards):
            numbers = range(shard * COUNT, (shard + 1) * COUNT)
            write_tar(folder / file.format(shard), [members(number) for number in numbers], key, **(options or {}))

    def read(folder: Path) -> list[Sample]:
        return [sample(found) for found in read_tars(folder, f"**/*{Path(file).suffix}")]

    return Layout(name=f"wds-{name}", writer=WEBDATASET, what=what, write=write, read=read, **others)


def _captioned(extension: str, text: str = "txt") -> Callable[[dict[str, Any]], Sample]:
    return lambda found: document(image(found[extension]), found[text])


def _turns(found: dict[str, Any], key: str = "conversations") -> list[tuple[str, str]]:
    return [(turn["from"], turn["value"]) for turn in found["json"][key]]


def _messages(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"]) for turn in found["json"]["messages"]]


def _splits(name: str, what: str, file: str, path: str = "") -> Layout:
    """Return the layout of archives of two splits, of which the reader is given those to train on."""

    def write(folder: Path) -> None:
        for first, split in ((0, "train"), (20, "val")):
            write_tar(folder / file.format(split), [{"jpg": drawing(i), "txt": caption(i)} for i in range(first, first + COUNT)])

    def read(folder: Path) -> list[Sample]:
        return [document(image(found["jpg"]), found["txt"]) for found in read_tars(folder, file.format("train"))]

    return Layout(name=f"wds-{name}", writer=WEBDATASET, what=what, write=write, read=read, path=path)


LAYOUTS = (
    tar("jpg-txt", "`jpg`, `txt`", lambda i: {"jpg": drawing(i), "txt": caption(i)}, _captioned("jpg")),
    tar("png-txt", "`png`, `txt`", lambda i: {"png": drawing(i), "txt": caption(i)}, _captioned("png")),
    tar("webp-txt", "`webp`, `txt`", lambda i: {"webp": picture(i, "WEBP"), "txt": caption(i)}, _captioned("webp")),
    tar("gif-txt", "`gif`, `txt`", lambda i: {"gif": picture(i, "GIF", "P"), "txt": caption(i)}, _captioned("gif")),
    tar("bmp-txt", "`bmp`, `txt`", lambda i: {"bmp": picture(i, "BMP"), "txt": caption(i)}, _captioned("bmp")),
    tar("jpeg-txt", "`jpeg`, `txt`", lambda i: {"jpeg": drawing(i), "txt": caption(i)}, _captioned("jpeg")),
    tar("tiff-txt", "`tiff`, `txt`", lambda i: {"tiff": picture(i, "TIFF"), "txt": caption(i)}, _captioned("tiff")),
    tar("ppm-txt", "`ppm`, `txt`", lambda i: {"ppm": picture(i, "PPM"), "txt": caption(i)}, _captioned("ppm")),
    tar("jp2-txt", "`jp2`, `txt`", lambda i: {"jp2": picture(i, "JPEG2000"), "txt": caption(i)}, _captioned("jp2")),
    tar("avif-txt", "`avif`, `txt`", lambda i: {"avif": picture(i, "AVIF"), "txt": caption(i)}, _captioned("avif")),
    tar("gray-png", "`png` in grey, `txt`", lambda i: {"png": picture(i, "PNG", "L"), "txt": caption(i)}, _captioned("png")),
    tar("rgba-png", "`png` with transparency, `txt`", lambda i: {"png": picture(i, "PNG", "RGBA"), "txt": caption(i)},
        _captioned("png")),
    tar("uppercase", "`JPG`, `TXT`", lambda i: {"JPG": picture(i), "TXT": caption(i).encode()},
        lambda found: document(image(found["jpg"]), found["txt"])),
    tar("only-txt", "`txt` alone", lambda i: {"txt": caption(i)}, lambda found: document(found["txt"])),
    tar("json-text", "`json` with `text` alone", lambda i: {"json": {"text": caption(i), "lang": "en"}},
        lambda found: document(found["json"]["text"])),
    tar("json-caption", "`jpg`, `json` with `caption`", lambda i: {"jpg": drawing(i), "json": {"caption": caption(i), "id": i}},
        lambda found: document(image(found["jpg"]), found["json"]["caption"])),
    tar("txt-json-meta", "`jpg`, `txt`, `json` with width, height and a URL",
        lambda i: {"jpg": drawing(i), "txt": caption(i),
            "json": {"width": 20, "height": 16, "url": f"https://a.example/{i}.jpg"}}, _captioned("jpg")),
    tar("two-shards", "two archives of `jpg`, `txt`", lambda i: {"jpg": drawing(i), "txt": caption(i)}, _captioned("jpg"),
        shards=2),
    tar("gz", "`.tar.gz`", lambda i: {"jpg": drawing(i), "txt": caption(i)}, _captioned("jpg"), file="{:05d}.tar.gz"),
    tar("tgz", "`.tgz`", lambda i: {"jpg": drawing(i), "txt": caption(i)}, _captioned("jpg"), file="{:05d}.tgz",
        options={"compress": True}),
    tar("folders", "keys with folders, as tar makes of a tree", lambda i: {"jpg": drawing(i), "txt": caption(i)},
        _captioned("jpg"), key="barns/{:04d}/front"),
    tar("nested-shards", "archives in a folder of a folder", lambda i: {"jpg": drawing(i), "txt": caption(i)}, _captioned("jpg"),
        file="part/{:05d}.tar"),
    tar("cls", "`jpg`, `cls` of ImageNet", lambda i: {"jpg": drawing(i), "cls": i},
        lambda found: document(image(found["jpg"]), str(found["cls"])),
        refused_because="a number is no text that a model can learn"),
    tar("cls-txt", "`jpg`, `cls`, `txt`", lambda i: {"jpg": drawing(i), "cls": i, "txt": caption(i)}, _captioned("jpg")),
    tar("wav-txt", "`wav`, `txt`", lambda i: {"wav": sound(i), "txt": caption(i)},
        lambda found: document(audio(found["wav"]), found["txt"])),
    tar("flac-json", "`flac`, `json` with `text`", lambda i: {"flac": sound(i, "FLAC"), "json": {"text": caption(i)}},
        lambda found: document(audio(found["flac"]), found["json"]["text"])),
    tar("mp3-txt", "`mp3`, `txt`", lambda i: {"mp3": sound(i, "MP3"), "txt": caption(i)},
        lambda found: document(audio(found["mp3"]), found["txt"])),
    tar("ogg-txt", "`ogg`, `txt`", lambda i: {"ogg": sound(i, "OGG", subtype="VORBIS"), "txt": caption(i)},
        lambda found: document(audio(found["ogg"]), found["txt"])),
    tar("opus-txt", "`opus`, `txt`", lambda i: {"opus": sound(i, "OGG", subtype="OPUS"), "txt": caption(i)},
        lambda found: document(audio(found["opus"]), found["txt"])),
    tar("wav-transcript", "`wav`, `transcript`", lambda i: {"wav": sound(i), "transcript": caption(i)},
        lambda found: document(audio(found["wav"]), found["transcript"])),
    tar("jpg-wav-txt", "`jpg`, `wav`, `txt`", lambda i: {"jpg": drawing(i), "wav": sound(i), "txt": caption(i)},
        lambda found: document(image(found["jpg"]), audio(found["wav"]), found["txt"])),
    tar("numbered", "`0.jpg`, `1.jpg`, `json` with `texts` and two placeholders",
        lambda i: {"0.jpg": drawing(i), "1.jpg": drawing(i + 50),
            "json": {"texts": [{"user": f"<image><image>{question(i)}", "assistant": answer(i)}]}},
        lambda found: dialogue(filled(found["json"]["texts"][0]["user"], image(found["0.jpg"]), image(found["1.jpg"])),
            found["json"]["texts"][0]["assistant"])),
    tar("eleven-images", "`0.jpg` to `10.jpg`, `json` with eleven placeholders",
        lambda i: {**{f"{n}.jpg": drawing(11 * i + n) for n in range(11)},
            "json": {"texts": [{"user": "<image>" * 11, "assistant": answer(i)}]}},
        lambda found: dialogue([image(found[f"{n}.jpg"]) for n in range(11)], found["json"]["texts"][0]["assistant"])),
    tar("named-images", "`left.jpg`, `right.jpg`, named in the `json`",
        lambda i: {"left.jpg": drawing(i), "right.jpg": drawing(i + 50),
            "json": {"images": ["left.jpg", "right.jpg"],
                "texts": [{"user": f"<image>or<image>{question(i)}", "assistant": answer(i)}]}},
        lambda found: dialogue(filled(found["json"]["texts"][0]["user"],
                *[image(found[name]) for name in found["json"]["images"]]), found["json"]["texts"][0]["assistant"])),
    tar("llava", "`jpg`, `json` with `conversations`",
        lambda i: {"jpg": drawing(i), "json": {"id": i, "conversations": sharegpt(i)}},
        lambda found: conversation(_turns(found), image(found["jpg"]))),
    tar("llava-image-path", "`jpg`, `json` of LLaVA that keeps `image: coco/train2017/x.jpg`",
        lambda i: {"jpg": drawing(i), "json": {"image": f"coco/train2017/{i:012d}.jpg", "conversations": sharegpt(i)}},
        lambda found: conversation(_turns(found), image(found["jpg"])), mapping={"images": "jpg"}),
    tar("turns-json", "`jpg`, `json` that is the list of turns", lambda i: {"jpg": drawing(i), "json": sharegpt(i)},
        lambda found: conversation([(turn["from"], turn["value"]) for turn in found["json"]], image(found["jpg"]))),
    tar("messages", "`jpg`, `json` with `messages`", lambda i: {"jpg": drawing(i), "json": {"messages": messages(i)}},
        lambda found: conversation(_messages(found), image(found["jpg"]))),
    tar("audio-messages", "`flac`, `json` with `messages`",
        lambda i: {"flac": sound(i, "FLAC"), "json": {"messages": messages(i, "<audio>")}},
        lambda found: conversation(_messages(found), audio(found["flac"]))),
    tar("interleaved", "`0.jpg`, `1.jpg`, `json` with `texts` of strings",
        lambda i: {"0.jpg": drawing(i), "1.jpg": drawing(i + 50), "json": {"texts": ["See", "<image>", caption(i), "<image>"]}},
        lambda found: document(*filled("".join(found["json"]["texts"]), image(found["0.jpg"]), image(found["1.jpg"])))),
    tar("mmc4-members", "`0.jpg`, `json` of MMC4 (`text_list`, `image_info`)",
        lambda i: {"0.jpg": drawing(i),
            "json": {"text_list": [caption(i), "The end."], "image_info": [{"image_name": "0.jpg", "matched_text_index": 0}]}},
        lambda found: document(image(found["0.jpg"]), " ".join(found["json"]["text_list"]))),
    tar("caption-list", "`jpg`, `json` with a list under `caption`",
        lambda i: {"jpg": drawing(i), "json": {"caption": [caption(i), "a drawing"]}},
        lambda found: document(image(found["jpg"]), found["json"]["caption"][0]), mapping={"text": "caption.0"}),
    tar("question-answer", "`jpg`, `json` with `question`, `answer`",
        lambda i: {"jpg": drawing(i), "json": {"question": question(i), "answer": answer(i)}},
        lambda found: dialogue([image(found["jpg"]), found["json"]["question"]], found["json"]["answer"])),
    tar("nested-key", "`jpg`, `json` with the caption under `meta`",
        lambda i: {"jpg": drawing(i), "json": {"meta": {"caption": caption(i)}}},
        lambda found: document(image(found["jpg"]), found["json"]["meta"]["caption"]), mapping={"text": "meta.caption"}),
    tar("own-key", "`jpg`, `json` with `transcription`", lambda i: {"jpg": drawing(i), "json": {"transcription": caption(i)}},
        lambda found: document(image(found["jpg"]), found["json"]["transcription"]), mapping={"text": "transcription"}),
    tar("null-caption", "`jpg`, `txt`, `json` with a null under `caption`",
        lambda i: {"jpg": drawing(i), "txt": caption(i), "json": {"caption": None}}, _captioned("jpg")),
    tar("jpg-seg-png", "`jpg`, `txt`, and a mask `seg.png`",
        lambda i: {"jpg": drawing(i), "seg.png": drawing(i + 50, "L"), "txt": caption(i)}, _captioned("jpg"),
        mapping={"images": "jpg"}, refused_because="nothing says which picture is meant"),
    tar("jpg-and-jpeg", "`jpg` and `jpeg` of one key, `txt`",
        lambda i: {"jpg": drawing(i), "jpeg": drawing(i + 50), "txt": caption(i)}, _captioned("jpg"), mapping={"images": "jpg"},
        refused_because="nothing says which picture is meant"),
    tar("npy", "`jpg`, `txt`, and an embedding `npy`", lambda i: {"jpg": drawing(i), "npy": _array(i), "txt": caption(i)},
        _captioned("jpg"), mapping={"ignore": ["npy"]}, refused_because="nothing takes the array"),
    tar("pth", "latents in `pth`, `txt`", lambda i: {"pth": _tensor(i), "txt": caption(i)},
        lambda found: document(other("tensor", found["pth"]), found["txt"]), refused_because="latents are no picture"),
    tar("mp4-txt", "`mp4`, `txt`", lambda i: {"mp4": FILM, "txt": caption(i)},
        lambda found: document(other("video", found["mp4"]), found["txt"]), refused_because="films are not taken"),
    tar("mp4-llava", "`mp4`, `json` of LLaVA-Video with `<video>`",
        lambda i: {"mp4": FILM, "json": {"conversations": sharegpt(i, "<video>\n")}},
        lambda found: [["user", [other("video", found["mp4"])]]], refused_because="films are not taken"),
    tar("pdf-txt", "`pdf`, `txt`", lambda i: {"pdf": PDF, "txt": caption(i)},
        lambda found: document(other("pdf", found["pdf"]), found["txt"]), refused_because="pages are not drawn"),
    tar("idx-json", "`jpg`, `txt`, `idx` and `md5` beside",
        lambda i: {"jpg": drawing(i), "txt": caption(i), "idx": str(i).encode(), "md5": b"0" * 32}, _captioned("jpg")),
    tar("only-jpg", "`jpg` alone", lambda i: {"jpg": drawing(i)}, lambda found: document(image(found["jpg"])),
        refused_because="there is nothing to learn"),
    _splits("splits", "`train-*.tar` and `val-*.tar` side by side", "{}-00000.tar"),
    _splits("split-folders", "archives in `train/` and `val/`", "{}/00000.tar"),
    _splits("split-named", "one of these by name", "{}-00000.tar", path="train-*.tar"),
    tar("chatml-text", "`txt` with another trainer's `<|AUDIO|>`, `wav`",
        lambda i: {"wav": sound(i), "txt": f"<|AUDIO|>{caption(i)}"},
        lambda found: document(audio(found["wav"]), found["txt"].removeprefix("<|AUDIO|>")),
        mapping={"audio_placeholder": "<|AUDIO|>"}),
    tar("unicode-keys", "keys outside of ASCII", lambda i: {"jpg": drawing(i), "txt": f"Straße {i}, 東京"}, _captioned("jpg"),
        key="bild-ä-{:03d}"),
)  # fmt: skip


def _array(number: int) -> Any:
    import numpy as np

    return np.arange(8, dtype=np.float32) + number


def _tensor(number: int) -> Any:
    import torch

    return torch.arange(8.0) + number
