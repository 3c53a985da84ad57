"""The samples of a WebDataset shard, for peers that bring them into another format."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path


def read_samples(shard: str | Path) -> Iterator[dict[str, bytes | str]]:
    """`jpg`, bytes, and `txt`, str, which stand one behind the other in the shards of this benchmark."""
    with tarfile.open(shard) as archive:
        contents = [archive.extractfile(member).read() for member in archive]  # type: ignore[union-attr]
    for jpeg, text in zip(contents[::2], contents[1::2], strict=True):
        yield {"jpg": jpeg, "txt": text.decode()}
