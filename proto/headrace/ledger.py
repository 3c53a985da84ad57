"""The ledger: which samples each committed step consumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One committed step. `samples`: names, sorted. `loss`: NaN where no rank reported one."""

    step: int
    samples: tuple[str, ...]
    loss: float


def ledger_sha256(entries: Iterable[LedgerEntry]) -> str:
    """SHA-256 over one JSON line `[step, [names]]` an entry, in step order."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(json.dumps([entry.step, sorted(entry.samples)], ensure_ascii=False).encode())
        digest.update(b"\n")
    return digest.hexdigest()
