"""The states that trainers resume from: whether a job can go on from one, and the newest step that all ranks have a state of.

A state names its step and the content of its last global batch. The content of a batch is a function of manifest, weights and
seed, so a state whose batch is the job's own has consumed what the job's ledger has, or will have. It may thus be ahead of the
store, which may have lost commits: ranks then commit the steps between again, without training them.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from headrace.errors import ConflictError, UserError
from headrace.reorder_service.jobs.batches import GlobalBatches
from headrace.reorder_service.jobs.cursor import Cursor
from headrace.reorder_service.jobs.sessions import Sessions

OFFER_S = 10.0  # how long a rank's offer of states counts; one that waits for other ranks repeats it every few seconds
MAX_STATES = 64  # of one rank
AWAITED_RANKS = 8  # most ranks that are named as awaited


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """What a trainer's checkpoint says about its place in the job."""

    step: int
    """The first step that the model has not applied."""
    content: int = 0
    """`GlobalBatches.content` of the last step that it has; 0: unknown, as in states of release 0.1 and of step 0."""


def newest_common(offers: Mapping[int, Collection[int]]) -> int:
    """Return the newest step of which every rank has a state. `offers`: rank -> steps of its states, of one rank or more.

    Raises ConflictError where there is none.
    """
    common = set.intersection(*(set(steps) for steps in offers.values()))
    if common:
        return max(common)
    oldest, newest = (choose(offers, key=lambda rank: max(offers[rank])) for choose in (min, max))
    raise ConflictError(
        f"no step has a state in every rank: rank {oldest} has {_steps(offers[oldest])}, rank {newest} {_steps(offers[newest])}: "
        "begin with older checkpoints that all ranks have, and let every rank keep its last two"
    )


def _steps(steps: Collection[int]) -> str:
    return "those of steps " + ", ".join(map(str, sorted(steps))) if len(steps) > 1 else f"that of step {max(steps)}"


class Resuming:
    """Decides from which step a new process of a rank goes on."""

    def __init__(
        self,
        job: str,
        cursor: Cursor,
        sessions: Sessions,
        batches: GlobalBatches,
        on_awaited: Callable[[], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_awaited`: called when `Cursor.awaited_step` has changed."""
        self._job = job
        self._cursor = cursor
        self._sessions = sessions
        self._batches = batches
        self._on_awaited = on_awaited
        self._now_s = now_s
        self._offers: dict[int, tuple[float, tuple[int, ...]]] = {}  # rank -> when it has offered the states of which steps
        self._agreed = -math.inf, 0  # when all ranks' offers were last compared, and the newest step that they have in common

    def begin(self, rank: int, num_ranks: int, states: Sequence[ResumeState]) -> tuple[int, str]:
        """Return the step from which a rank goes on, and what the rank has to wait for before that is known; empty: nothing.

        `states`: those that the rank can resume from. None: it goes on behind the last commit, with whatever weights. One: it
        goes on from that. Several: it goes on from the newest step of which all ranks have a state, and waits for these ranks.
        With one or more it also waits for ranks that have begun elsewhere a moment ago and may yet load a state.

        Raises UserError for a negative step and too many states, and ConflictError where the samples that a state has consumed
        are not the job's, and where ranks have begun from another step or have none in common.
        """
        if len(states) > MAX_STATES:
            raise UserError(f"rank {rank} offers {len(states)} states to resume from: give at most {MAX_STATES}")
        steps, unknown = self._usable(states)
        if unknown is not None:
            self._cursor.awaited_step = unknown
            self._on_awaited()
            return 0, f"the preprocessors count the shards up to step {unknown}, with which its state ends"
        if len(states) <= 1:
            step = steps[0] if steps else self._cursor.committed
            return step, self._check_begun(rank, step, has_state=bool(steps))
        now_s = self._now_s()
        offered_s, offered = self._offers.get(rank, (-math.inf, ()))
        self._offers[rank] = now_s, steps
        if offered != steps or now_s - min(offered_s, self._agreed[0]) >= OFFER_S:
            self._agreed = -math.inf, 0
        elif self._agreed[1] in steps and self._sessions.begun_elsewhere(rank, self._agreed[1]) is None:
            return self._agreed[1], ""
        begun = self._sessions.opened_at_step()
        loading = {one for one in begun if one != rank and self._sessions.may_yet_load(one)}
        offers = {one: offered for one, (at_s, offered) in self._offers.items() if now_s - at_s < OFFER_S and one < num_ranks}
        offers |= {one: (step,) for one, step in begun.items() if one != rank and step is not None and one not in loading}
        awaited = (one for one in range(num_ranks) if one not in offers and (one not in begun or one in loading))
        if missing := list(itertools.islice(awaited, AWAITED_RANKS)):
            return 0, f"the states of rank {', '.join(map(str, missing))}, to go on from the newest step that all have"
        self._agreed = now_s, newest_common(offers)
        return self._agreed[1], ""

    def state_at(self, step: int) -> ResumeState:
        """Return the state of a trainer that begins with a step up to which it is known what samples there are."""
        known = step > 0 and not self._cursor.is_broken_off and self._knows(step - 1)
        return ResumeState(step=step, content=self._batches.content(step - 1) if known else 0)

    def _usable(self, states: Sequence[ResumeState]) -> tuple[tuple[int, ...], int | None]:
        """Return the steps of the states whose samples are the job's, and a step that must be counted to tell, if any.

        Raises as `begin` where there is no such state.
        """
        steps: list[int] = []
        refusals: list[ConflictError] = []
        for state in states:
            try:
                if not self._is_of_job(state):
                    return (), state.step - 1
                steps.append(state.step)
            except ConflictError as err:
                refusals.append(err)
        if refusals and not steps:
            raise refusals[0]
        return tuple(steps), None

    def _is_of_job(self, state: ResumeState) -> bool:
        """Return whether the samples that a state has consumed are the job's; False: not known yet. Raises as `begin`."""
        job, committed, batches = self._job, self._cursor.committed, self._batches
        if state.step < 0:
            raise UserError(f"the state is of step {state.step}: steps of job {job!r} count from 0")
        if state.step == 0 or not state.content:
            if state.step > committed + 1:  # by one it may be: all was lost between the commit of a rank and that of another
                raise ConflictError(
                    f"the state is of step {state.step}, but job {job!r} has committed only {committed} steps, and the state "
                    f"does not say which samples it has trained: load the checkpoint of step {committed} or of an earlier one"
                )
            return True
        if not self._knows(state.step - 1):
            if 0 < batches.num_steps < state.step:
                raise ConflictError(f"the state is of step {state.step}, but job {job!r} has only {batches.num_steps} steps")
            return False
        if batches.content(state.step - 1) != state.content:
            raise ConflictError(
                f"the state is of step {state.step}, and has trained other samples in step {state.step - 1} than job {job!r} has "
                "there, as after a change of weights that its store has lost, or with another data set or seed: load the "
                f"checkpoint of step {committed} or of an earlier one"
            )
        return True

    def _knows(self, step: int) -> bool:
        if self._cursor.is_over:  # a leader that has taken it up so has not asked for its samples yet
            self._batches.set_up_order()
        return self._batches.knows(step)

    def _check_begun(self, rank: int, step: int, *, has_state: bool) -> str:
        """Return what a rank has to wait for where another has begun from another step, and may yet load a state; else nothing.

        A rank that comes back alone takes the others, which have gone on, back with it. Raises ConflictError where another rank
        has begun from another step, and has not gone on since.
        """
        if (begun := self._sessions.begun_elsewhere(rank, step)) is None:
            return ""
        other, at_step = begun
        if has_state and self._sessions.may_yet_load(other):
            return f"the state of rank {other}, which has opened a session at step {at_step} without one a moment ago"
        raise ConflictError(
            f"rank {rank} goes on from step {step}, and rank {other} from step {at_step}: load that of step "
            f"{min(step, at_step)} in all ranks, or give every rank its last states, to choose one that all have: "
            "`StepLoader.load_newest_common`"
        )
