"""What a launcher, such as torchrun, says in variables of the environment: which of how many ranks this is, where they meet."""

from __future__ import annotations

import os

from headrace.errors import UserError

DEFAULT_PORT = 29500  # torchrun's


def rank() -> int:
    """Return this process's rank; 0 without a launcher. Raises UserError where RANK and WORLD_SIZE do not fit each other."""
    number, count = _number("RANK", 0, least=0), num_ranks()
    if count > 1 and not os.environ.get("RANK", "").strip():
        raise UserError(
            f"WORLD_SIZE is {count} in the environment, but RANK is not set: each process needs its own, 0 to {count - 1}, as "
            "torchrun sets it; for a process on its own `unset WORLD_SIZE`"
        )
    if number >= count:
        raise UserError(
            f"RANK is {number} in the environment, but WORLD_SIZE says that there {'are' if count > 1 else 'is'} {count}: ranks "
            "count from 0 to WORLD_SIZE - 1; set WORLD_SIZE to the number of processes, as torchrun does"
        )
    return number


def num_ranks() -> int:
    """Return the number of ranks; 1 without a launcher. Raises UserError for what is no number of ranks."""
    return _number("WORLD_SIZE", 1, least=1)


def local_rank() -> int:
    """Return this process's number among those of its host; 0 without a launcher. Raises UserError for what is no number."""
    return _number("LOCAL_RANK", 0, least=0)


def local_num_ranks() -> int:
    """Return how many ranks this host has; 1 without a launcher. Raises UserError for what is no number of ranks."""
    return _number("LOCAL_WORLD_SIZE", 1, least=1)


def meeting_place() -> tuple[str, int]:
    """Return host and port at which the ranks meet. Raises UserError for what is no port."""
    port = _number("MASTER_PORT", DEFAULT_PORT, least=1)
    if port > 65535:
        raise UserError(f"MASTER_PORT is {port} in the environment, and ports are 1 to 65535: set the same free one in all ranks")
    return os.environ.get("MASTER_ADDR", "") or "127.0.0.1", port


def _number(name: str, default: int, *, least: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise UserError(
            f"{name} is {text!r} in the environment, and must be a whole number from {least} on, as torchrun sets it: set it, or "
            f"`unset {name}`"
        )
    return int(text)
