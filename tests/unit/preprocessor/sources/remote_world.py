"""What tests of remote shards that are read by ranges have in common."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.preprocessor.sources import cache as cache_module
from headrace.preprocessor.sources import open_shard, partial_blob, tar_walk
from headrace.preprocessor.sources.base import Shard
from headrace.preprocessor.sources.cache import ShardCache
from headrace.quarantine import BadSampleError
from headrace.source_spec import SourceSpec
from tests.http_site import Site


def by_ranges_alone(patch: pytest.MonkeyPatch) -> None:
    """Have every file read by ranges, however small it is and however much of it is read, and every tar walked."""
    patch.setattr(cache_module, "WHOLE_BYTES", 0)
    patch.setattr(partial_blob, "SHARE", 1e9)
    for name, value in {"LEAST_STRIDE": 0, "WINDOW_BYTES": 0, "MOST_REQUESTS": 1e9, "_STEPS": 3, "_SEEN_JUMPS": 2}.items():
        patch.setattr(tar_walk, name, value)
    for name in ("FIRST_BYTES", "WINDOW_BYTES", "_MOST_LEAST_BYTES"):
        patch.setattr(partial_blob, name, 700)


def everything(shard: Shard, folder: str = "-") -> tuple[Any, ...]:
    """All that a shard tells: its damage, and the key, the fields and the media of each row, or why there are none.

    `folder` is left out of that.
    """
    return shard.rejected, [_row(shard, row, folder) for row in range(shard.num_rows)]


def _row(shard: Shard, row: int, folder: str) -> Any:
    try:
        record = shard.read(row)
        return record.key, dict(record.fields), {name: _medium(record.load, name) for name in record.members}
    except BadSampleError as err:
        return shard.key(row), err.reason, err.detail.replace(folder, "FOLDER")


def _medium(load: Any, name: str) -> Any:
    try:
        return load(name)
    except BadSampleError as err:
        return err.reason, err.detail


def serve(site: Site, path: Path) -> str:
    """Put a file, and what lies beside it, on the site; return the file's URL."""
    for file in path.parent.iterdir():
        if file.is_file():
            site.files[f"data/{file.name}"] = file.read_bytes()
    return f"{site.url}/data/{path.name}"


def read_both(path: Path, site: Site, cache: ShardCache, source: SourceSpec) -> tuple[Any, Any]:
    """Read a file from the disk, and from the site; return what each tells."""
    with open_shard(str(path), source, cache) as local, open_shard(serve(site, path), source, cache) as remote:
        return everything(local, str(path.parent)), everything(remote, f"{site.url}/data")


def tar_of(num_samples: int, num_bytes: int, seed: int = 0) -> bytes:
    """A tar of samples with a medium of about so many bytes and a caption each."""
    rng, data = np.random.default_rng(seed), io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for number in range(num_samples):
            long = "é" * 80 if number % 7 == 3 else ""  # has a pax header
            medium = rng.bytes(int(rng.integers(num_bytes // 2, 3 * num_bytes // 2)))
            for name, content in {"jpg": medium, "txt": f"Caption {number}.".encode()}.items():
                member = tarfile.TarInfo(f"{number:04}{long}.{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return data.getvalue()


def mds_of(num_rows: int, num_bytes: int) -> bytes:
    """An MDS shard of rows with a medium of so many bytes and a caption each."""
    columns = {"column_names": ["jpg", "txt"], "column_encodings": ["bytes", "str"], "column_sizes": [None, None]}
    header = json.dumps({**columns, "hashes": []}).encode()
    captions = [f"Caption {row}.".encode() for row in range(num_rows)]
    packed = [
        np.array([num_bytes, len(text)], "<u4").tobytes() + bytes([row % 256]) * num_bytes + text
        for row, text in enumerate(captions)
    ]
    offsets = np.cumsum([4 * (num_rows + 2) + len(header), *map(len, packed)]).astype("<u4").tobytes()
    return b"".join([num_rows.to_bytes(4, "little"), offsets, header, *packed])
