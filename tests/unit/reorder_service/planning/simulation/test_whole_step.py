"""The kernels that run a step for one figure find what the timeline has, action by action."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from headrace.reorder_service.planning.batch import Batch, Slots
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.simulator import exchanges_of, peak_memory, simulate, timeline
from tests.examples import with_examples
from tests.unit.reorder_service.planning.simulator_world import plans


@with_examples(60)
@given(plans())
def test_the_end_and_the_peaks_are_those_of_the_timeline(plan: tuple[Batch, Slots]) -> None:
    work = planned_work(*plan)
    try:
        seconds = simulate(work).iteration_s
    except ValueError:
        return
    actions, behind_s = timeline(work), exchanges_of(work)[1]
    assert seconds == max((actions.end_s + behind_s[actions.stage]).tolist(), default=0.0)
    peaks = np.zeros((work.occupied.shape[0], work.topology.num_stages))
    np.maximum.at(peaks, (actions.replica, actions.stage), actions.memory_after)
    assert (peak_memory(work) == peaks).all()
