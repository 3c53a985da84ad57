"""The step loader's contract, which every loader of `headrace.trainer.connect` keeps."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from headrace.errors import ConflictError, UserError
from headrace.manifest import Vocabulary
from headrace.spec import JobSpec
from headrace.trainer.loading.loader_state import LoaderState
from headrace.trainer.loading.statistics import LoaderStatistics
from headrace.trainer.loading.steps import Step
from headrace.validation_spec import evaluation_of


class StepLoader(ABC):
    """Iterates over the steps of a job as one rank gets them; each must be passed to `commit`. See `headrace.trainer.connect`."""

    spec: JobSpec
    vocabulary: Vocabulary
    """`spec` and `vocabulary` of the job are known once the loader is open."""
    generation: int = 0
    """The job's generation, which rises whenever it is planned for another topology; 0 until the loader is open."""

    def __init__(self, job: str) -> None:
        self._state = LoaderState(job=job)
        self._handed_out = False  # whether a step was handed out

    if not TYPE_CHECKING:  # which would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, which says when `spec` and `vocabulary` are there."""
            if name in ("spec", "vocabulary"):
                when = f"loader.{name} is what the job says, and known once the loader is open"
                raise AttributeError(f"{when}: read it inside of `with loader:`, or call loader.open() before")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def open(self) -> StepLoader:
        """Open the session if it is not open. `spec` and `vocabulary` are known from then on."""
        return self._open([self._state])

    @abstractmethod
    def _open(self, states: Sequence[LoaderState]) -> StepLoader:
        """Open the session if it is not open, to go on from one of `states`."""

    @abstractmethod
    def _end_session(self) -> None:
        """End the session if one is open: the next use opens another."""

    @abstractmethod
    def close(self) -> None:
        """Stop fetching and end the session. The tensors of all steps become invalid."""

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    @abstractmethod
    def next_step(self) -> int:
        """Index of the next step that the loader hands out."""

    @abstractmethod
    def has_next(self) -> bool:
        """Return whether a step is left, after waiting until it is planned."""

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position in the job, to be saved in the trainer's checkpoint beside the model.

        Does not open a session. Before one is open, "step" is that of the loaded state; None stands for the job's last commit.
        """
        return replace(self._state, generation=self.generation).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the checkpoint's step: later commits are undone. Must be called before the first step is handed out.

        If the checkpoint is ahead of the last commit, since the job's store has lost some, the steps between are committed again
        without being handed out. All ranks must load the same step.

        Raises ConflictError where a step was handed out, and where the state is of another job or version.
        """
        self._begin_anew(LoaderState.of(state, self._state.job))

    def load_newest_common(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Resume, as `load_state_dict` does, at the newest of `states` that every rank of the job has, and return that one.

        Every rank calls this with the states of its own checkpoints, such as its last two. It waits for the other ranks, so each
        must be in a process or a thread of its own. Raises ConflictError as `load_state_dict`, and where no state is common.
        """
        if not (own := [LoaderState.of(state, self._state.job) for state in states]):
            raise UserError("states is empty: give the states of the checkpoints that this rank can load")
        self._begin_anew(own[0])
        self._open(own)
        return next(state for state, one in zip(states, own, strict=True) if one.step == self._state.step)

    def _begin_anew(self, state: LoaderState) -> None:
        if self._handed_out:
            raise ConflictError("load_state_dict comes before the first step: make a new loader with headrace.trainer.connect")
        self._end_session()
        self._state = state

    @abstractmethod
    def commit(self, step: Step, *, loss: float = math.nan) -> None:
        """Commit a step whose update this rank has applied.

        `loss`: that of the whole step, if this rank knows it, for the ledger and for people to see.

        Returns once all ranks have committed the step and it is in the ledger: a checkpoint saved after that can be resumed.
        Where one thread commits for several ranks, only the last of its commits of a step waits for that, and the step is not
        in the ledger before.

        As ranks wait for one another here, every rank must run a collective or barrier that they share on the same side of this
        call: all before it or all after it.

        From this call on, unless it raises ConflictError, the step's tensors are invalid: their memory is reused.

        Raises ConflictError where some of the step's microbatches were not consumed.
        """

    @abstractmethod
    def __iter__(self) -> Iterator[Step]: ...

    def evaluate(self, name: str) -> Iterator[Step]:
        """Yield this rank's steps of one pass over a validation set of the job, balanced and packed as in training.

        Over all ranks they have each sample of the set once, and the last step has what is left. All ranks call this between
        two steps, or behind the last one, and take all steps; a step is committed, in a ledger of its own, when the next one is
        asked for. A pass that was broken off begins anew with the next call. The set's job is `evaluation_of(loader.spec, name)`.

            for step in loader.evaluate("web"):
                for microbatch in step:
                    ...             # forward only

        Raises UserError where the job has no such set, and JobFailedError where the set cannot be read.
        """
        self.open()
        loader = self.evaluation(evaluation_of(self.spec, name))
        with loader:
            for step in loader:
                yield step
                loader.commit(step)

    def evaluation(self, spec: JobSpec) -> Self:
        """Return a loader like this one, not open yet, that begins with the first step of an evaluation (`evaluation_of`)."""
        loader = self._loader_of(spec)
        loader.load_state_dict(LoaderState(job=spec.name, step=0).to_dict())
        return loader

    @abstractmethod
    def _loader_of(self, spec: JobSpec) -> Self:
        """Return a loader like this one, not open yet, of another job, which is submitted by the time it opens."""

    @abstractmethod
    def statistics(self) -> LoaderStatistics:
        """Return the loader's counts and waiting time so far, and the memory it holds now. From any thread."""
