"""How far ahead of the trainers a job is planned: so many steps at most, and so many bytes of them once they are decoded."""

from __future__ import annotations

from collections.abc import Sequence

STORES_SHARE = 0.75  # of what the preprocessors' stores hold: they also read ahead, and keep parts until a commit has come round
LEAST_STEPS = 2  # however large they are: the one that trainers need now, and the one to be prepared meanwhile


def bytes_ahead(window_bytes: int | None, stores_bytes: int) -> int:
    """How many may be planned: as the job says, else what the stores of the fleet, `stores_bytes` together, have room for.

    0: no limit, while the fleet has not said what it holds.
    """
    return int(STORES_SHARE * stores_bytes) if window_bytes is None else window_bytes


def has_room(num_bytes: Sequence[int | None], *, window: int, window_bytes: int) -> bool:
    """Whether another step may be planned behind these, which are not committed and come to so many bytes each. `window_bytes`:
    as `bytes_ahead` has it.

    None: a step that is still being probed. It, and the other one, are taken to be as large as the largest that is known; where
    none is, another one waits for that.
    """
    if len(num_bytes) < min(LEAST_STEPS, window):
        return True
    known = [size for size in num_bytes if size is not None]
    if len(num_bytes) >= window or not known:
        return False
    return not window_bytes or sum(known) + max(known) * (len(num_bytes) - len(known) + 1) <= window_bytes
