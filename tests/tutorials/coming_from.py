"""Small data sets of other libraries, in folders where the conversions of docs/coming-from look for them, and what is in them.

Each function writes one into a folder, and returns its samples in the plain form of `tests.layouts.plain`. Nothing of these
libraries is needed: MDS and Energon data are those of tests/data, the others are laid out by their formats.
"""

from __future__ import annotations

import io
import shutil
import struct
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.layouts.material import COUNT, caption, drawing, picture
from tests.layouts.plain import Sample, dialogue, document, image

DATA = Path(__file__).parents[1] / "data"
THINGS = ("barn", "boat", "mill")


def energon(folder: Path) -> list[Sample]:
    """A prepared data set with a `sample_loader.py` as Energon 7.4 asks for it."""
    dataset = folder / "energon-dataset"
    shutil.copytree(DATA / "energon" / "captions", dataset)
    (dataset / ".nv-meta" / "sample_loader.py").write_text(
        'def sample_loader(raw):\n    text = raw["json"]["about"]["caption"].upper()\n'
        '    return dict(__key__=raw["__key__"], image=raw["jpg"], caption=text)\n'
    )
    found = []
    for archive in sorted(dataset.rglob("*.tar")):
        with tarfile.open(archive) as tar:
            for name in [name for name in tar.getnames() if name.endswith(".jpg")]:
                about = yaml.safe_load(_read(tar, name.replace(".jpg", ".json")))
                found.append(document(image(_read(tar, name)), about["about"]["caption"].upper()))
    return found


def webdataset(folder: Path) -> list[Sample]:
    """Pictures with the numbers of their classes."""
    (folder / "shards").mkdir()
    with tarfile.open(folder / "shards" / "00000.tar", "w") as tar:
        for number in range(COUNT):
            for extension, content in (("jpg", picture(number)), ("cls", str(number).encode())):
                member = tarfile.TarInfo(f"{number:06}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    question = "What is in the picture?"
    return [dialogue([image(picture(number)), question], THINGS[number]) for number in range(COUNT)]


def streaming(folder: Path) -> list[Sample]:
    """Streams of one data set that MosaicML Streaming 0.13 has written: the samples of both."""
    mds = DATA / "mds" / "captions"
    streams = {"photos": {"local": str(mds), "proportion": 0.75}, "more": {"remote": str(mds), "local": "x", "proportion": 0.25}}
    (folder / "streams.yaml").write_text(yaml.safe_dump({"streams": streams}, sort_keys=False))
    return []


def tf_data_service(folder: Path) -> list[Sample]:
    """A TFRecord file of `tf.train.Example`s with pictures, captions and an integer."""
    (folder / "tfrecords").mkdir()
    with (folder / "tfrecords" / "train.tfrecord-00000-of-00001").open("wb") as file:
        for number in range(COUNT):
            features = {"image": picture(number), "caption": caption(number).encode()}
            entries = b"".join(_field(1, _entry(name, _field(1, _field(1, value)))) for name, value in features.items())
            entries += _field(1, _entry("width", _field(3, _field(1, bytes([number + 1])))))  # packed integers
            record = _field(1, entries)
            head = struct.pack("<Q", len(record))
            file.write(head + struct.pack("<I", _masked_crc(head)) + record + struct.pack("<I", _masked_crc(record)))
    return [document(image(picture(number)), caption(number)) for number in range(COUNT)]


def ray_data(folder: Path) -> list[Sample]:
    """Parquet as Ray Data 2.60 writes pictures of several sizes: an Arrow extension type, whose storage is a struct."""
    (folder / "written").mkdir()
    arrays = [np.asarray(drawing(number)) for number in range(COUNT)]
    kind = pa.struct([("data", pa.large_list(pa.uint8())), ("shape", pa.list_(pa.int64()))])
    tensors = pa.array([{"data": array.ravel(), "shape": array.shape} for array in arrays], kind)
    about = {"ARROW:extension:name": "ray.data.arrow_variable_shaped_tensor", "ARROW:extension:metadata": "3"}
    schema = pa.schema([pa.field("image", kind, metadata=about), pa.field("caption", pa.string())])
    table = pa.table([tensors, pa.array(map(caption, range(COUNT)))], schema=schema)
    pq.write_table(table, folder / "written" / "7_000000_000000.parquet")
    return [document(image(array), caption(number)) for number, array in enumerate(arrays)]


def _read(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    assert file is not None
    return file.read()


def _field(number: int, payload: bytes) -> bytes:
    """Return a length-delimited field of a protobuf message."""
    length, size = b"", len(payload)
    while size > 127:
        length, size = length + bytes([size % 128 + 128]), size // 128
    return bytes([number << 3 | 2]) + length + bytes([size]) + payload


def _entry(name: str, feature: bytes) -> bytes:
    return _field(1, name.encode()) + _field(2, feature)


def _masked_crc(data: bytes) -> int:
    """Return the CRC-32C of TFRecord, turned and moved as the format has it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 & -(crc & 1))
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
