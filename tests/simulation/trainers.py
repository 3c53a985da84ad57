"""The ranks of one job, and who starts them again: each alone without a state, or all together from their newest checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from headrace.errors import HeadraceError
from headrace.trainer.loading.loader_state import LoaderState
from tests.simulation.fibers import in_fiber
from tests.simulation.rank import Checkpoint, Model, Rank
from tests.simulation.virtual_loop import Process
from tests.simulation.world import RESTART_S, World

log = logging.getLogger(__name__)

Delivered = dict[tuple[int, int], tuple[int, ...]]
"""(rank, step) -> ids of the samples that the rank has had."""


class Trainers:
    """All ranks of a job. `together`: where one is lost, all begin again from the newest checkpoint of all, as under torchrun."""

    def __init__(self, world: World, job: str, num_ranks: int, *, step_s: tuple[float, float], together: bool) -> None:
        """`step_s`: range of a step's duration."""
        self._world = world
        self._job = job
        self.num_ranks = num_ranks
        self.together = together
        self.delivered: Delivered = {}
        self._step_s = step_s
        self._random = world.random("trainers")
        self.ranks: dict[int, Rank] = {}
        self.processes: dict[int, Process] = {}
        fresh = Checkpoint(state=LoaderState(job=job, step=0), model={})
        self.checkpoints: list[dict[int, Checkpoint]] = [{0: fresh} for _ in range(num_ranks)]
        """Rank -> step -> what was saved before that step; survives the process."""
        self.models: dict[int, Model] = {}
        self.done: set[int] = set()
        self.held: set[int] = set()
        """Ranks that a fault keeps down."""
        self.errors: list[str] = []
        """What has ended ranks, in their own words."""
        self.failed: list[str] = []
        """What no rank should ever end with."""

    @property
    def are_done(self) -> bool:
        return len(self.done) == self.num_ranks

    def start(self) -> None:
        for number in range(self.num_ranks):
            self._start(number)

    def _start(self, number: int) -> None:
        world = self._world
        process = self.processes[number] = world.new_process(f"rank-{number}")
        nothing = Checkpoint(state=LoaderState(job=self._job), model={})
        offered: Mapping[int | None, Checkpoint] = dict(self.checkpoints[number]) if self.together else {None: nothing}

        def save(checkpoint: Checkpoint) -> None:
            self.checkpoints[number][checkpoint.state.step or 0] = checkpoint

        async def main() -> None:
            try:
                rank = Rank(
                    process,
                    world.network,
                    world.endpoint,
                    self._job,
                    number,
                    self.num_ranks,
                    step_s=lambda: self._random.uniform(*self._step_s),
                    save=save,
                    on_fetched=lambda step, ids: self.delivered.__setitem__((number, step), ids),
                )
                self.ranks[number] = rank
                await in_fiber(rank.run, offered, lambda model: self.models.__setitem__(number, model))
                self.done.add(number)
            except HeadraceError as err:
                self._failed(number, process, err)
            except Exception as err:
                self.failed.append(f"rank {number} ended with an error that is none of Headrace's: {err!r}")

        process.spawn(main())

    def forget_delivered(self, step: int) -> Delivered:
        """What ranks have had of this step and later ones does not count any more: the job has gone back to it. Return that."""
        forgotten = {key: ids for key, ids in self.delivered.items() if key[1] >= step}
        self.delivered = {key: ids for key, ids in self.delivered.items() if key[1] < step}
        return forgotten

    def recall_delivered(self, forgotten: Delivered) -> None:
        """What was forgotten counts again: the job was never told to go back."""
        self.delivered = forgotten | self.delivered

    def kill(self, number: int) -> None:
        process = self.processes[number]
        if process.is_alive:
            process.kill()
            self._world.network.died(process)
            self.done.discard(number)

    def strike(self, number: int) -> None:
        """Kill a rank, which stays down until `again`."""
        self.held.add(number)
        if self.together:
            for other in range(self.num_ranks):
                self.kill(other)
        else:
            self.kill(number)

    def again(self, number: int) -> None:
        self.held.discard(number)
        self._begin_again([number])

    def train_again(self, step: int) -> None:
        """Let ranks that were done begin again, with checkpoints of this step or earlier ones: the job has gone back since."""
        numbers = [*range(self.num_ranks)] if self.together else sorted(self.done)
        for number in numbers:
            self.kill(number)
            self.checkpoints[number] = {at: saved for at, saved in self.checkpoints[number].items() if at <= step}
        self.done.clear()
        self._begin_again(numbers)

    def _failed(self, number: int, process: Process, error: HeadraceError) -> None:
        self.errors.append(f"rank {number}: {type(error).__name__}: {error}")
        log.info("%.3f %s", self._world.loop.time(), self.errors[-1])
        self.kill(number)
        if self.together:
            for other in range(self.num_ranks):
                self.kill(other)
        self._world.loop.call_later(RESTART_S, self._begin_again, [number], context=self._world.context)

    def _begin_again(self, numbers: list[int]) -> None:
        if self.together:
            if self.held or any(process.is_alive for process in self.processes.values()):
                return
            self.done.clear()
            for number in range(self.num_ranks):
                self._start(number)
        else:
            for number in numbers:
                if number not in self.held and not self.processes[number].is_alive:
                    self._start(number)
