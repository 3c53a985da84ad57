"""The step loaders of one process's places, as one: each place takes its own part of every step, and commits it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from headrace.manifest import Vocabulary
from headrace.measured import MeasuredWork
from headrace.spec import JobSpec
from headrace.trainer.loading.steps import Step
from headrace.trainer.pipeline.cargo import Prepare
from headrace.trainer.pipeline.feed import PipelineLoader, StepFeed


class PlacesLoader:
    """Loads the same steps by several loaders, which have to be at the same step all the time.

    Their sessions are opened at the first use of what the service tells, and not before: a process that opens one to load a
    checkpoint's state into it a moment later would begin behind the job's last commit, where others begin at the checkpoint.
    """

    def __init__(self, loaders: Sequence[PipelineLoader]) -> None:
        """`loaders`: not open yet, one for each place."""
        self._loaders = loaders
        self._closing = ExitStack()
        self._is_open = False

    def __enter__(self) -> Self:
        for loader in self._loaders:
            self._closing.callback(loader.close)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closing.close()

    def open(self) -> None:
        """Open all sessions at once, unless they are, as one may wait for the others of its job."""
        if self._is_open:
            return
        try:
            with ThreadPoolExecutor(len(self._loaders), thread_name_prefix="open") as pool:
                list(pool.map(PipelineLoader.open, self._loaders))
        except BaseException:
            self._closing.close()
            raise
        self._is_open = True

    @property
    def spec(self) -> JobSpec:
        """The job's spec."""
        self.open()
        return self._loaders[0].spec

    @property
    def vocabulary(self) -> Vocabulary:
        """The job's vocabulary."""
        self.open()
        return self._loaders[0].vocabulary

    @property
    def next_step(self) -> int:
        """Index of the next step."""
        self.open()
        return self._loaders[0].next_step

    def has_next(self) -> bool:
        """Return whether a step is left, after waiting until it is planned."""
        self.open()
        return self._loaders[0].has_next()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the job (`StepLoader.state_dict`), which is that of all places."""
        return self._loaders[0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a checkpoint's step (`StepLoader.load_state_dict`)."""
        for loader in self._loaders:
            loader.load_state_dict(state)
        self._is_open = False

    def evaluation(self, spec: JobSpec) -> PlacesLoader:
        """Return a loader like this one, not open yet, of an evaluation (`StepLoader.evaluation`)."""
        return PlacesLoader([loader.evaluation(spec) for loader in self._loaders])

    def steps(self, prepare: Sequence[Prepare]) -> Iterator[tuple[Sequence[Step], Sequence[StepFeed]]]:
        """Yield the steps until the job's end, as each place has them, with the data of each (`PipelineLoader.steps`)."""
        self.open()
        of_places = [loader.steps(one) for loader, one in zip(self._loaders, prepare, strict=True)]
        for together in zip(*of_places, strict=True):
            steps, feeds = zip(*together, strict=True)
            yield steps, feeds

    def commit_fed(
        self, steps: Sequence[Step], feeds: Sequence[StepFeed], *, loss: float, measured: Sequence[Sequence[MeasuredWork]]
    ) -> None:
        """Begin to commit a step that this process has applied (`PipelineLoader.commit_fed`)."""
        for loader, step, feed, of_place in zip(self._loaders, steps, feeds, measured, strict=True):
            loader.commit_fed(step, feed, loss=loss, measured=of_place)

    def settle(self) -> None:
        """Wait until the last step passed to `commit_fed` is in the ledger (`PipelineLoader.settle`)."""
        for loader in self._loaders:
            loader.settle()
