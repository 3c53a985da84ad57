"""Tables of pandas and pyarrow, and the stores of LitData and Lance, each read by its own library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers import Peer
from tests.layouts.layout import Layout
from tests.layouts.material import COUNT, answer, caption, drawing, messages, picture, question, sharegpt, sound
from tests.layouts.plain import Part, Sample, audio, conversation, dialogue, document, image, other

PANDAS = Peer(title="pandas, pyarrow", module="pandas", requirements=("pandas==2.*",))
LITDATA = Peer(title="LitData", module="litdata", requirements=("litdata==0.2.*", "zstd"))
LANCE = Peer(title="Lance", module="lance", requirements=("pylance==14.*",))

Row = Mapping[str, Any]


def _captioned(row: Row) -> Sample:
    return document(image(row["image"]), row["caption"])


def _pair(i: int) -> Row:
    return {"image": picture(i), "caption": caption(i)}


def _table(rows: list[Row]) -> Any:
    import pyarrow

    return pyarrow.Table.from_pylist([dict(row) for row in rows])


def frame(
    name: str,
    what: str,
    row: Callable[[int], Row],
    sample: Callable[[Row], Sample],
    *,
    write: Callable[[Any, Path], None] | None = None,
    file: str = "part-0.parquet",
    **others: Any,
) -> Layout:
    """Return the layout of a table; `write` is given the Arrow table and the folder, and writes Parquet if it is None."""

    def store(folder: Path) -> None:
        import pyarrow.parquet

        table = _table([row(number) for number in range(COUNT)])
        if write:
            write(table, folder)
        else:
            pyarrow.parquet.write_table(table, folder / file)

    def read(folder: Path) -> list[Sample]:
        import pandas

        return [sample(found) for found in pandas.read_parquet(folder).to_dict("records")]

    others.setdefault("read", read)
    return Layout(name=f"table-{name}", writer=PANDAS, what=what, write=store, **others)


def _by_pandas(table: Any, folder: Path) -> None:
    table.to_pandas().to_parquet(folder / "frame.parquet", index=True)


def _partitioned(table: Any, folder: Path) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_to_dataset(table, folder, partition_cols=["lang"])


def _row_groups(table: Any, folder: Path) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(table, folder / "groups.parquet", row_group_size=1, use_dictionary=False, compression="gzip")


def _dictionary(table: Any, folder: Path) -> None:
    import pyarrow.parquet

    columns = {name: table[name].dictionary_encode() if name == "caption" else table[name] for name in table.column_names}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "dictionary.parquet")


def _views(table: Any, folder: Path) -> None:
    import pyarrow.parquet

    schema = pyarrow.schema([("image", pyarrow.binary_view()), ("caption", pyarrow.string_view())])
    pyarrow.parquet.write_table(table.cast(schema), folder / "views.parquet")


def _spark(table: Any, folder: Path) -> None:
    """Write what Spark leaves: parts with long names, and an empty file that says that it is done."""
    import pyarrow.parquet

    pyarrow.parquet.write_table(table, folder / "part-00000-1b0c-c000.snappy.parquet", flavor="spark")
    (folder / "_SUCCESS").write_bytes(b"")


def _feather(table: Any, folder: Path) -> None:
    import pyarrow.feather

    pyarrow.feather.write_feather(table, str(folder / "part-0.feather"))


def _from_feather(folder: Path) -> list[Sample]:
    import pandas

    return [_captioned(row) for row in pandas.read_feather(folder / "part-0.feather").to_dict("records")]


def _ipc(table: Any, folder: Path) -> None:
    import pyarrow.ipc

    with pyarrow.ipc.new_file(str(folder / "part-0.arrow"), table.schema) as writer:
        writer.write_table(table)


def _from_ipc(folder: Path) -> list[Sample]:
    import pyarrow.ipc

    with pyarrow.ipc.open_file(str(folder / "part-0.arrow")) as reader:
        return [_captioned(row) for row in reader.read_all().to_pylist()]


def _orc(table: Any, folder: Path) -> None:
    import pyarrow.orc

    pyarrow.orc.write_table(table, str(folder / "part-0.orc"))


def _from_orc(folder: Path) -> list[Sample]:
    import pyarrow.orc

    return [_captioned(row) for row in pyarrow.orc.read_table(str(folder / "part-0.orc")).to_pylist()]


def stored(name: str, what: str, row: Callable[[int], Row], sample: Callable[[Row], Sample], **options: Any) -> Layout:
    """Return the layout of a folder of LitData's chunks. `as_stored`: kinds of leaves that are read as bytes."""
    others = {key: options.pop(key) for key in ("refused_because", "mapping") if key in options}
    as_stored = options.pop("as_stored", ())

    def write(folder: Path) -> None:
        import litdata

        settings = {"chunk_bytes": "1MB", "num_workers": 1, "start_method": "fork", "verbose": False, **options}
        litdata.optimize(_Rows(row), list(range(COUNT)), str(folder), **settings)

    def read(folder: Path) -> list[Sample]:
        import litdata
        from litdata.streaming.serializers import BytesSerializer

        undecoded = {name: BytesSerializer() for name in as_stored}
        found = litdata.StreamingDataset(str(folder), shuffle=False, serializers=undecoded or None)
        return [sample(found[index]) for index in range(len(found))]

    return Layout(name=f"litdata-{name}", writer=LITDATA, what=what, write=write, read=read, **others)


class _Rows:
    """A row of each number, for LitData's workers."""

    def __init__(self, row: Callable[[int], Row]) -> None:
        self._row = row

    def __call__(self, number: int) -> Any:
        row = self._row(number)
        return dict(row) if isinstance(row, Mapping) else row


def lance(
    name: str,
    what: str,
    row: Callable[[int], Row],
    sample: Callable[[Row], Sample],
    then: Callable[[Any], None] | None = None,
    **options: Any,
) -> Layout:
    """Return the layout of a Lance data set; `then` changes it further."""

    def write(folder: Path) -> None:
        import lance as library

        written = library.write_dataset(_table([row(number) for number in range(COUNT)]), str(folder / "barns.lance"), **options)
        if then:
            then(written)

    def read(folder: Path) -> list[Sample]:
        import lance as library

        return [sample(found) for found in library.dataset(str(folder / "barns.lance")).to_table().to_pylist()]

    return Layout(name=f"lance-{name}", writer=LANCE, what=what, write=write, read=read, path="barns.lance")


def _one_deleted(written: Any) -> None:
    written.delete(f"caption = '{caption(1)}'")


def _column_added(written: Any) -> None:
    written.add_columns({"caption": "title"})
    written.drop_columns(["title"])


def _appended(written: Any) -> None:
    import lance as library

    library.write_dataset(_table([_pair(number) for number in range(20, 22)]), written.uri, mode="append")


def _overwritten(written: Any) -> None:
    import lance as library

    library.write_dataset(_table([_pair(number) for number in range(30, 32)]), written.uri, mode="overwrite")


def _chat(row: Row) -> Sample:
    return conversation([(turn["from"], turn["value"]) for turn in row["conversations"]], image(row["image"]))


LAYOUTS = (
    frame("parquet", "pyarrow: `image` as binary, `caption`", _pair, _captioned),
    frame("pandas", "pandas: `to_parquet` with its index", _pair, _captioned, write=_by_pandas),
    frame("row-groups", "a row a group, gzip, no dictionary", _pair, _captioned, write=_row_groups),
    frame("dictionary", "a column of dictionary type", _pair, _captioned, write=_dictionary),
    frame("views", "columns of views", _pair, _captioned, write=_views),
    frame("spark", "as Spark leaves it, with `_SUCCESS`", _pair, _captioned, write=_spark),
    frame("partitioned", "partitions `lang=en/`", lambda i: {**_pair(i), "lang": "en" if i % 2 else "de"}, _captioned,
        write=_partitioned),
    frame("struct", "`image` as a struct `{bytes, path}`",
        lambda i: {"image": {"bytes": picture(i), "path": f"{i}.jpg"}, "caption": caption(i)},
        lambda row: document(image(row["image"]["bytes"]), row["caption"])),
    frame("lists", "`images` as a list of binary", lambda i: {"images": [picture(i)], "messages": messages(i)},
        lambda row: conversation([(turn["role"], turn["content"]) for turn in row["messages"]], *map(image, row["images"]))),
    frame("audio", "`audio` as binary, `text`", lambda i: {"audio": sound(i), "text": caption(i)},
        lambda row: document(audio(row["audio"]), row["text"])),
    frame("numbers", "captions, scores, dates, decimals", lambda i: {**_pair(i), **_scalars(i)}, _captioned),
    frame("image-url", "`url` alone, whose picture is elsewhere",
        lambda i: {"url": f"https://a.example/{i}.jpg", "caption": caption(i)},
        lambda row: document(other("url", row["url"]), row["caption"]), refused_because="the picture is not there"),
    frame("image-path", "`image_path` of files elsewhere", lambda i: {"image_path": f"{i}.jpg", "caption": caption(i)},
        lambda row: document(other("path", row["image_path"]), row["caption"]),
        refused_because="the pictures are not there"),
    frame("feather", "Feather", _pair, _captioned, write=_feather, read=_from_feather),
    frame("ipc", "an Arrow file, as pyarrow writes it", _pair, _captioned, write=_ipc, read=_from_ipc),
    frame("orc", "ORC", _pair, _captioned, write=_orc, read=_from_orc),
    stored("caption", "`image: bytes`, `caption`", _pair, _captioned),
    stored("pil", "`image` as a PIL image", lambda i: {"image": drawing(i), "caption": caption(i)}, _captioned),
    stored("text", "`text` alone", lambda i: {"text": caption(i)}, lambda row: document(row["text"])),
    stored("chunks", "a row a chunk", _pair, _captioned, chunk_bytes="1KB"),
    stored("zstd", "packed with zstd", _pair, _captioned, compression="zstd"),
    stored("jpeg-zstd", "`image` as a JPEG image, packed with zstd in batches",
        lambda i: {"image": _opened(i), "caption": caption(i)}, _captioned, compression="zstd", compression_batch_size=2,
        as_stored=("jpeg",)),
    stored("jpeg-zstd-sample", "a JPEG image, each sample packed with zstd",
        lambda i: {"image": _opened(i), "caption": caption(i)}, _captioned, compression="zstd", compression_level="sample",
        as_stored=("jpeg",)),
    stored("jpeg-zstd-chunk", "a JPEG image, whole chunks packed with zstd",
        lambda i: {"image": _opened(i), "caption": caption(i)}, _captioned, compression="zstd:9", compression_level="chunk",
        as_stored=("jpeg",)),
    stored("llava", "`image: bytes`, `conversations` as a list of objects",
        lambda i: {"image": picture(i), "conversations": sharegpt(i)}, _chat),
    stored("pil-llava", "a PIL image, `conversations`, numbers", lambda i: {"image": drawing(i), "conversations": sharegpt(i),
            "score": i / 3, "number": i, "good": i % 2 == 0}, _chat),
    stored("several", "`images` as a list of JPEG images, `messages`",
        lambda i: {"images": [_opened(i), _opened(i + 20)], "messages": messages(i, "<image><image>")},
        lambda row: conversation([(turn["role"], turn["content"]) for turn in row["messages"]], *_unlisted(row["images"])),
        as_stored=("jpeg_array",)),
    stored("image-file", "`litdata.Image`, an audio file by `litdata.Audio`",
        lambda i: {"image": _medium("Image", picture(i)), "audio": _medium("Audio", sound(i)), "text": caption(i)},
        lambda row: document(image(row["image"]), audio(row["audio"]), row["text"]), as_stored=("image", "audio")),
    stored("nested", "texts and numbers below `meta`", lambda i: {"image": drawing(i), "meta": {"caption": caption(i), "n": i}},
        lambda row: document(image(row["image"]), row["meta"]["caption"]), mapping={"text": "meta.caption"}),
    stored("tuple", "a tuple of a picture and a caption", lambda i: (drawing(i), caption(i)),
        lambda row: document(image(row[0]), row[1]), mapping={"images": "0", "text": "1"}),
    stored("array", "a column of an array beside `image`, `caption`",
        lambda i: {"image": drawing(i), "caption": caption(i), "boxes": _tensor(i).reshape(3, 1).float()}, _captioned),
    stored("pickle", "an unused column that LitData pickles", lambda i: {"image": drawing(i), "caption": caption(i), "extra": 1j},
        _captioned, mapping={"ignore": ["extra"]}),
    stored("qa-zstd", "`question`, `answer`, packed with zstd", lambda i: {"question": question(i), "answer": answer(i)},
        lambda row: dialogue([row["question"]], row["answer"]), compression="zstd"),
    stored("qa", "`question`, `answer`", lambda i: {"question": question(i), "answer": answer(i)},
        lambda row: dialogue([row["question"]], row["answer"])),
    stored("tokens", "tokens, as LitGPT makes them", lambda i: {"tokens": _tensor(i)},
        lambda row: document(other("tokens", bytes(row["tokens"].tolist()))), refused_because="tokens are not text"),
    lance("caption", "`image: binary`, `caption`", _pair, _captioned),
    lance("llava", "`image: binary`, `conversations`", lambda i: {"image": picture(i), "conversations": sharegpt(i)}, _chat),
    lance("fragments", "a row a fragment", _pair, _captioned, max_rows_per_file=1),
    lance("audio", "`audio: binary`, `text`", lambda i: {"audio": sound(i), "text": caption(i)},
        lambda row: document(audio(row["audio"]), row["text"])),
    lance("deleted", "a row that is deleted", _pair, _captioned, then=_one_deleted),
    lance("column", "a column that was added", lambda i: {"image": picture(i), "title": caption(i)}, _captioned,
        then=_column_added),
    lance("versions", "rows that were appended, in a newer version", _pair, _captioned, then=_appended),
    lance("overwritten", "rows of an older version beside", _pair, _captioned, then=_overwritten),
    lance("legacy", "files of the first version of the format", _pair, _captioned, data_storage_version="legacy"),
    lance("text", "`text` alone", lambda i: {"text": caption(i)}, lambda row: document(row["text"])),
)  # fmt: skip


def _scalars(number: int) -> dict[str, Any]:
    import datetime
    import decimal

    moment = datetime.datetime(2026, 1, 1 + number, 12, tzinfo=datetime.UTC)
    return {
        "score": number / 3,
        "made": moment,
        "day": moment.date(),
        "price": decimal.Decimal(f"{number}.25"),
        "good": number % 2 == 0,
        "none": None,
    }


def _opened(number: int) -> Any:
    import io

    from PIL import Image

    return Image.open(io.BytesIO(picture(number)))


def _medium(kind: str, data: bytes) -> Any:
    import litdata.types

    return getattr(litdata.types, kind)(bytes=data)


def _unlisted(data: bytes) -> list[Part]:
    """Return the pictures of LitData's list of JPEG images: their number, their sizes, the images."""
    import numpy as np

    count = int.from_bytes(data[:4], "little")
    ends = np.cumsum(np.frombuffer(data, "<u4", count, 4)) + 4 * (count + 1)
    return [image(data[start:end]) for start, end in zip([4 * (count + 1), *ends], ends, strict=False)]


def _tensor(number: int) -> Any:
    import torch

    return torch.tensor([number, 5, 7])
