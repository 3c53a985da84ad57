"""The files of a recorded history: the keys of a store, the ledgers that its jobs ended with, and messages in the order sent."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]
HISTORIES = Path(__file__).parent
RECORDED_DATA = "/tmp/headrace-history"
"""Where a recorder puts its data sets: no path of anybody's machine gets into a history."""
DATA = {"examples": ROOT / "examples" / "data", "hostile": ROOT / "tests" / "data" / "hostile" / "tars"}
"""Name of a folder in RECORDED_DATA -> where its files are in this repository."""
_LEASE_KEYS = ("headrace:leader",)  # it ends by itself within seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One recorded message. `call`: number of the call that it is of, in the order in which calls began."""

    call: int
    method: str
    by_client: bool
    message: bytes


def histories(file: str) -> list[Any]:
    """Return the folders of the histories that have a file, the oldest first, as parameters of a test.

    Those between the oldest and the newest are slow: what they have is mostly in one of these.
    """
    folders = sorted((found.parent for found in HISTORIES.glob(f"*/{file}")), key=lambda folder: Version(folder.name))
    ends = {folders[0], folders[-1]}
    return [pytest.param(one, id=one.name, marks=() if one in ends else pytest.mark.slow) for one in folders]


def at_hand(text: str) -> str:
    """Return recorded text with the paths that the data sets have here."""
    for name, folder in DATA.items():
        text = text.replace(f"{RECORDED_DATA}/{name}", str(folder))
    return text


def dump_store(client: Any, file: Path) -> None:
    """Write all keys of a Redis database, of a client that decodes responses.

    A sorted set is {"sorted": [[member, score], ...]}.
    """
    read = {
        "string": client.get,
        "hash": client.hgetall,
        "list": lambda key: client.lrange(key, 0, -1),
        "zset": lambda key: {"sorted": client.zrange(key, 0, -1, withscores=True)},
    }
    keys = {key: read[client.type(key)](key) for key in sorted(client.keys("*")) if key not in _LEASE_KEYS}
    file.write_text(json.dumps(keys, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def restore_store(client: Any, file: Path) -> None:
    """Write the keys of a recorded store into an empty database."""
    for key, value in json.loads(at_hand(file.read_text(encoding="utf-8"))).items():
        if isinstance(value, dict) and value.keys() == {"sorted"}:
            client.zadd(key, dict(value["sorted"]))
        elif isinstance(value, dict):
            client.hset(key, mapping=value)
        elif isinstance(value, list):
            client.rpush(key, *value)
        else:
            client.set(key, value)


def write_messages(file: Path, messages: Iterable[Said]) -> None:
    """Write messages, one JSON line each."""
    lines = (json.dumps([said.call, said.method, said.by_client, base64.b64encode(said.message).decode()]) for said in messages)
    file.write_text("".join(f"{line}\n" for line in lines))


def read_messages(file: Path) -> Iterator[Said]:
    """Yield the messages of a file in the order in which they were sent."""
    for line in file.read_text().splitlines():
        call, method, by_client, message = json.loads(line)
        yield Said(call=call, method=method, by_client=by_client, message=base64.b64decode(message))
