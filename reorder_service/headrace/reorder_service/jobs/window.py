"""How far ahead of the trainers a job is planned: limits the steps, and their bytes once they are decoded."""

from __future__ import annotations

from collections.abc import Sequence

STORES_SHARE = 0.75  # of the preprocessors' stores: they also read ahead, and keep parts until they hear of the commit
LEAST_STEPS = 2  # planned however large they are: the one that trainers need now, and the next one


def bytes_ahead(window_bytes: int | None, stores_bytes: int) -> int:
    """Return how many bytes may be planned ahead: `window_bytes` if the job sets it, else STORES_SHARE of `stores_bytes`.

    `stores_bytes`: capacity of all preprocessors' stores together; 0 while it is not known. A result of 0 means no limit.
    """
    return int(STORES_SHARE * stores_bytes) if window_bytes is None else window_bytes


def has_room(num_bytes: Sequence[int | None], *, window: int, window_bytes: int) -> bool:
    """Return whether another step may be planned behind the uncommitted ones.

    num_bytes: bytes of each uncommitted step, None while it is being probed. Such a step, and the new one, are assumed to be as
    large as the largest that is known; where none is, planning waits for that. window: most steps. window_bytes: most bytes, as
    `bytes_ahead` returns it. The first LEAST_STEPS steps have room whatever their size.
    """
    if len(num_bytes) < min(LEAST_STEPS, window):
        return True
    known = [size for size in num_bytes if size is not None]
    if len(num_bytes) >= window or not known:
        return False
    return not window_bytes or sum(known) + max(known) * (len(num_bytes) - len(known) + 1) <= window_bytes
