"""Tickets: each names one part of one microbatch, and is signed with its job's key.

Only the reorder service makes them, and preprocessors hand payload to nobody without one. To whoever carries a ticket it is an
opaque string, but for the step that it begins with. It lasts as long as its job: made again with the same key, a part's ticket is
the same.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

_SIGNATURE_BYTES = 16  # of HMAC-SHA-256: as many as a guess would have to hit


def make_key() -> bytes:
    """A new job's key."""
    return secrets.token_bytes(32)


def make_ticket(job: str, part: str, key: bytes) -> str:
    """JOB/PART.SIGNATURE. `job` has no slash; `part`: unique in the job."""
    name = f"{job}/{part}"
    return f"{name}.{_signature(name, key)}"


def job_of(ticket: str) -> str:
    """The job that a ticket claims to be of."""
    return ticket.partition("/")[0]


def part_of(ticket: str) -> str:
    """The ticket without its signature: what logs and errors say of it, which more people read than may fetch the part."""
    return ticket.rpartition(".")[0] or ticket


def step_of(ticket: str) -> str:
    """JOB/UID/GENERATION/STEP: with it begin the tickets of one step's parts, and no others."""
    return "/".join(ticket.split("/", 4)[:4])


def is_genuine(ticket: str, key: bytes) -> bool:
    """Whether the ticket was made with that key."""
    name, _, signature = ticket.rpartition(".")
    return hmac.compare_digest(signature.encode(), _signature(name, key).encode())


def _signature(name: str, key: bytes) -> str:
    digest = hmac.digest(key, name.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest[:_SIGNATURE_BYTES]).rstrip(b"=").decode()
