"""Whether a job's global batch is large enough for its pipelines (Entrain's b_min), judged once its first steps are planned."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from headrace.reorder_service.jobs.job_execution import execution_of
from headrace.reorder_service.planning.batch import make_batch
from headrace.reorder_service.planning.cost_model.stable_batch import small_batch_warning
from headrace.spec import JobSpec

Costs = Mapping[str, NDArray[np.float64]]


class BatchSize:
    """Collects the costs of a job's first window of steps, and then judges the size of its global batch, once."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._costs: list[Costs] = []
        self.warning = ""
        """One sentence for the user of a job whose global batch is below b_min; empty if it is not, or not known yet."""

    def add(self, costs: Costs) -> bool:
        """Add the (n,) seconds of a planned step's samples in each unit; return whether `judge` is to be called now."""
        if len(self._costs) >= self._window:
            return False
        self._costs.append(costs)
        return len(self._costs) == self._window

    def judge(self, spec: JobSpec) -> None:
        """Set `warning` from what was collected. It takes up to a second, so it belongs into a worker thread.

        spec: as the job is planned now. Ranks that have all units have no stages to divide, and are never warned.
        """
        topology = spec.topology.topology()
        execution = execution_of(spec, topology)
        known = [costs for costs in self._costs if costs.keys() >= topology.stages.keys()]  # of no former topology
        if execution.colocated or not known:
            return
        joined = {unit: np.concatenate([costs[unit] for costs in known]) for unit in topology.stages}
        ids = np.arange(len(joined[next(iter(joined))]))
        batch = make_batch(ids, joined, topology, spec.seed, execution=execution)
        self.warning = small_batch_warning(batch, spec.global_batch)
