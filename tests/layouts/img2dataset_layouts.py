"""What img2dataset leaves in its output folder: archives or Parquet or files, beside Parquet and JSON about the downloads."""

from __future__ import annotations

import csv
import functools
import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers import Peer
from tests.layouts.layout import Layout
from tests.layouts.material import COUNT, caption, picture
from tests.layouts.plain import Sample, document, image
from tests.layouts.webdataset_layouts import read_tars

IMG2DATASET = Peer(title="img2dataset", module="img2dataset", requirements=("img2dataset==1.47.*", "setuptools<81"))


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def _site(folder: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _download(folder: Path, *, absent: int = 0, captions: bool = True, **options: Any) -> None:
    """Run the real downloader on a site of our own, of which `absent` pictures are not there."""
    import tempfile

    from img2dataset import download

    with tempfile.TemporaryDirectory() as temporary, _site(Path(temporary)) as site:
        with open(Path(temporary, "list.csv"), "w", newline="", encoding="utf-8") as stream:
            table = csv.writer(stream)
            table.writerow(["url", "caption", "similarity"])
            table.writerows([f"{site}/{number}.jpg", caption(number), 0.3] for number in range(COUNT + absent))
        for number in range(COUNT):
            Path(temporary, f"{number}.jpg").write_bytes(picture(number, quality=95))
        if captions:
            options["caption_col"] = "caption"
        download(
            url_list=f"{temporary}/list.csv", input_format="csv", url_col="url", output_folder=str(folder), processes_count=1,
            thread_count=1, number_sample_per_shard=2, image_size=24, retries=0, **options,
        )  # fmt: skip


def _of_tars(folder: Path) -> list[Sample]:
    def picture_of(found: dict[str, Any]) -> bytes:
        return next(bytes(found[name]) for name in ("jpg", "png", "webp") if name in found)

    return [document(image(picture_of(found)), found["txt"]) for found in read_tars(folder)]


def _of_parquet(folder: Path, column: str = "jpg") -> list[Sample]:
    import pandas

    tables = [pandas.read_parquet(path) for path in sorted(folder.glob("*.parquet"))]
    rows = [row for table in tables for row in table.to_dict("records") if row["status"] == "success"]
    return [document(image(row[column]), row["caption"]) for row in rows]


def _of_files(folder: Path) -> list[Sample]:
    return [document(image(path.read_bytes()), path.with_suffix(".txt").read_text()) for path in sorted(folder.glob("*/*.jpg"))]


def _layout(name: str, what: str, read: Callable[[Path], list[Sample]] = _of_tars, path: str = "", **options: Any) -> Layout:
    form = options.pop("output_format", "webdataset")
    others = {key: options.pop(key) for key in ("refused_because", "mapping") if key in options}

    def write(folder: Path) -> None:
        _download(folder, output_format=form, **options)

    return Layout(name=f"i2d-{name}", writer=IMG2DATASET, what=what, write=write, read=read, path=path, **others)


LAYOUTS = (
    _layout("folder", "the output folder: archives, Parquet of metadata, statistics"),
    _layout("tars", "its archives, by `*.tar`", path="*.tar"),
    _layout("missing", "the same where pictures could not be fetched", path="*.tar", absent=2),
    _layout("png", "`encode_format: png`", path="*.tar", encode_format="png", encode_quality=9),
    _layout("webp", "`encode_format: webp`", path="*.tar", encode_format="webp"),
    _layout("columns", "with more columns, which are in the `json`", path="*.tar", save_additional_columns=["similarity"]),
    _layout("original", "`resize_mode: no`, no re-encoding", path="*.tar", resize_mode="no", disable_all_reencoding=True),
    _layout("border", "`resize_mode: border`", path="*.tar", resize_mode="border"),
    _layout("hashes", "`compute_hash: sha256`, no EXIF", path="*.tar", compute_hash="sha256", extract_exif=False),
    _layout("no-captions", "without a column of captions",
        lambda folder: [document(image(found["jpg"])) for found in read_tars(folder)], path="*.tar", captions=False,
        refused_because="there is nothing to learn"),
    _layout("parquet", "`output_format: parquet`: bytes in the column `jpg`", _of_parquet, output_format="parquet",
        mapping={"images": "jpg"}),
    _layout("parquet-missing", "the same with rows whose picture is null", _of_parquet, output_format="parquet", absent=2,
        mapping={"images": "jpg"}),
    _layout("files", "`output_format: files`: `00000/000000000.jpg`, `.txt`, `.json`", _of_files, output_format="files"),
)  # fmt: skip
