"""MosaicML Streaming: MDS shards of every encoding and packing, JSON and CSV shards, splits; read by `StreamingDataset`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers import PEERS
from tests.layouts.layout import Layout
from tests.layouts.material import COUNT, answer, caption, drawing, messages, picture, question, sharegpt, sound
from tests.layouts.plain import Sample, audio, conversation, dialogue, document, image, other

STREAMING = next(peer for peer in PEERS if peer.module == "mosaicml")

Row = Mapping[str, Any]


def mds(
    name: str,
    what: str,
    columns: Mapping[str, str],
    row: Callable[[int], Row],
    sample: Callable[[Row], Sample],
    *,
    writer: str = "MDSWriter",
    below: str = "",
    rows: int = COUNT,
    options: Mapping[str, Any] | None = None,
    then: Callable[[Path], None] | None = None,
    **others: Any,
) -> Layout:
    """Return the layout of a folder of shards with these columns; `then` changes the folder after it is written."""

    def write(folder: Path) -> None:
        import streaming

        kind = getattr(streaming, writer)
        with kind(out=str(folder / below), columns=dict(columns), **(options or {})) as stream:
            for number in range(rows):
                stream.write(dict(row(number)))
        if then:
            then(folder)

    def read(folder: Path) -> list[Sample]:
        from streaming import StreamingDataset

        options = {"batch_size": 1, "shuffle": False, "allow_unsafe_types": True}
        found = StreamingDataset(remote=str(folder / below), local=str(folder / ".local"), **options)
        return [sample(found[index]) for index in range(len(found))]

    return Layout(name=f"mosaic-{name}", writer=STREAMING, what=what, write=write, read=read, **others)


def _captioned(row: Row) -> Sample:
    return document(image(row["image"]), row["caption"])


def _pair(i: int) -> Row:
    return {"image": picture(i), "caption": caption(i)}


_BYTES = {"image": "bytes", "caption": "str"}


def _packed(packing: str) -> Layout:
    return mds(f"mds-{packing}", f"packed with {packing}", _BYTES, _pair, _captioned, options={"compression": packing})


def _scalar(encoding: str, value: Callable[[int], Any]) -> Layout:
    return mds(f"mds-{re.sub('[^a-z0-9]+', '-', encoding)}", f"a column of `{encoding}` beside `image`, `caption`",
               {**_BYTES, "extra": encoding}, lambda i: {**_pair(i), "extra": value(i)}, _captioned)  # fmt: skip


def _mode(mode: str) -> Layout:
    return mds(f"mds-pil-{mode.lower().replace(';', '')}", f"`image: pil` of mode {mode}", {"image": "pil", "caption": "str"},
               lambda i: {"image": drawing(i, mode), "caption": caption(i)}, _captioned)  # fmt: skip


def _numpy(value: Any, kind: str) -> Any:
    import numpy as np

    return np.asarray(value, kind)


def _with_validation(folder: Path) -> None:
    """Add a split for evaluation, which no reader of the training split sees."""
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "val"), columns=_BYTES) as stream:
        for number in range(20, 20 + COUNT):
            stream.write(dict(_pair(number)))


def _with_text_twin(folder: Path) -> None:
    """Add the metadata that some exporters leave beside the shards."""
    (folder / "stats.json").write_text("{}")


_JSON_COLUMNS = {"question": "str", "answer": "str"}

LAYOUTS = (
    mds("mds-jpeg", "`image: jpeg`, `caption: str`", {"image": "jpeg", "caption": "str"},
        lambda i: {"image": _opened(i), "caption": caption(i)}, _captioned),
    mds("mds-png", "`image: png`", {"image": "png", "caption": "str"}, lambda i: {"image": drawing(i), "caption": caption(i)},
        _captioned),
    mds("mds-bytes", "`image: bytes`", _BYTES, _pair, _captioned),
    *map(_mode, ("RGB", "L", "1", "P", "RGBA", "CMYK", "I;16")),
    mds("mds-list-jpeg", "`images: list[jpeg]`, `texts: json`", {"images": "list[jpeg]", "texts": "json"},
        lambda i: {"images": [_opened(i), _opened(i + 9)],
            "texts": [{"user": f"<image><image>{question(i)}", "assistant": answer(i)}]},
        lambda row: dialogue([*map(image, row["images"]), row["texts"][0]["user"].removeprefix("<image><image>")],
            row["texts"][0]["assistant"])),
    mds("mds-list-png", "`images: list[png]`, `texts: json`", {"images": "list[png]", "texts": "json"},
        lambda i: {"images": [drawing(i)], "texts": [{"user": f"<image>{question(i)}", "assistant": answer(i)}]},
        lambda row: dialogue([*map(image, row["images"]), row["texts"][0]["user"].removeprefix("<image>")],
            row["texts"][0]["assistant"])),
    mds("mds-list-pil", "`images: list[pil]`, `texts: json`", {"images": "list[pil]", "texts": "json"},
        lambda i: {"images": [drawing(i)], "texts": [{"user": f"<image>{question(i)}", "assistant": answer(i)}]},
        lambda row: dialogue([*map(image, row["images"]), row["texts"][0]["user"].removeprefix("<image>")],
            row["texts"][0]["assistant"])),
    mds("mds-llava", "`image: bytes`, `conversations: json`", {"image": "bytes", "conversations": "json"},
        lambda i: {"image": picture(i), "conversations": sharegpt(i)},
        lambda row: conversation([(turn["from"], turn["value"]) for turn in row["conversations"]], image(row["image"]))),
    mds("mds-messages", "`images: list[jpeg]`, `messages: json`", {"images": "list[jpeg]", "messages": "json"},
        lambda i: {"images": [_opened(i)], "messages": messages(i)},
        lambda row: conversation([(turn["role"], turn["content"]) for turn in row["messages"]], *map(image, row["images"]))),
    mds("mds-audio", "`audio: bytes`, `text: str`", {"audio": "bytes", "text": "str"},
        lambda i: {"audio": sound(i, "FLAC"), "text": caption(i)}, lambda row: document(audio(row["audio"]), row["text"])),
    mds("mds-text", "`text: str` alone, as LLM Foundry writes it", {"text": "str"}, lambda i: {"text": caption(i)},
        lambda row: document(row["text"])),
    mds("mds-tokens", "`tokens: ndarray:int32`, as LLM Foundry writes it tokenised", {"tokens": "ndarray:int32"},
        lambda i: {"tokens": _numpy([i, 5, 7], "int32")}, lambda row: document(other("tokens", row["tokens"].tobytes())),
        refused_because="tokens are not text"),
    mds("mds-jpg-txt", "columns called `jpg`, `txt`", {"jpg": "bytes", "txt": "str"},
        lambda i: {"jpg": picture(i), "txt": caption(i)}, lambda row: document(image(row["jpg"]), row["txt"]),
        mapping={"images": "jpg"}),
    mds("mds-qa", "`question: str`, `answer: str`", _JSON_COLUMNS, lambda i: {"question": question(i), "answer": answer(i)},
        lambda row: dialogue([row["question"]], row["answer"])),
    mds("mds-conversations-str", "`conversations: str` that is JSON", {"image": "bytes", "conversations": "str"},
        lambda i: {"image": picture(i), "conversations": _dumped(sharegpt(i))},
        lambda row: conversation([(turn["from"], turn["value"]) for turn in _parsed(row["conversations"])], image(row["image"]))),
    mds("mds-pkl", "an unused column of `pkl`", {**_BYTES, "extra": "pkl"}, lambda i: {**_pair(i), "extra": {"a": i}},
        _captioned, mapping={"ignore": ["extra"]}, refused_because="pickles are programs"),
    *map(_packed, ("zstd", "gz", "br", "bz2", "snappy")),
    mds("mds-kept", "packed, with the plain shard kept", _BYTES, _pair, _captioned,
        options={"compression": "zstd", "keep_local": True}),
    mds("mds-hashes", "hashes sha1 and xxh64", _BYTES, _pair, _captioned, options={"hashes": ["sha1", "xxh64"]}),
    mds("mds-shards", "a row a shard", _BYTES, _pair, _captioned, options={"size_limit": 1200}, rows=4),
    mds("mds-split", "in `train/`", _BYTES, _pair, _captioned, below="train"),
    mds("mds-splits", "`train/` and `val/` side by side", _BYTES, _pair, _captioned, below="train", then=_with_validation),
    mds("mds-splits-named", "its training split by name", _BYTES, _pair, _captioned, below="train", then=_with_validation,
        path="train"),
    mds("mds-beside", "a JSON of statistics beside", _BYTES, _pair, _captioned, then=_with_text_twin),
    _scalar("int", lambda i: i),
    *[_scalar(kind, lambda i: i) for kind in ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")],
    *[_scalar(kind, lambda i: i / 2) for kind in ("float16", "float32", "float64")],
    _scalar("str_int", lambda i: 10**30 + i),
    _scalar("str_float", lambda i: i / 3),
    _scalar("ndarray", lambda i: _numpy([[i, 1]], "int16")),
    _scalar("ndarray:float32:2,2", lambda i: _numpy([[i, 1], [2, 3]], "float32")),
    _scalar("json", lambda i: {"a": [i]}),
    mds("json", "`JSONWriter`: shards of JSON lines", _JSON_COLUMNS, lambda i: {"question": question(i), "answer": answer(i)},
        lambda row: dialogue([row["question"]], row["answer"]), writer="JSONWriter"),
    mds("csv", "`CSVWriter`", _JSON_COLUMNS, lambda i: {"question": question(i), "answer": f"A barn {i}"},
        lambda row: dialogue([row["question"]], row["answer"]), writer="CSVWriter"),
    mds("tsv", "`TSVWriter`", {"text": "str"}, lambda i: {"text": caption(i)}, lambda row: document(row["text"]),
        writer="TSVWriter"),
    mds("json-zstd", "`JSONWriter`, packed", {"text": "str"}, lambda i: {"text": caption(i)}, lambda row: document(row["text"]),
        writer="JSONWriter", options={"compression": "zstd"}),
)  # fmt: skip


def _opened(number: int) -> Any:
    """Return a picture that was read from a JPEG: the library stores the file of such a one as it is."""
    import io

    from PIL import Image

    return Image.open(io.BytesIO(picture(number)))


def _dumped(value: Any) -> str:
    import json

    return json.dumps(value)


def _parsed(text: str) -> Any:
    import json

    return json.loads(text)
