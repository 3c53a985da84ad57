"""Dialects of JSON lines: one annotation a line, read by Hugging Face `datasets`, with media as files beside them.

How the fields make up a sample is each dialect's own rule; its name says whose.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.layouts.hf_folder_layouts import lines, put
from tests.layouts.hf_parquet_layouts import DATASETS
from tests.layouts.layout import Layout
from tests.layouts.material import COUNT, answer, caption, messages, picture, question, sharegpt, sound
from tests.layouts.plain import Sample, audio, conversation, dialogue, document, filled, image, turn

Row = dict[str, Any]
Media = Callable[[str], Any]
"""Returns the digest of a file by its name in the annotation."""


def jsonl(
    name: str,
    what: str,
    row: Callable[[int], Row],
    sample: Callable[[Row, Media], Sample],
    *,
    file: str = "train.jsonl",
    text: Callable[[list[Row]], str | bytes] = lines,
    media: str = "images/{}.jpg",
    sounds: str = "",
    read_rows: Callable[[Path], list[Row]] | None = None,
    **others: Any,
) -> Layout:
    """Return the layout of one file of JSON, with a picture (or a recording) for each number, and what a row means."""

    def write(folder: Path) -> None:
        put(folder, file, text([row(number) for number in range(COUNT)]))
        for number in range(COUNT):
            if media:
                put(folder, media.format(number), picture(number))
            if sounds:
                put(folder, sounds.format(number), sound(number))

    def read(folder: Path) -> list[Sample]:
        rows = read_rows(folder / file) if read_rows else load_json(folder / file)

        def load(path: str) -> Any:
            data = (folder / file).parent.joinpath(path).read_bytes()
            return audio(data) if path.endswith((".wav", ".flac", ".mp3")) else image(data)

        return [sample(found, load) for found in rows]

    return Layout(name=f"jsonl-{name}", writer=DATASETS, what=what, write=write, read=read, **others)


def load_json(path: Path) -> list[Row]:
    """Return the rows that `datasets` reads of a JSON file, without the nulls that its schema adds to structs."""
    import datasets

    found = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(path.parent / ".cache"))
    return [_without_nulls(dict(row)) for row in found]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def said(turns: list[Row]) -> list[tuple[str, str]]:
    """Return ShareGPT's turns, or messages, as (role, text)."""
    return [(item["from"], item["value"]) if "from" in item else (item["role"], item["content"]) for item in turns]


def _parts(content: Any, load: Media) -> list[Any]:
    """Return the parts of a message whose media are named inside of them."""
    if isinstance(content, str):
        return [content]
    parts = []
    for part in content:
        address = part.get("image_url")
        name = (
            part.get("image")
            or part.get("audio")
            or part.get("url")
            or (address.get("url") if isinstance(address, dict) else address)
        )
        parts.append(
            _data_url(name) if name and name.startswith("data:") else load(name.removeprefix("file://")) if name else part["text"]
        )
    return parts


def _data_url(url: str) -> Any:
    import base64

    return image(base64.b64decode(url.partition("base64,")[2]))


def _inline(found: Row, load: Media) -> Sample:
    return [turn(item["role"], *_parts(item["content"], load)) for item in found["messages"]]


def _asked(number: int, part: Row) -> Row:
    content = [part, {"type": "text", "text": question(number)}]
    return {
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [{"type": "text", "text": answer(number)}]},
        ]
    }


def _base64(number: int) -> str:
    import base64

    return base64.b64encode(picture(number)).decode()


def _llava(found: Row, load: Media) -> Sample:
    images = found.get("image") or []
    return conversation(said(found["conversations"]), *map(load, [images] if isinstance(images, str) else images))


def _several(number: int) -> Row:
    turns = [{"from": "human", "value": f"<image> and <image>: {question(number)}"}, {"from": "gpt", "value": answer(number)}]
    return {"image": [f"images/{number}.jpg", "images/0.jpg"], "conversations": turns}


LAYOUTS = (
    jsonl("caption", "`caption`, `image`", lambda i: {"image": f"images/{i}.jpg", "caption": caption(i)},
        lambda found, load: document(load(found["image"]), found["caption"])),
    jsonl("text", "`text` alone", lambda i: {"text": caption(i)}, lambda found, load: document(found["text"]), media=""),
    jsonl("unicode", "texts outside of ASCII, not escaped", lambda i: {"text": f"Straße {i} 東京 🙂"},
        lambda found, load: document(found["text"]), media=""),
    jsonl("bom", "byte-order mark and CRLF", lambda i: {"text": caption(i)}, lambda found, load: document(found["text"]),
        media="", text=lambda rows: b"\xef\xbb\xbf" + lines(rows).replace("\n", "\r\n").encode(),
        read_rows=lambda path: plain_lines(path)),
    jsonl("audio", "`audio`, `text`", lambda i: {"audio": f"wav/{i}.wav", "text": caption(i)},
        lambda found, load: document(load(found["audio"]), found["text"]), media="", sounds="wav/{}.wav"),
    jsonl("nemo", "NeMo manifest: `audio_filepath`, `duration`, `text`",
        lambda i: {"audio_filepath": f"wav/{i}.wav", "duration": 0.2, "text": caption(i)},
        lambda found, load: document(load(found["audio_filepath"]), found["text"]), media="", sounds="wav/{}.wav",
        file="manifest.jsonl", mapping={"audios": "audio_filepath"}),
    jsonl("nemo-json", "the same called `manifest.json`, as NeMo names it",
        lambda i: {"audio_filepath": f"wav/{i}.wav", "duration": 0.2, "text": caption(i)},
        lambda found, load: document(load(found["audio_filepath"]), found["text"]), media="", sounds="wav/{}.wav",
        file="manifest.json"),
    jsonl("llava", "LLaVA: `image`, `conversations`",
        lambda i: {"id": str(i), "image": f"images/{i}.jpg", "conversations": sharegpt(i)}, _llava),
    jsonl("llava-text", "LLaVA: rows of text without `image`", lambda i: {"id": str(i), "conversations": sharegpt(i, "")}, _llava,
        media=""),
    jsonl("llava-several", "LLaVA: a list of images", _several, _llava),
    jsonl("llava-array", "LLaVA's `.json` array",
        lambda i: {"id": str(i), "image": f"images/{i}.jpg", "conversations": sharegpt(i)}, _llava, file="llava.json",
        text=lambda rows: _dumped(rows)),
    jsonl("llava-beside", "LLaVA: annotations in a folder, pictures in `../images`",
        lambda i: {"image": f"../images/{i}.jpg", "conversations": sharegpt(i)}, _llava, file="annotations/train.jsonl"),
    jsonl("llava-video", "LLaVA-Video: `video` and `<video>`",
        lambda i: {"video": f"{i}.mp4", "conversations": sharegpt(i, "<video>\n")},
        lambda found, load: [turn("user", {"video": found["video"]})], media="", refused_because="films are not taken"),
    jsonl("sharegpt", "ShareGPT: `conversations` of text", lambda i: {"conversations": sharegpt(i, "")},
        lambda found, load: conversation(said(found["conversations"])), media=""),
    jsonl("sharegpt-system", "ShareGPT with `system` beside the turns",
        lambda i: {"system": "You are a pirate.", "conversations": sharegpt(i, "")},
        lambda found, load: [turn("system", found["system"]), *conversation(said(found["conversations"]))], media=""),
    jsonl("sharegpt-images", "LLaMA-Factory: `conversations`, `images`",
        lambda i: {"conversations": sharegpt(i, "<image>"), "images": [f"images/{i}.jpg"]},
        lambda found, load: conversation(said(found["conversations"]), *map(load, found["images"]))),
    jsonl("llamafactory-messages", "LLaMA-Factory: `messages`, `images`",
        lambda i: {"messages": messages(i), "images": [f"images/{i}.jpg"]},
        lambda found, load: conversation(said(found["messages"]), *map(load, found["images"]))),
    jsonl("swift", "ms-swift: `messages`, `images`, `audios`",
        lambda i: {"messages": messages(i, "<image><audio>"), "images": [f"images/{i}.jpg"], "audios": [f"wav/{i}.wav"]},
        lambda found, load: conversation(said(found["messages"]), load(found["images"][0]), load(found["audios"][0])),
        sounds="wav/{}.wav"),
    jsonl("messages", "OpenAI: `messages` of text", lambda i: {"messages": messages(i, "")},
        lambda found, load: conversation(said(found["messages"])), media=""),
    jsonl("messages-system", "OpenAI: with a turn of the system",
        lambda i: {"messages": [{"role": "system", "content": "Be brief."}, *messages(i, "")]},
        lambda found, load: conversation(said(found["messages"])), media=""),
    jsonl("messages-weight", "OpenAI: an answer of `weight` 0",
        lambda i: {"messages": [*messages(i, ""), {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "5", "weight": 0}]},
        lambda found, load: [turn(item["role"], item["content"], learnt=item.get("weight") != 0) for item in found["messages"]],
        media=""),
    jsonl("qwen-inline", "Qwen-VL: `{type: image, image: path}` in the turn",
        lambda i: _asked(i, {"type": "image", "image": f"images/{i}.jpg"}), _inline),
    jsonl("qwen-file-url", "Qwen-VL: `image: file://` of a relative path",
        lambda i: _asked(i, {"type": "image", "image": f"file://images/{i}.jpg"}), _inline),
    jsonl("qwen-audio", "Qwen2-Audio: `{type: audio, audio: path}`",
        lambda i: _asked(i, {"type": "audio", "audio": f"wav/{i}.wav"}), _inline, media="", sounds="wav/{}.wav"),
    jsonl("image-url", "OpenAI: `image_url` of a path",
        lambda i: _asked(i, {"type": "image_url", "image_url": {"url": f"images/{i}.jpg"}}), _inline),
    jsonl("data-url", "OpenAI: `image_url` of `data:image/jpeg;base64,`",
        lambda i: _asked(i, {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{_base64(i)}"}}), _inline,
        media=""),
    jsonl("hf-url-part", "transformers: `{type: image, url: path}`",
        lambda i: _asked(i, {"type": "image", "url": f"images/{i}.jpg"}), _inline),
    jsonl("parts-images", "typed parts without names, `images` beside",
        lambda i: {**_asked(i, {"type": "image"}), "images": [f"images/{i}.jpg"]},
        lambda found, load: dialogue([load(found["images"][0]), found["messages"][0]["content"][1]["text"]],
            found["messages"][1]["content"][0]["text"])),
    jsonl("base64", "`image` as base64", lambda i: {"image": _base64(i), "caption": caption(i)},
        lambda found, load: document(_data_url(f"base64,{found['image']}"), found["caption"]), media=""),
    jsonl("interleaved", "a list of texts with `<image>`",
        lambda i: {"texts": ["See", "<image>", caption(i)], "images": [f"images/{i}.jpg"]},
        lambda found, load: document(*filled("".join(found["texts"]), load(found["images"][0])))),
)  # fmt: skip


def plain_lines(path: Path) -> list[Row]:
    """Return the rows that Python's own reader reads of JSON lines."""
    import json

    return [json.loads(line) for line in path.read_text("utf-8-sig").splitlines()]


def _dumped(rows: list[Row]) -> str:
    import json

    return json.dumps(rows, indent=2)
