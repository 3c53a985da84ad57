"""How far ahead of the trainers a job is planned: so many steps at most, and so many bytes of them once they are decoded."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_STEPS = 2  # however large they are: the one that trainers need now, and the one to be prepared meanwhile


def has_room(num_bytes: Sequence[int | None], *, window: int, window_bytes: int) -> bool:
    """Whether another step may be planned behind these, which are not committed and come to so many bytes each.

    None: a step that is still being probed. It, and the other one, are taken to be as large as the largest that is known; where
    none is, another one waits for that.
    """
    if len(num_bytes) < min(LEAST_STEPS, window):
        return True
    known = [size for size in num_bytes if size is not None]
    if len(num_bytes) >= window or not known:
        return False
    return sum(known) + max(known) * (len(num_bytes) - len(known) + 1) <= window_bytes
