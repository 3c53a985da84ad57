"""Parquet as Hugging Face `datasets` writes it: features of every kind, read by `datasets` itself without decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers import Peer
from tests.layouts.layout import Layout
from tests.layouts.material import COUNT, FILM, PDF, answer, caption, drawing, messages, picture, question, sharegpt, sound
from tests.layouts.plain import Part, Sample, audio, conversation, dialogue, document, filled, image, other

# Sounds and films stay encoded here, and torchcodec, which would decode them, wants CUDA's libraries.
_STUBS = {
    "torchcodec/__init__.py": "",
    "torchcodec/decoders.py": "class AudioDecoder: ...\n\n\nclass VideoDecoder: ...\n",
    "torchcodec/encoders.py": "class AudioEncoder: ...\n\n\nclass VideoEncoder: ...\n",
}
DATASETS = Peer(
    title="Hugging Face datasets", module="datasets", requirements=("datasets==5.0.*", "pdfplumber", "zstandard"), stubs=_STUBS
)

Row = Mapping[str, Any]


def dataset(rows: list[Row], features: Callable[[Any], dict[str, Any]] | None = None) -> Any:
    """Return rows as a `datasets.Dataset`; `features` is given the module, None lets it infer them."""
    import datasets

    return datasets.Dataset.from_list([dict(row) for row in rows], datasets.Features(features(datasets)) if features else None)


def undecoded(found: Any) -> Any:
    """Return a data set whose recordings, films and pages stay as they are stored; pictures are decoded by Pillow."""
    import datasets

    def stored(feature: Any) -> Any:
        if isinstance(feature, datasets.List):
            return datasets.List(stored(feature.feature))
        return type(feature)(decode=False) if isinstance(feature, datasets.Audio | datasets.Video | datasets.Pdf) else feature

    return found.cast(datasets.Features({name: stored(feature) for name, feature in found.features.items()}))


def picture_of(value: Any) -> Part:
    """Return the digest of what a feature Image gives, or of bytes."""
    return image(value)


def sound_of(value: Any) -> Part:
    """Return the digest of what an undecoded feature Audio gives: bytes, or the path of a file."""
    return audio(value["bytes"] or Path(value["path"]).read_bytes())


def parquet(
    name: str,
    what: str,
    row: Callable[[int], Row],
    sample: Callable[[Row], Sample],
    features: Callable[[Any], dict[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    **others: Any,
) -> Layout:
    """Return the layout of one Parquet file with these rows, and what a row of the reader means."""

    def write(folder: Path) -> None:
        dataset([row(number) for number in range(COUNT)], features).to_parquet(str(folder / "train.parquet"), **(options or {}))

    def read(folder: Path) -> list[Sample]:
        import datasets

        found = datasets.load_dataset(
            "parquet", data_files=str(folder / "*.parquet"), split="train", cache_dir=str(folder / ".cache")
        )
        return [sample(item) for item in undecoded(found)]

    return Layout(name=f"hf-{name}", writer=DATASETS, what=what, write=write, read=read, **others)


def _pil(form: str = "PNG", mode: str = "RGB") -> Callable[[int], Row]:
    return lambda i: {"image": {"bytes": picture(i, form, mode), "path": f"{i}.{form.lower()}"}, "text": caption(i)}


def _image_text(row: Row) -> Sample:
    return document(picture_of(row["image"]), row["text"])


def _IMAGE_TEXT(d: Any) -> dict[str, Any]:  # noqa: N802 - a constant that needs the module
    return {"image": d.Image(), "text": d.Value("string")}


def _turns(row: Row) -> list[tuple[str, str]]:
    return [(turn["from"], turn["value"]) for turn in row["conversations"]]


def _said(row: Row) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"]) for turn in row["messages"]]


def _parts(row: Row) -> Sample:
    """Return messages of typed parts, whose pictures are in `images`, in order."""
    waiting = iter(row["images"])
    take = {"text": lambda part: part["text"], "image": lambda _: picture_of(next(waiting))}
    return [[turn["role"], [take[part["type"]](part) for part in turn["content"]]] for turn in row["messages"]]


def _typed(number: int) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": question(number)}]},
        {"role": "assistant", "content": [{"type": "text", "text": answer(number)}]},
    ]


LAYOUTS = (
    parquet("image-text", "features `Image`, `Value`", lambda i: {"image": drawing(i), "text": caption(i)}, _image_text,
        _IMAGE_TEXT),
    parquet("image-jpeg", "`Image` of JPEG bytes", _pil("JPEG"), _image_text, _IMAGE_TEXT),
    parquet("image-webp", "`Image` of WebP bytes", _pil("WEBP"), _image_text, _IMAGE_TEXT),
    parquet("image-gray", "`Image` of grey PNG", _pil("PNG", "L"), _image_text, _IMAGE_TEXT),
    parquet("image-tiff", "`Image` of TIFF bytes", _pil("TIFF"), _image_text, _IMAGE_TEXT),
    parquet("image-caption", "columns `image`, `caption`, `id`", lambda i: {"image": drawing(i), "caption": caption(i), "id": i},
        lambda row: document(picture_of(row["image"]), row["caption"]),
        lambda d: {"image": d.Image(), "caption": d.Value("string"), "id": d.Value("int64")}),
    parquet("jpg-txt", "feature `Image` called `jpg`, `txt`", lambda i: {"jpg": drawing(i), "txt": caption(i)},
        lambda row: document(picture_of(row["jpg"]), row["txt"]), lambda d: {"jpg": d.Image(), "txt": d.Value("string")},
        mapping={"images": "jpg"}),
    parquet("img-caption", "feature `Image` called `img`", lambda i: {"img": drawing(i), "caption": caption(i)},
        lambda row: document(picture_of(row["img"]), row["caption"]), lambda d: {"img": d.Image(), "caption": d.Value("string")},
        mapping={"images": "img"}),
    parquet("own-names", "features of names of one's own", lambda i: {"scan": drawing(i), "transcription": caption(i)},
        lambda row: document(picture_of(row["scan"]), row["transcription"]),
        lambda d: {"scan": d.Image(), "transcription": d.Value("string")}, mapping={"images": "scan", "text": "transcription"}),
    parquet("binary", "pictures in a column of type binary", lambda i: {"image": picture(i), "caption": caption(i)},
        lambda row: document(image(row["image"]), row["caption"]),
        lambda d: {"image": d.Value("binary"), "caption": d.Value("string")}),
    parquet("large-binary", "pictures in a column of type large_binary", lambda i: {"image": picture(i), "caption": caption(i)},
        lambda row: document(image(row["image"]), row["caption"]),
        lambda d: {"image": d.Value("large_binary"), "caption": d.Value("large_string")}),
    parquet("label", "`Image`, `ClassLabel`", lambda i: {"image": drawing(i), "label": i % 2},
        lambda row: document(picture_of(row["image"]), str(row["label"])),
        lambda d: {"image": d.Image(), "label": d.ClassLabel(names=["cat", "dog"])},
        refused_because="a number is no text that a model can learn"),
    parquet("label-caption", "`Image`, `ClassLabel`, `caption`",
        lambda i: {"image": drawing(i), "label": i % 2, "caption": caption(i)},
        lambda row: document(picture_of(row["image"]), row["caption"]),
        lambda d: {"image": d.Image(), "label": d.ClassLabel(names=["cat", "dog"]), "caption": d.Value("string")}),
    parquet("sequence-images", "`Sequence(Image)` with placeholders in `texts`",
        lambda i: {"images": [drawing(i), drawing(i + 9)],
            "texts": [{"user": f"<image><image>{question(i)}", "assistant": answer(i)}]},
        lambda row: dialogue(filled(row["texts"][0]["user"], *map(picture_of, row["images"])), row["texts"][0]["assistant"]),
        lambda d: {"images": d.List(d.Image()), "texts": d.List({"user": d.Value("string"), "assistant": d.Value("string")})}),
    parquet("cauldron", "The Cauldron, FineVision: `images`, `texts` without placeholders",
        lambda i: {"images": [drawing(i)],
            "texts": [{"user": question(i), "assistant": answer(i), "source": "made"},
                {"user": "Sure?", "assistant": "Yes.", "source": "made"}]},
        lambda row: [*dialogue([*map(picture_of, row["images"]), row["texts"][0]["user"]], row["texts"][0]["assistant"]),
            *dialogue([row["texts"][1]["user"]], row["texts"][1]["assistant"])],
        lambda d: {"images": d.List(d.Image()),
            "texts": d.List({k: d.Value("string") for k in ("user", "assistant", "source")})}),
    parquet("no-images", "The Cauldron: rows of text with an empty `images`",
        lambda i: {"images": [], "texts": [{"user": question(i), "assistant": answer(i)}]},
        lambda row: dialogue([row["texts"][0]["user"]], row["texts"][0]["assistant"]),
        lambda d: {"images": d.List(d.Image()), "texts": d.List({k: d.Value("string") for k in ("user", "assistant")})}),
    parquet("llava", "LLaVA-OneVision-Data: `image`, `conversations`",
        lambda i: {"id": str(i), "image": drawing(i), "conversations": sharegpt(i), "data_source": "made"},
        lambda row: conversation(_turns(row), picture_of(row["image"])),
        lambda d: {"id": d.Value("string"), "image": d.Image(), "data_source": d.Value("string"),
            "conversations": d.List({"from": d.Value("string"), "value": d.Value("string")})}),
    parquet("llava-text", "the same with a null image in rows of text",
        lambda i: {"image": None, "conversations": sharegpt(i, "")}, lambda row: conversation(_turns(row)),
        lambda d: {"image": d.Image(), "conversations": d.List({"from": d.Value("string"), "value": d.Value("string")})}),
    parquet("conversations-json", "`conversations` as a JSON string",
        lambda i: {"image": drawing(i), "conversations": _json(sharegpt(i))},
        lambda row: conversation([(turn["from"], turn["value"]) for turn in _parsed(row["conversations"])],
            picture_of(row["image"])), lambda d: {"image": d.Image(), "conversations": d.Value("string")}),
    parquet("messages", "`messages` with `<image>` in the text, `images`",
        lambda i: {"messages": messages(i), "images": [drawing(i)]},
        lambda row: conversation(_said(row), *map(picture_of, row["images"])),
        lambda d: {"images": d.List(d.Image()), "messages": d.List({"role": d.Value("string"), "content": d.Value("string")})}),
    parquet("messages-parts", "TRL: `messages` of typed parts, `images`",
        lambda i: {"messages": _typed(i), "images": [drawing(i)]}, _parts,
        lambda d: {"images": d.List(d.Image()),
            "messages": d.List({"role": d.Value("string"),
                "content": d.List({"type": d.Value("string"), "text": d.Value("string")})})}),
    parquet("messages-index", "HuggingFaceH4 llava-instruct-mix: parts with `index`",
        lambda i: {"images": [drawing(i), drawing(i + 9)],
            "messages": [{"role": "user", "content": [{"index": 1, "text": None, "type": "image"},
                {"index": 0, "text": None, "type": "image"}, {"index": None, "text": question(i), "type": "text"}]},
                {"role": "assistant", "content": [{"index": None, "text": answer(i), "type": "text"}]}]},
        lambda row: dialogue([picture_of(row["images"][1]), picture_of(row["images"][0]),
                row["messages"][0]["content"][2]["text"]], row["messages"][1]["content"][0]["text"]),
        lambda d: {"images": d.List(d.Image()),
            "messages": d.List({"role": d.Value("string"),
                "content": d.List({"index": d.Value("int64"), "text": d.Value("string"), "type": d.Value("string")})})}),
    parquet("trl-no-placeholder", "TRL: `images` and `messages` of text without a placeholder",
        lambda i: {"images": [drawing(i)], "messages": messages(i, "")},
        lambda row: dialogue([*map(picture_of, row["images"]), row["messages"][0]["content"]], row["messages"][1]["content"]),
        lambda d: {"images": d.List(d.Image()), "messages": d.List({"role": d.Value("string"), "content": d.Value("string")})}),
    parquet("trl-prompt", "TRL: `prompt`, `completion` as messages",
        lambda i: {"prompt": messages(i, "")[:1], "completion": messages(i, "")[1:]},
        lambda row: dialogue([row["prompt"][0]["content"]], row["completion"][0]["content"]),
        lambda d: {name: d.List({"role": d.Value("string"), "content": d.Value("string")}) for name in ("prompt", "completion")}),
    parquet("trl-dpo", "TRL: `prompt`, `chosen`, `rejected`",
        lambda i: {"prompt": question(i), "chosen": answer(i), "rejected": "No."},
        lambda row: dialogue([row["prompt"]], row["chosen"]), refused_because="preferences are no text to learn"),
    parquet("audio-text", "features `Audio`, `Value`",
        lambda i: {"audio": {"bytes": sound(i), "path": f"{i}.wav"}, "text": caption(i)},
        lambda row: document(sound_of(row["audio"]), row["text"]), lambda d: {"audio": d.Audio(), "text": d.Value("string")}),
    parquet("audio-rate", "`Audio(16000)` and a `sentence`, as Common Voice",
        lambda i: {"audio": {"bytes": sound(i, "MP3"), "path": None}, "sentence": caption(i)},
        lambda row: document(sound_of(row["audio"]), row["sentence"]),
        lambda d: {"audio": d.Audio(16000), "sentence": d.Value("string")}),
    parquet("audio-list", "`Sequence(Audio)` with placeholders",
        lambda i: {"audios": [{"bytes": sound(i), "path": None}], "messages": messages(i, "<audio>")},
        lambda row: conversation(_said(row), *map(sound_of, row["audios"])),
        lambda d: {"audios": d.List(d.Audio()), "messages": d.List({"role": d.Value("string"), "content": d.Value("string")})}),
    parquet("image-path", "`{bytes, path}` that holds only paths",
        lambda i: {"image": {"bytes": None, "path": f"{i}.jpg"}, "text": caption(i)},
        lambda row: document(other("path", row["image"]["path"]), row["text"]),
        lambda d: {"image": {"bytes": d.Value("binary"), "path": d.Value("string")}, "text": d.Value("string")},
        refused_because="the picture is not in the file"),
    parquet("image-null", "`Image` that is null, and a caption", lambda i: {"image": None, "text": caption(i)},
        lambda row: document(row["text"]), _IMAGE_TEXT),
    parquet("two-images", "two features `Image`, of which one is a mask",
        lambda i: {"image": drawing(i), "mask": drawing(i, "L"), "text": caption(i)}, _image_text,
        lambda d: {"image": d.Image(), "mask": d.Image(), "text": d.Value("string")}, mapping={"ignore": ["mask"]},
        refused_because="nothing takes the mask"),
    parquet("embedding", "`Image`, `text`, and an embedding of floats",
        lambda i: {"image": drawing(i), "text": caption(i), "clip": [0.5] * 16}, _image_text,
        lambda d: {"image": d.Image(), "text": d.Value("string"), "clip": d.List(d.Value("float32"))}),
    parquet("video", "feature `Video`", lambda i: {"video": {"bytes": FILM, "path": f"{i}.mp4"}, "text": caption(i)},
        lambda row: document(other("video", row["video"]), row["text"]),
        lambda d: {"video": d.Video(), "text": d.Value("string")}, refused_because="films are not taken"),
    parquet("pdf", "feature `Pdf`", lambda i: {"pdf": {"bytes": PDF, "path": f"{i}.pdf"}, "text": caption(i)},
        lambda row: document(other("pdf", row["pdf"]), row["text"]), lambda d: {"pdf": d.Pdf(), "text": d.Value("string")},
        refused_because="pages are not drawn"),
    parquet("array2d", "`Array2D` in the place of a picture", lambda i: {"image": [[i] * 4] * 4, "text": caption(i)},
        lambda row: document(other("array", b""), row["text"]),
        lambda d: {"image": d.Array2D((4, 4), "uint8"), "text": d.Value("string")}, refused_because="numbers are no picture"),
    parquet("text", "`text` alone", lambda i: {"text": caption(i)}, lambda row: document(row["text"])),
    parquet("obelics", "OBELICS: `images` and `texts` with nulls in turn",
        lambda i: {"images": [drawing(i), None, drawing(i + 9)], "texts": [None, caption(i), None]},
        lambda row: document(picture_of(row["images"][0]), row["texts"][1], picture_of(row["images"][2])),
        lambda d: {"images": d.List(d.Image()), "texts": d.List(d.Value("string"))}),
    parquet("vqa", "`image`, `question`, `answer`", lambda i: {"image": drawing(i), "question": question(i), "answer": answer(i)},
        lambda row: dialogue([picture_of(row["image"]), row["question"]], row["answer"]),
        lambda d: {"image": d.Image(), "question": d.Value("string"), "answer": d.Value("string")}),
    parquet("vqa-answers", "DocVQA: `image`, `question`, a list of `answers`",
        lambda i: {"image": drawing(i), "question": question(i), "answers": [answer(i), "something"]},
        lambda row: dialogue([picture_of(row["image"]), row["question"]], row["answers"][0]),
        lambda d: {"image": d.Image(), "question": d.Value("string"), "answers": d.List(d.Value("string"))}),
    parquet("gsm8k", "GSM8K: `question`, `answer`", lambda i: {"question": question(i), "answer": answer(i)},
        lambda row: dialogue([row["question"]], row["answer"])),
    parquet("rows-1", "one row a row group", lambda i: {"image": drawing(i), "text": caption(i)}, _image_text, _IMAGE_TEXT,
        {"batch_size": 1}),
    parquet("base64", "pictures as base64 strings", lambda i: {"image": _base64(picture(i)), "text": caption(i)},
        lambda row: document(image(_unbase64(row["image"])), row["text"])),
)  # fmt: skip


def _json(value: Any) -> str:
    import json

    return json.dumps(value)


def _parsed(text: str) -> Any:
    import json

    return json.loads(text)


def _base64(data: bytes) -> str:
    import base64

    return base64.b64encode(data).decode()


def _unbase64(text: str) -> bytes:
    import base64

    return base64.b64decode(text)
