"""Units with replicas of their own: how level these are, what planning gains there, and how long dealing takes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.planning.inputs import CHARTQA, SEED, SYNTHCHART, Family, resampled
from benchmarks.report import Rival, Row, Section, at_least, at_most
from benchmarks.timing import progress, time_calls
from headrace.reorder_service.planning.batch import Batch, Floats, make_batch, slots_of
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.search.unit_dealing import deal, with_equal_replicas
from headrace.reorder_service.planning.strategies import joint, plan_of
from headrace.trainer.pipeline.routes import Routes

LLM_REPLICAS, MICROBATCHES, ENCODER_REPLICAS = 2, 16, (3, 4)
SIZES = (512, 256)
SPREAD_GOAL, GAIN_GOAL, DEALING_GOAL_MS = 0.02, 1.15, 5.0
DEALT_SAMPLES = 2000


def sections(*, quick: bool) -> Iterator[Section]:
    """All of them, for the two tables whose samples differ most."""
    batches = {
        (family.name, size, replicas): _batch(family, size, replicas)
        for size in SIZES
        for family in (CHARTQA, SYNTHCHART)
        for replicas in ENCODER_REPLICAS
    }
    where = f"llm dp {LLM_REPLICAS}, K={MICROBATCHES}, 8 stages"
    yield Section(
        title=f"encoder with replicas of its own: spread of its microbatches (standard deviation over mean), joint; {where}",
        rows=[_spread_row(*key, batch) for key, batch in batches.items()],
    )
    yield Section(
        title=f"encoder with replicas of its own: simulated speed-up over disttrain; {where}",
        rows=[_gain_row(*key, batch) for key, batch in batches.items()],
    )
    progress("unit replicas: dealing")
    yield Section(title="dealing to replicas of its own, beside the plan for equal numbers", rows=[_dealing_row(quick)])


def _batch(family: Family, size: int, replicas: int) -> Batch:
    table = family.table().take(slice(size))
    execution = Execution(unit_replicas={"encoder": replicas})
    return make_batch(table.sample_ids, table.costs, family.topology(LLM_REPLICAS, MICROBATCHES), SEED, execution=execution)


def _spread_row(name: str, size: int, replicas: int, batch: Batch) -> Row:
    """The rival is the same strategy where the plan does not know of the replicas, and the trainer cuts by number, in order."""
    progress(f"unit replicas: {name}, {size} samples, encoder dp {replicas}, spread")
    slots = slots_of(plan_of("joint", batch), batch.sample_ids)
    loads = batch.loads(slots)[:replicas, :, 0]
    least = _least_spread(batch.costs[0], loads.size)
    return Row(
        name=f"{name}, n={size}, encoder dp {replicas}",
        value=float(loads.std() / loads.mean()),
        rival=Rival(value=_cut_in_order(batch, replicas), source="cut in order"),
        goal=at_most(SPREAD_GOAL) if least < SPREAD_GOAL else None,
        detail=f"single samples that outweigh a microbatch leave {least:.4f} at the least" if least > 1e-9 else "",
    )


def _least_spread(costs: Floats, num_microbatches: int) -> float:
    """What no dealing can beat: samples that outweigh an even share are alone, and the others share the rest evenly."""
    falling = np.sort(costs)[::-1]
    heavy = 0
    while falling[heavy] > falling[heavy:].sum() / (num_microbatches - heavy):
        heavy += 1
    share = falling[heavy:].sum() / (num_microbatches - heavy)
    loads = np.append(falling[:heavy], np.full(num_microbatches - heavy, share))
    return float(loads.std() / loads.mean())


def _cut_in_order(batch: Batch, replicas: int) -> float:
    plan = plan_of("joint", with_equal_replicas(batch))
    routes = Routes(plan, {"encoder": replicas, "llm": LLM_REPLICAS})
    cost_of = dict(zip(batch.sample_ids.tolist(), batch.costs[0].tolist(), strict=True))
    loads: Floats = np.zeros((replicas, MICROBATCHES))
    for replica in range(replicas):
        for portion in routes.portions("encoder", replica):
            loads[replica, portion.forward] += sum(cost_of[sample] for sample in portion.samples)
    return float(loads.std() / loads.mean())


def _gain_row(name: str, size: int, replicas: int, batch: Batch) -> Row:
    progress(f"unit replicas: {name}, {size} samples, encoder dp {replicas}, step time")
    seconds = {}
    for strategy in ("disttrain", "joint", "taper"):
        predicted = plan_of(strategy, batch).predicted
        assert predicted is not None
        seconds[strategy] = predicted.iteration_s
    best = min(("joint", "taper"), key=seconds.__getitem__)
    return Row(
        name=f"{name}, n={size}, encoder dp {replicas}, {best}",
        value=seconds["disttrain"] / seconds[best],
        unit="x",
        goal=at_least(GAIN_GOAL),
    )


def _dealing_row(quick: bool) -> Row:
    table = resampled(SYNTHCHART.table(), DEALT_SAMPLES, SEED)
    execution = Execution(unit_replicas={"encoder": 24})
    batch = make_batch(table.sample_ids, table.costs, SYNTHCHART.topology(16, MICROBATCHES), SEED, execution=execution)
    planned = joint.plan_slots(with_equal_replicas(batch))
    budget_s = 0.2 if quick else 1.0
    only_dealt = time_calls(lambda: deal(batch, planned), budget_s=budget_s)
    exchanged = time_calls(lambda: deal(batch, planned, exchanging=True), budget_s=budget_s)
    return Row(
        name=f"{DEALT_SAMPLES} samples, encoder dp 24, llm dp 16",
        value=1e3 * only_dealt.best_s,
        unit="ms",
        goal=at_most(DEALING_GOAL_MS),
        detail=f"{1e3 * exchanged.best_s:.1f} if samples also change places",
    )
