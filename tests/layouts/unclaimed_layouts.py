"""Media and placeholders in places that a reader may look past: nested, encoded, named by an address, in another trainer's words.

A layout here that became text alone would be the worst of all: nothing would tell.
"""

from __future__ import annotations

import base64
import re
from typing import Any

from tests.layouts.hf_parquet_layouts import parquet, picture_of
from tests.layouts.jsonl_layouts import Media, Row, jsonl, said
from tests.layouts.layout import Layout
from tests.layouts.material import answer, caption, drawing, picture, question, sharegpt, sound
from tests.layouts.plain import Part, Sample, conversation, document, image, other, turn
from tests.layouts.webdataset_layouts import tar

_ELSEWHERE = "its medium is elsewhere"


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decoded(text: str) -> Part:
    return image(base64.b64decode(text.rpartition("base64,")[2]))


def _placeholder(name: str, what: str, text: str, **others: Any) -> Layout:
    """Return the layout of captions that begin with a placeholder of another trainer, beside the picture that it stands for."""

    def caption_of(found: Row, load: Media) -> Sample:
        return document(load(found["image"]), found["caption"].removeprefix(text))

    def row(number: int) -> Row:
        return {"image": f"images/{number}.jpg", "caption": f"{text}{caption(number)}"}

    return jsonl(f"placeholder-{name}", f"`caption` with {what}", row, caption_of, mapping={"image_placeholder": text}, **others)


def _asked(name: str, what: str, text: str) -> Layout:
    """Return the layout of conversations with such a placeholder, and no field that names the picture."""
    return jsonl(
        f"orphan-{name}", f"`conversations` with {what}, and no picture", lambda i: {"conversations": sharegpt(i, text)},
        lambda found, load: [["user", [other("image", None)]]], media="", refused_because=_ELSEWHERE,
    )  # fmt: skip


def _pictured(found: Row, load: Media, *keys: str) -> Sample:
    value: Any = found
    for key in keys:
        value = value[int(key)] if isinstance(value, list) else value[key]
    return document(load(value), found["caption"])


def _inlined(row: Row) -> Sample:
    def taken(part: Row) -> Part:
        return picture_of(part["image"]) if part["type"] == "image" else str(part["text"])

    return [[turn["role"], [taken(part) for part in turn["content"]]] for turn in row["messages"]]


def _qwen(found: Row, load: Media) -> Sample:
    first, *others = said(found["conversations"])
    before, name, after = re.split("<img>(.*)</img>", first[1])
    return [turn("user", before, load(name), after), *conversation(others)]


_TOKENS = (
    ("qwen", "Qwen's `<|vision_start|><|image_pad|><|vision_end|>`", "<|vision_start|><|image_pad|><|vision_end|>"),
    ("llama", "Llama's `<|image|>`", "<|image|>"),
    ("phi", "Phi's `<|image_1|>`", "<|image_1|>"),
    ("gemma", "Gemma's `<start_of_image>`", "<start_of_image>"),
    ("pixtral", "Pixtral's `[IMG]`", "[IMG]"),
    ("mmmu", "MMMU's `<image 1>`", "<image 1>"),
    ("capital", "`<IMAGE>`", "<IMAGE>\n"),
    ("img", "`<img>`", "<img>\n"),
    ("hyphen", "LLaVA-NeXT's `<image-placeholder>`", "<image-placeholder>\n"),
    ("internlm", "InternLM's `<ImageHere>`", "<ImageHere>"),
)

LAYOUTS = (
    *(_placeholder(name, what, text) for name, what, text in _TOKENS),
    *(_asked(name, what, text) for name, what, text in _TOKENS),
    jsonl("qwen-img", "Qwen-VL: `Picture 1: <img>path</img>` in the turn",
        lambda i: {"conversations": sharegpt(i, f"Picture 1: <img>images/{i}.jpg</img>\n")}, _qwen),
    _asked("speech", "`<speech>`", "<speech>"),
    _asked("sound", "`<sound>`", "<sound>"),
    _asked("audio-pad", "`<|audio_pad|>`", "<|audio_bos|><|AUDIO|><|audio_eos|>"),
    jsonl("nested-image", "a picture named under `media`",
        lambda i: {"media": {"image": f"images/{i}.jpg"}, "caption": caption(i)},
        lambda found, load: _pictured(found, load, "media", "image"), mapping={"images": "media.image"}),
    jsonl("list-image", "a picture named in a list of objects",
        lambda i: {"media": [{"kind": "image", "file": f"images/{i}.jpg"}], "caption": caption(i)},
        lambda found, load: _pictured(found, load, "media", "0", "file"), mapping={"images": "media.*.file"}),
    jsonl("image-base64", "`image_base64`, `caption`", lambda i: {"image_base64": _encoded(picture(i)), "caption": caption(i)},
        lambda found, load: document(_decoded(found["image_base64"]), found["caption"]), media="",
        mapping={"images": "image_base64"}),
    jsonl("png-base64", "base64 under `data`, `caption`", lambda i: {"data": _encoded(picture(i, "PNG")), "caption": caption(i)},
        lambda found, load: document(_decoded(found["data"]), found["caption"]), media="", mapping={"images": "data"}),
    jsonl("image-data-url", "`image` as `data:image/jpeg;base64,`",
        lambda i: {"image": f"data:image/jpeg;base64,{_encoded(picture(i))}", "caption": caption(i)},
        lambda found, load: document(_decoded(found["image"]), found["caption"]), media=""),
    jsonl("field-data-url", "a data URL under `thumbnail`",
        lambda i: {"thumbnail": f"data:image/jpeg;base64,{_encoded(picture(i))}", "caption": caption(i)},
        lambda found, load: document(_decoded(found["thumbnail"]), found["caption"]), media="", mapping={"images": "thumbnail"}),
    jsonl("wav-base64", "`wav_base64`, `text`", lambda i: {"wav_base64": _encoded(sound(i)), "text": caption(i)},
        lambda found, load: document({"audio": _decoded(found["wav_base64"])["image"]}, found["text"]), media="",
        mapping={"audios": "wav_base64"}),
    jsonl("url", "COYO's metadata: `url` of a picture, `text`",
        lambda i: {"url": f"https://a.example/{i}.jpg", "text": caption(i), "clip_similarity": 0.3},
        lambda found, load: document(other("url", None), found["text"]), media="", refused_because=_ELSEWHERE),
    jsonl("image-address", "`image` that is a web address",
        lambda i: {"image": f"https://a.example/{i}.jpg", "caption": caption(i)},
        lambda found, load: document(other("url", None), found["caption"]), media="", refused_because=_ELSEWHERE),
    jsonl("webvid", "WebVid: `contentUrl` of a film, `text`",
        lambda i: {"contentUrl": f"https://a.example/{i}.mp4", "text": caption(i)},
        lambda found, load: document(other("url", None), found["text"]), media="", refused_because=_ELSEWHERE),
    jsonl("page-url", "a web crawl: `text`, `url` of the page",
        lambda i: {"url": f"https://a.example/{i}.html", "text": caption(i)}, lambda found, load: document(found["text"]),
        media=""),
    jsonl("pdf-url", "texts of PDFs with their `url`", lambda i: {"url": f"https://a.example/{i}.pdf", "text": caption(i)},
        lambda found, load: document(found["text"]), media=""),
    jsonl("frames", "`frames` of a film, `caption`", lambda i: {"frames": [f"images/{i}.jpg"], "caption": caption(i)},
        lambda found, load: document(other("video", None), found["caption"]), refused_because="films are not taken"),
    jsonl("mask", "`image`, `mask`, `caption`",
        lambda i: {"image": f"images/{i}.jpg", "mask": f"images/{i}.jpg", "caption": caption(i)},
        lambda found, load: document(load(found["image"]), found["caption"]), mapping={"ignore": ["mask"]},
        refused_because="nothing takes the mask"),
    jsonl("llava-empty", "LLaVA: an empty `image` in rows of text", lambda i: {"image": "", "conversations": sharegpt(i, "")},
        lambda found, load: conversation(said(found["conversations"])), media=""),
    jsonl("llava-null", "LLaVA: a null `image` in rows of text", lambda i: {"image": None, "conversations": sharegpt(i, "")},
        lambda found, load: conversation(said(found["conversations"])), media=""),
    jsonl("images-empty", "an empty list of `images` in rows of text", lambda i: {"images": [], "conversations": sharegpt(i, "")},
        lambda found, load: conversation(said(found["conversations"])), media=""),
    parquet("nested-image", "a feature `Image` in a struct",
        lambda i: {"sample": {"picture": drawing(i), "id": i}, "caption": caption(i)},
        lambda row: document(picture_of(row["sample"]["picture"]), row["caption"]),
        lambda d: {"sample": {"picture": d.Image(), "id": d.Value("int64")}, "caption": d.Value("string")},
        mapping={"images": "sample.picture"}),
    parquet("pages", "pages as a list of structs with an `Image`",
        lambda i: {"pages": [{"image": drawing(i), "number": 1}], "text": caption(i)},
        lambda row: document(picture_of(row["pages"][0]["image"]), row["text"]),
        lambda d: {"pages": d.List({"image": d.Image(), "number": d.Value("int64")}), "text": d.Value("string")},
        mapping={"images": "pages.*.image"}),
    parquet("struct-data", "a struct `{data, format}` with a picture",
        lambda i: {"picture": {"data": picture(i), "format": "jpg"}, "text": caption(i)},
        lambda row: document(image(row["picture"]["data"]), row["text"]),
        lambda d: {"picture": {"data": d.Value("binary"), "format": d.Value("string")}, "text": d.Value("string")},
        mapping={"images": "picture.data"}),
    parquet("null-first", "a list of `Image` under another name whose first is null",
        lambda i: {"scans": [None, drawing(i)], "text": caption(i)},
        lambda row: document(picture_of(row["scans"][1]), row["text"]),
        lambda d: {"scans": d.List(d.Image()), "text": d.Value("string")}),
    parquet("inline-bytes", "messages whose parts hold an `Image`",
        lambda i: {"messages": [{"role": "user",
                "content": [{"type": "image", "image": drawing(i), "text": None},
                {"type": "text", "image": None, "text": question(i)}]},
                {"role": "assistant", "content": [{"type": "text", "image": None, "text": answer(i)}]}]}, _inlined,
        lambda d: {"messages": d.List({"role": d.Value("string"),
                "content": d.List({"type": d.Value("string"), "image": d.Image(), "text": d.Value("string")})})}),
    parquet("mmmu", "MMMU: `image_1`, `question` with `<image 1>`, `answer`",
        lambda i: {"image_1": drawing(i), "question": f"<image 1>{question(i)}", "answer": answer(i)},
        lambda row: [["user", [picture_of(row["image_1"]), row["question"].removeprefix("<image 1>")]],
            ["assistant", [row["answer"]]]],
        lambda d: {"image_1": d.Image(), "question": d.Value("string"), "answer": d.Value("string")},
        mapping={"images": "image_1", "image_placeholder": "<image 1>"}),
    parquet("images-2d", "pictures as lists of pixels under `pixels`",
        lambda i: {"pixels": [[0, i], [i, 255]], "caption": caption(i)}, lambda row: document(row["caption"])),
    tar("json-base64", "`json` with base64 under `image`, `caption`",
        lambda i: {"json": {"image": _encoded(picture(i)), "caption": caption(i)}},
        lambda found: document(_decoded(found["json"]["image"]), found["json"]["caption"])),
    tar("json-url", "`json` with the `url` of a picture, `txt`, no picture",
        lambda i: {"txt": caption(i), "json": {"url": f"https://a.example/{i}.jpg"}},
        lambda found: document(other("url", None), found["txt"]), refused_because=_ELSEWHERE),
    tar("wds-nested", "`json` that names a member in a list of objects",
        lambda i: {"0.jpg": drawing(i), "json": {"caption": caption(i), "media": [{"file": "0.jpg"}]}},
        lambda found: document(image(found["0.jpg"]), found["json"]["caption"])),
)  # fmt: skip
