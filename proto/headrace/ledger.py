"""The ledger: which samples each committed step consumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """The record of one committed step. `samples`: sorted names of the samples consumed. `loss`: NaN if no rank reported one."""

    step: int
    samples: tuple[str, ...]
    loss: float


def ledger_sha256(entries: Iterable[LedgerEntry]) -> str:
    """Return the hex SHA-256 of the ledger, given in step order, as one JSON line `[step, [sorted names]]` per entry."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(json.dumps([entry.step, sorted(entry.samples)], ensure_ascii=False).encode())
        digest.update(b"\n")
    return digest.hexdigest()
