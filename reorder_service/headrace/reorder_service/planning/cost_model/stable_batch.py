"""b_min: how large a global batch must be for its units' shares of the work to stay the same (Entrain: dissertation, 4.4.2).

A pipeline's stages are divided among the units once, in proportion to their work. Small batches scatter: one has its work in the
encoder and the next in the LLM, and no division fits both. Alg. 2 draws batches of one size and looks at the division that each
alone would lead to. If all are the same, then with confidence 1 - ALPHA a further batch of that size, or of any larger one,
leads to another division with a probability of at most ERROR. Below b_min Entrain promises no balance from step to step (4.3).
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from headrace.reorder_service.planning.batch import Batch, Floats

ALPHA, ERROR = 0.05, 0.05  # the paper's
LARGEST_BATCH = 65_536  # a mean on the edge between two divisions would let Alg. 2 double for ever


def num_trials(alpha: float, error: float) -> int:
    """Return k (eq. C.5): so many equal divisions show with confidence 1 - alpha that at most a share `error` would differ.

    Raises ValueError for a number that is not between 0 and 1.
    """
    for name, value in (("alpha", alpha), ("error", error)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must be between 0 and 1, got {value}")
    return math.ceil(math.log(alpha) / math.log(1 - error))


NUM_TRIALS = num_trials(ALPHA, ERROR)  # 59


def divide_stages(seconds: Floats, num_stages: int) -> tuple[int, ...]:
    """Divide stages among U units in proportion to their work, rounded to the nearest integers of which none is 0.

    seconds: (U,) work of each unit; if it is all 0, units count alike. Stages that rounding down leaves over go to the units with
    the largest remainders, and of equal ones to the first. Raises ValueError if there are fewer stages than units.
    """
    if num_stages < seconds.size:
        raise ValueError(f"{seconds.size} units need at least one stage each, got {num_stages}")
    total = seconds.sum()
    quotas = num_stages * (seconds / total if total > 0 else np.full(seconds.size, 1 / seconds.size))
    stages = np.maximum(1, quotas.astype(np.int64))
    while stages.sum() < num_stages:
        stages[np.argmax(quotas - stages)] += 1
    while stages.sum() > num_stages:
        stages[np.argmax(np.where(stages > 1, stages - quotas, -np.inf))] -= 1
    return tuple(stages.tolist())


def smallest_stable_batch(
    seconds: Floats,
    num_stages: int,
    seed: int = 0,
    most: int = LARGEST_BATCH,
    *,
    growth: int = 2,
    trials: int = NUM_TRIALS,
    mean_of_ratios: bool = False,
) -> int | None:
    """Return b_min, the first of 1, 2, 4, ... samples at which `trials` batches divide the stages as a first one does (Alg. 2).

    seconds: (U, n) forward and backward seconds of n samples of the data set, from which batches are drawn with replacement; a
    batch's proportions are those of its sums. num_stages: stages of one replica, the paper's N_total / DP. growth: factor from
    one size to the next; the listing doubles, the paper's tables go up by 4. mean_of_ratios: take the mean of the samples' own
    proportions (eq. C.1), of which the paper's proof speaks, in place of the proportions of sums. Returns None if no size up to
    `most` passes, because the data set's mean is too near to the edge between two divisions. O(trials b_min U).

    Raises ValueError for fewer stages than units, or no samples.
    """
    draw = _Draws(seconds, num_stages, seed, mean_of_ratios=mean_of_ratios)
    size = 1
    while size <= most:
        reference = draw.division(size)
        if all(draw.division(size) == reference for _ in range(trials)):
            return size
        size *= growth
    return None


def seen_divisions(
    seconds: Floats, num_stages: int, size: int, seed: int = 0, *, trials: int = NUM_TRIALS, mean_of_ratios: bool = False
) -> dict[tuple[int, ...], int]:
    """Return how often each division occurs among a first batch of a size and `trials` more, the most frequent first.

    A row of the paper's tables 4.2 and C.2 to C.8, which show them all and not only up to the first that differs. Arguments and
    errors as of `smallest_stable_batch`.
    """
    draw = _Draws(seconds, num_stages, seed, mean_of_ratios=mean_of_ratios)
    counts = Counter(draw.division(size) for _ in range(trials + 1))
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def failure_bound(failures: int, trials: int, alpha: float = ALPHA) -> float:
    """Return the share that is exceeded with probability `alpha` at most, after so many failures (Clopper-Pearson, one-sided).

    It is the probability at which so few failures would be seen with probability `alpha`, found by bisection.
    """
    low, high = 0.0, 1.0
    if failures >= trials:
        return 1.0
    for _ in range(60):
        share = 0.5 * (low + high)
        seen = sum(math.comb(trials, i) * share**i * (1 - share) ** (trials - i) for i in range(failures + 1))
        low, high = (share, high) if seen > alpha else (low, share)
    return high


def distance_to_edge(seconds: Floats, num_stages: int) -> float:
    """Return by how much a unit's share of the work may change until another division follows: the d of appendix C.1.

    seconds: (U, n). The least change of one unit's share, at the cost of the unit that loses or gains most, that alters the
    division of the data set's sums, to within a thousandth of a stage; at most 1.
    """
    share = seconds.sum(axis=1)
    share = share / share.sum() if share.sum() > 0 else np.full(share.size, 1 / share.size)
    division = divide_stages(share, num_stages)
    least = 1.0
    for gains in range(share.size):
        for loses in range(share.size):
            if gains != loses:
                least = min(least, _change(share, num_stages, division, gains, loses))
    return least


def _change(share: Floats, num_stages: int, division: tuple[int, ...], gains: int, loses: int) -> float:
    step = 1e-3 / num_stages
    for count in range(1, int(share[loses] / step) + 1):
        moved = share.copy()
        moved[gains] += count * step
        moved[loses] -= count * step
        if divide_stages(moved, num_stages) != division:
            return count * step
    return 1.0


class _Draws:
    """Batches drawn with replacement, of which only the division that each alone leads to is looked at."""

    def __init__(self, seconds: Floats, num_stages: int, seed: int, *, mean_of_ratios: bool) -> None:
        if seconds.shape[1] == 0:
            raise ValueError("b_min needs at least one sample of the data set")
        if mean_of_ratios:
            total = seconds.sum(axis=0)
            seconds = seconds[:, total > 0] / total[total > 0] if (total > 0).any() else seconds
        self._seconds, self._num_stages = seconds, num_stages
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def division(self, size: int) -> tuple[int, ...]:
        rows = self._generator.integers(self._seconds.shape[1], size=size)
        return divide_stages(self._seconds[:, rows].sum(axis=1), self._num_stages)


def small_batch_warning(batch: Batch, global_batch: int) -> str:
    """Return one sentence for the user of a job whose global batch is below b_min, or an empty text if it is not.

    batch: samples of the job, as many as are known, with its topology and execution. global_batch: samples of one step.
    """
    num_stages = batch.topology.num_stages
    stable = smallest_stable_batch(batch.costs * batch.step_factors[:, None], num_stages, batch.seed)
    if stable is not None and global_batch >= stable:
        return ""
    division = f"divides the {num_stages} stages of a replica alike among {', '.join(batch.units)} in nearly all steps"
    if stable is None:
        return (
            f"no global_batch of up to {LARGEST_BATCH} samples {division}: the work lies between two divisions, "
            f"so take one stage more or less"
        )
    return (
        f"global_batch is {global_batch}, below {stable}, the smallest that {division} (Entrain's b_min): "
        f"stages will wait for each other in steps whose work lies elsewhere, so set global_batch to {stable} or more"
    )
