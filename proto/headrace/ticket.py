"""Tickets: signed names of parts, without which preprocessors hand out no payload.

A ticket names one part of one microbatch and is signed with its job's key by the reorder service, which alone makes tickets. For
everybody else it is an opaque string, except for the name of the step at its start (`step_of`). It is valid as long as its job:
making a part's ticket again with the same key gives the same ticket.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

_SIGNATURE_BYTES = 16  # HMAC-SHA-256 truncated to 128 bits, too many to guess


def make_key() -> bytes:
    """Return a random 32-byte key with which to sign a new job's tickets."""
    return secrets.token_bytes(32)


def make_ticket(job: str, part: str, key: bytes) -> str:
    """Return the ticket JOB/PART.SIGNATURE. `job` has no slash; `part` is unique in the job."""
    name = f"{job}/{part}"
    return f"{name}.{_signature(name, key)}"


def job_of(ticket: str) -> str:
    """Return the name of the job that a ticket claims to belong to; the signature is not checked."""
    return ticket.partition("/")[0]


def part_of(ticket: str) -> str:
    """Return the ticket without its signature, for logs and errors, which more people read than may fetch the part."""
    return ticket.rpartition(".")[0] or ticket


def step_of(ticket: str) -> str:
    """Return the name of the ticket's step, JOB/UID/GENERATION/STEP, with which the tickets of that step's parts, and no others,
    begin."""
    return "/".join(ticket.split("/", 4)[:4])


def is_genuine(ticket: str, key: bytes) -> bool:
    """Whether the ticket's signature was made with `key`. Compared in constant time."""
    name, _, signature = ticket.rpartition(".")
    return hmac.compare_digest(signature.encode(), _signature(name, key).encode())


def _signature(name: str, key: bytes) -> str:
    digest = hmac.digest(key, name.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest[:_SIGNATURE_BYTES]).rstrip(b"=").decode()
