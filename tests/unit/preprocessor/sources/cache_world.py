"""What tests of the shard cache have in common."""

from __future__ import annotations

from pathlib import Path

import fsspec

from headrace.observability import metrics


def put(name: str, data: bytes) -> str:
    """A remote file that needs no server; the file system notes when it was written."""
    url = f"memory://shards/{name}"
    with fsspec.open(url, "wb") as file:
        file.write(data)
    return url


def held(cache_folder: Path) -> list[int]:
    """Sizes of the shards in the cache."""
    return sorted(path.stat().st_size for path in cache_folder.glob("*.shard"))


class Moved:
    """How far a metric has moved since."""

    def __init__(self, name: str, **labels: str) -> None:
        self._name, self._labels = f"headrace_preprocessor_{name}_total", labels
        self._before = self._value()

    def _value(self) -> float:
        return metrics.PREPROCESSOR.get_sample_value(self._name, self._labels) or 0.0

    def __call__(self) -> float:
        return self._value() - self._before
