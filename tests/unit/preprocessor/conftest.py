"""Shared pieces: the hostile files, a processor, writers of small shards, and a shard cache before a web site."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from headrace.preprocessor.decoding import SampleProcessor
from headrace.preprocessor.sources.cache import ShardCache
from headrace.preprocessor.sources.download import Retry
from headrace.source_spec import SourceSpec
from headrace.spec import JobSpec, parse_spec
from tests.http_site import Site, running_site

HOSTILE = Path(__file__).parents[2] / "data" / "hostile"

WriteTar = Callable[..., Path]


@pytest.fixture(scope="session")
def hostile() -> Path:
    return HOSTILE


@pytest.fixture(scope="session")
def spec() -> JobSpec:
    return parse_spec({"name": "test", "sources": [{"path": "/data"}]})


@pytest.fixture(scope="session")
def source(spec: JobSpec) -> SourceSpec:
    return spec.sources[0]


@pytest.fixture(scope="session")
def processor(spec: JobSpec) -> SampleProcessor:
    return SampleProcessor(spec)


@pytest.fixture
def write_tar(tmp_path: Path) -> WriteTar:
    """write_tar({"a.json": {...}, "a.jpg": b"..."}) gives the path of a tar with these members."""

    def write(members: dict[str, Any], name: str = "shard.tar", tar_format: int = tarfile.PAX_FORMAT) -> Path:
        path = tmp_path / name
        with tarfile.open(path, "w" if name.endswith(".tar") else "w:gz", format=tar_format) as archive:
            for member, content in members.items():
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                info = tarfile.TarInfo(member)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        return path

    return write


@pytest.fixture(scope="session")
def jpeg() -> bytes:
    """A 64 x 48 picture."""
    buffer = io.BytesIO()
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (48, 64, 3), np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.fixture(scope="session")
def flac() -> bytes:
    """Half a second at 16 kHz."""
    buffer = io.BytesIO()
    soundfile.write(buffer, np.sin(np.arange(8000) / 20) * 0.5, 16_000, format="FLAC")
    return buffer.getvalue()


@pytest.fixture
def site() -> Iterator[Site]:
    with running_site() as site:
        yield site


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def retry(pauses: list[float]) -> Retry:
    """Notes the pauses instead of making them."""
    return Retry(attempts=4, sleep=pauses.append)


@pytest.fixture
def cache(tmp_path: Path, retry: Retry) -> ShardCache:
    return ShardCache(tmp_path / "cache", max_bytes=2500, retry=retry)
