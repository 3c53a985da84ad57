"""b_min: how large a global batch must be for its units' shares of the work to stay the same (Entrain: dissertation, 4.4.2).

A pipeline's stages are divided among the units once, in proportion to their work. Small batches scatter: one has its work in the
encoder and the next in the LLM, and no division fits both. Alg. 2 draws batches of one size and looks at the division that each
alone would lead to. If all are the same, then with confidence 1 - ALPHA a further batch of that size, or of any larger one,
leads to another division with a probability of at most ERROR. Below b_min Entrain promises no balance from step to step (4.3).
"""

from __future__ import annotations

import math

import numpy as np

from headrace.reorder_service.planning.batch import Batch, Floats

ALPHA, ERROR = 0.05, 0.05  # the paper's
NUM_TRIALS = math.ceil(math.log(ALPHA) / math.log(1 - ERROR))  # 59: the paper's k (eq. C.5)
LARGEST_BATCH = 65_536  # a mean on the edge between two divisions would let Alg. 2 double for ever


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


def smallest_stable_batch(seconds: Floats, num_stages: int, seed: int = 0, most: int = LARGEST_BATCH) -> int | None:
    """Return b_min, the first of 1, 2, 4, ... samples at which NUM_TRIALS batches divide the stages as a first one does (Alg. 2).

    seconds: (U, n) forward and backward seconds of n samples of the data set, from which batches are drawn with replacement; a
    batch's proportions are those of its sums. num_stages: stages of one replica, the paper's N_total / DP. Returns None if no
    size up to `most` passes, because the data set's mean is too near to the edge between two divisions. O(NUM_TRIALS b_min U).

    Raises ValueError for fewer stages than units, or no samples.
    """
    if seconds.shape[1] == 0:
        raise ValueError("b_min needs at least one sample of the data set")
    generator = np.random.Generator(np.random.PCG64(seed))

    def drawn_division(size: int) -> tuple[int, ...]:
        rows = generator.integers(seconds.shape[1], size=size)
        return divide_stages(seconds[:, rows].sum(axis=1), num_stages)

    size = 1
    while size <= most:
        reference = drawn_division(size)
        if all(drawn_division(size) == reference for _ in range(NUM_TRIALS)):
            return size
        size *= 2
    return None


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
