"""The fastest way to train encoders on the GPUs of an LLM, in its bubbles (Optimus, algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.reorder_service.planning.batch import Floats
from headrace.reorder_service.planning.bubbles.coarse_schedule import coarse
from headrace.reorder_service.planning.bubbles.encoder_plans import EncoderPlan, encoder_plans
from headrace.reorder_service.planning.bubbles.filled_schedule import BEST_FIT, filled, mappings, reassigned
from headrace.reorder_service.planning.bubbles.idle_time import communication_time, compute_time
from headrace.reorder_service.planning.bubbles.layer_kernels import Encoder
from headrace.reorder_service.planning.bubbles.llm_timeline import LlmPlan, LlmTimeline, time_llm
from headrace.reorder_service.planning.bubbles.moved_schedule import moved
from headrace.reorder_service.planning.bubbles.placed_encoders import KernelTable, PlacedEncoders, Problem
from headrace.reorder_service.planning.bubbles.step_bound import least_step_s

_GIB = 1 << 30
_TOUCH_S = 1e-9
_FEWEST_TRIES, _MOST_TRIES = 4, 24  # reassignments of microbatches
_TRIED_KERNELS = 400_000  # as many tries as place so many kernels: a fraction of a second
_DIGITS = 9  # to which bounds of plans are compared


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BubblePlan:
    """The best of all schedules that were tried."""

    best: PlacedEncoders
    coarse: PlacedEncoders
    """The best that leaves the bubbles between the LLM's first and last action on a GPU alone, of the plans that were tried."""
    tried: tuple[PlacedEncoders, ...]
    """The best of every plan that was tried."""

    @property
    def llm_s(self) -> float:
        """Seconds of the LLM's own step, which is the least that any schedule takes."""
        return self.best.problem.timeline.end_s


def plan_bubbles(
    llm: LlmPlan,
    encoders: Sequence[Encoder],
    memory_bytes: float,
    *,
    send_s: float = 0.0,
    loads: Floats | None = None,
    strict: bool = True,
) -> BubblePlan:
    """Schedule encoders' kernels into the bubbles of one of the LLM's pipelines, all of which are alike.

    memory_bytes: of a GPU. send_s: from an encoder's stage to the next and between its last one and the LLM's first. loads: (N,)
    how many times as long as in its profile the encoders' kernels take on each of the LLM's microbatches; all 1 if not given.
    strict: see `communication_time`.

    The fastest schedule is taken, and of equally fast ones that of the plan with the fewest encoder pipelines, which holds least
    in memory. Plans are tried in the order of the steps that they could have at best, until no other can be faster; the search is
    then gone into more thoroughly for the fastest. Raises ValueError where `encoder_plans` and `Problem` do, or if every schedule
    keeps more activations than fit.
    """
    plans = encoder_plans(encoders, llm, memory_bytes)
    first = make_problem(llm, time_llm(llm), encoders, plans[0], send_s=send_s, loads=loads, strict=strict)
    problems = [first, *(first.under(encoders, plan) for plan in plans[1:])]
    least_s = [least_step_s(problem) for problem in problems]
    search = _Search(encoders, memory_bytes)
    for place in sorted(range(len(problems)), key=lambda place: (round(least_s[place], _DIGITS), place)):
        if search.best is not None and search.best.latency_s <= least_s[place] + _TOUCH_S:
            break
        for placed in _quickly(problems[place]):
            if search.consider(placed) and placed.latency_s <= least_s[place] + _TOUCH_S:
                break
    if search.best is None:
        raise ValueError(
            f"the encoders' activations take {search.excess_bytes / _GIB:.1f} GiB more than a GPU has left; "
            "give it fewer microbatches per step, or the LLM more stages or tensor-parallel ranks"
        )
    if search.best.latency_s > least_step_s(search.best.problem) + _TOUCH_S:
        for placed in _thoroughly(search.best):
            search.consider(placed)
    return BubblePlan(best=search.best, coarse=search.coarse or search.best, tried=tuple(search.of_plan.values()))


def make_problem(
    llm: LlmPlan,
    timeline: LlmTimeline,
    encoders: Sequence[Encoder],
    plan: EncoderPlan,
    *,
    send_s: float = 0.0,
    loads: Floats | None = None,
    strict: bool = True,
) -> Problem:
    """Put together what is to be scheduled under one plan. Arguments as for `plan_bubbles`."""
    return Problem(
        llm=llm,
        timeline=timeline,
        compute=compute_time(timeline),
        communication=communication_time(timeline, strict=strict),
        plan=plan,
        forward=KernelTable.of(encoders, plan, backward=False),
        backward=KernelTable.of(encoders, plan, backward=True),
        send_s=send_s,
        loads=np.ones(llm.microbatches) if loads is None else np.ascontiguousarray(loads, np.float64),
    )


def held_bytes(placed: PlacedEncoders, encoders: Sequence[Encoder]) -> float:
    """Return the most activations that a GPU keeps of encoders that have run ahead of the LLM."""
    plan = placed.problem.plan
    of_microbatch = sum(
        encoder.activation_bytes * -(-encoder.layers // plan.stages) / encoder.layers
        for encoder in encoders
        if not encoder.frozen
    )
    return placed.most_held() * of_microbatch / plan.tensor


def _quickly(problem: Problem) -> Iterator[PlacedEncoders]:
    """Yield a few schedules of one plan."""
    yield coarse(problem)
    for pipeline_of in mappings(problem):
        yield filled(problem, pipeline_of)


def _thoroughly(best: PlacedEncoders) -> Iterator[PlacedEncoders]:
    """Yield more schedules of the best one's plan."""
    problem = best.problem
    yield filled(problem, best.pipeline_of, look=BEST_FIT)
    kernels = problem.llm.microbatches * sum(table.seconds.size for table in problem.tables())
    tries = min(_MOST_TRIES, max(_FEWEST_TRIES, _TRIED_KERNELS // kernels))
    for pipeline_of in mappings(problem):
        yield reassigned(filled(problem, pipeline_of), tries)
    if np.ptp(problem.loads) == 0:
        yield moved(problem)


class _Search:
    """The best of the schedules that were considered, of those that fit into memory."""

    def __init__(self, encoders: Sequence[Encoder], memory_bytes: float) -> None:
        self._encoders, self._memory_bytes = encoders, memory_bytes
        self.best: PlacedEncoders | None = None
        self.coarse: PlacedEncoders | None = None
        self.of_plan: dict[EncoderPlan, PlacedEncoders] = {}
        self.excess_bytes = np.inf

    def consider(self, placed: PlacedEncoders) -> bool:
        """Keep a schedule where it is the best so far. Returns whether it fits."""
        plan = placed.problem.plan
        excess = plan.states_bytes + held_bytes(placed, self._encoders) - self._memory_bytes
        if excess > 0:
            self.excess_bytes = min(self.excess_bytes, excess)
            return False
        if placed.method == "coarse" and (self.coarse is None or _rank(placed) < _rank(self.coarse)):
            self.coarse = placed
        if plan not in self.of_plan or _rank(placed) < _rank(self.of_plan[plan]):
            self.of_plan[plan] = placed
        if (
            self.best is None
            or placed.latency_s < self.best.latency_s - _TOUCH_S
            or (plan == self.best.problem.plan and _rank(placed) < _rank(self.best))
        ):
            self.best = placed
        return True


def _rank(placed: PlacedEncoders) -> tuple[float, float]:
    """Order schedules: the fastest first, and of equally fast ones that which hides most."""
    return round(placed.latency_s, _DIGITS), -placed.efficiency
