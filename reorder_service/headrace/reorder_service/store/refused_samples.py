"""How the store holds refused samples: an entry of each in the quarantine, and the thumbnails of the latest."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.quarantine import Rejected, refusal
from headrace.reorder_service.store.job_keys import job_key
from headrace.reorder_service.store.redis_database import Command

KEPT_THUMBNAILS = 100  # of a job: half a megabyte at most, and as many as the page shows at a time


def quarantine_entry(item: Rejected, *, step: int | None) -> str:
    """Return the quarantine's entry of a refused sample. `step`: in which it was refused; None: when its shard was indexed."""
    fields = {"reason": str(item.reason), "detail": item.detail, "sample_id": item.sample_id, "row": item.row, "step": step}
    if item.modality:
        fields["modality"] = item.modality
    return json.dumps(fields, ensure_ascii=False)


def rejected_of(name: str, fields: Mapping[str, Any]) -> Rejected:
    """Return the sample of that name from the fields of its entry, of which older releases have written fewer."""
    reason, detail = refusal(fields["reason"], fields["detail"])
    row, modality = fields.get("row"), fields.get("modality", "")
    return Rejected(name=name, reason=reason, detail=detail, sample_id=fields["sample_id"], row=row, modality=modality)


def thumbnails_kept(job: str, rejected: Sequence[Rejected]) -> Iterator[Command]:
    """Yield the commands that keep the thumbnails of refused samples, and of all the job's the KEPT_THUMBNAILS latest only."""
    key = job_key(job, "thumbnails")
    if shown := [item for item in rejected if item.thumbnail][-KEPT_THUMBNAILS:]:
        yield ["LPUSH", key, *(f"{item.name} {base64.b64encode(item.thumbnail).decode()}" for item in shown)]
        yield ["LTRIM", key, "0", str(KEPT_THUMBNAILS - 1)]


def thumbnails_of(entries: Sequence[str]) -> dict[str, bytes]:
    """Return the thumbnails in a job's list, which begins with the latest, by the name of their sample."""
    names_and_files = (entry.rpartition(" ") for entry in reversed(entries))  # the latest of a name counts
    return {name: base64.b64decode(file) for name, _, file in names_and_files}
