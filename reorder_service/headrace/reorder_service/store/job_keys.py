"""The keys of a job in the store, and how its hash is written; headrace.reorder_service.store.state lists what they hold."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.reorder_service.store.redis_database import Command

JOBS = "headrace:jobs"
"""Key of the list of all jobs' names, oldest first."""
PARTS = ("shards", "indexed", "window", "corrections", "quarantine", "thumbnails", "ledger", "pages", "nodes")
"""What a job may have in the store beside its record, the hash `job`."""
NIL = "false"  # how a Lua script prints an absent value


def job_key(job: str, part: str) -> str:
    """Return the key of one part of a job: `job`, its record, or one of PARTS."""
    return f"headrace:{{{job}}}:{part}"


def hset(key: str, fields: Mapping[str, str]) -> Command:
    """Return the command that sets fields of a hash."""
    return ["HSET", key, *(word for pair in fields.items() for word in pair)]
