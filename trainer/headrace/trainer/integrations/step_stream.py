"""The steps of a loader for a training loop that asks for batches and knows nothing of commits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.errors import ConflictError
from headrace.trainer.loading.step_loader import StepLoader
from headrace.trainer.loading.steps import Step


class StepStream:
    """Hands out a loader's steps, one at a time, and commits each before the next one.

    There are two kinds of loops. Some take the batches of a step when they train on them: whoever asks for the next step, or for
    the state, has applied the last one; it is committed when the next one is asked for (`commits_when_asked`). Others may fetch
    ahead: they say when a step is applied, by `commit`.
    """

    def __init__(self, loader: StepLoader, *, commits_when_asked: bool) -> None:
        self.loader = loader
        self._commits_when_asked = commits_when_asked
        self._steps: Iterator[Step] | None = None
        self.step: Step | None = None
        """The step that was handed out last, unless it is committed."""

    def next_step(self) -> Step | None:
        """Return the next step, None behind the last one. Raises ConflictError where the last one is not committed."""
        self._end_step("the next one")
        if self._steps is None:
            self._steps = iter(self.loader)
        self.step = next(self._steps, None)
        return self.step

    def evaluate(self, name: str) -> Iterator[Step]:
        """Yield the steps of one pass over a validation set of the job, as `StepLoader.evaluate` does.

        Raises ConflictError where the step that was handed out last is not committed.
        """
        self._end_step(f"an evaluation of {name!r}")
        yield from self.loader.evaluate(name)

    def _end_step(self, wanted: str) -> None:
        if self.step is not None and not self._commits_when_asked:
            raise ConflictError(f"step {self.step.index} is not committed, and {wanted} was asked for: commit comes before")
        self.commit()

    def commit(self, *, loss: float = math.nan) -> None:
        """Commit the step that was handed out last, as it is applied. Nothing is done where it is committed, or there is none.

        Raises ConflictError where the loop took fewer microbatches than the step has.
        """
        if self.step is not None:
            self._check_consumed(self.step)
            self.loader.commit(self.step, loss=loss)
            self.step = None

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state behind the last step that is applied. Opens no session, and waits for nobody.

        A step that is applied counts, also where it is not committed yet: whoever loads the state commits it then.
        Raises ConflictError as `commit`.
        """
        state = self.loader.state_dict()
        if self._commits_when_asked and self.step is not None:
            self._check_consumed(self.step)
            state |= {"step": self.step.index + 1, "content": self.step.content}
        return state

    def _check_consumed(self, step: Step) -> None:
        if not step.consumed:
            raise ConflictError(
                f"the loop ended a step before it took all {step.num_microbatches} microbatches that step {step.index} of the "
                "job has: have it accumulate gradients over as many, or change the job's topology.microbatches"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, which may be empty: then nothing is done."""
        if state:
            self.loader.load_state_dict(dict(state))
