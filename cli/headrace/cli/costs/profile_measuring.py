"""The rounds of `headrace profile`: as many as it takes until medians are known well, within a limit of time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeVar

if TYPE_CHECKING:
    import torch

    from headrace.trainer.profiling.layer_times import KindTimes, LayerTimer
    from headrace.trainer.profiling.profiled_model import ProfiledModel
    from headrace.trainer.profiling.stage_times import StageTimes

MEASURING = "measuring for others"
"""What a companion says once it has begun."""
_MOST_ROUNDS = 10_000
_USABLE_SHARE = 0.7  # of the memory, by a stage

_T = TypeVar("_T")
Show = Callable[[str, float, float], None]
"""Called with what is measured, the share of it that is done, and how uncertain it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """When there were rounds enough."""

    repeats: int
    """Rounds at least, without the first one, which only warms up."""
    within: float
    """Half of a confidence interval, as a share, that is narrow enough."""
    seconds: float
    """After so many there is no further round, however uncertain the times are."""

    def measure(
        self,
        rounds: Generator[_T, None, None],
        uncertainty: Callable[[_T], float],
        show: Callable[[float, float], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> tuple[_T, float]:
        """Go through rounds, each of which yields what it and all before it say, and return what the last one said.

        uncertainty: half of the widest confidence interval in it, as a share, which is returned too. The first round says
        nothing.
        """
        began_s = now_s()
        with closing(rounds):
            found, share = next(rounds), 1.0
            for number, found in enumerate(rounds, 1):
                took_s, share = now_s() - began_s, uncertainty(found)
                show(min(1.0, number / self.repeats, took_s / self.seconds if self.seconds else 1.0), share)
                if number >= self.repeats and (share <= self.within or took_s >= self.seconds):
                    break
        return found, share


@dataclass(frozen=True, slots=True, eq=False)
class Measuring:
    """What is measured: the layers of a model's parts, and their stages."""

    timer: LayerTimer
    profiled: ProfiledModel
    positions: Mapping[str, Sequence[int]]
    """By part, numbers of positions of samples."""
    widths: Sequence[int]
    device: torch.device
    dtype: torch.dtype

    def layers(self, part: str, patience: Patience, show: Show) -> tuple[list[KindTimes], float]:
        """Return the times of a part's layers and ends, and their uncertainty."""
        rounds = self.timer.rounds(part, self.positions[part], self.widths, _MOST_ROUNDS)
        return patience.measure(rounds, self._uncertainty, lambda done, share: show(part, done, share))

    def stage(self, part: str, patience: Patience, show: Show) -> tuple[StageTimes | None, float]:
        """Return the times of a part's stage, None where it takes too much memory, and the bytes that it takes."""
        from headrace.trainer.profiling.stage_times import StageTimer

        timer = StageTimer(self.profiled, part, device=self.device, dtype=self.dtype)
        if timer.needed_bytes > _USABLE_SHARE * _memory_bytes(self.device):
            return None, timer.needed_bytes
        rounds = timer.rounds(self.positions[part], _MOST_ROUNDS)
        times, _ = patience.measure(
            rounds,
            lambda found: 1.0 if found is None else found.uncertainty,
            lambda done, share: show(f"{part}, a stage", done, share),
        )
        return times, timer.needed_bytes

    def go_on_for_ever(self) -> NoReturn:
        """Measure one part after the other, to no end but that the cores are as busy as in training."""
        briefly, is_first = Patience(repeats=1, within=1.0, seconds=0.0), True
        while True:
            for part in self.positions:
                self.layers(part, briefly, lambda *_: None)
                if is_first:
                    print(MEASURING, flush=True)
                    is_first = False
                if 1 in self.widths:
                    self.stage(part, briefly, lambda *_: None)

    def _uncertainty(self, kinds: Sequence[KindTimes]) -> float:
        from headrace.trainer.profiling.layer_times import unit_uncertainty

        return max(unit_uncertainty([kind for kind in kinds if kind.tp == tp or not kind.layers]) for tp in self.widths)


def _memory_bytes(device: torch.device) -> float:
    import torch

    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


@contextmanager
def progress_of_shares() -> Iterator[Show]:
    """Show how much of what is measured is done, and how well it is known: on a terminal a bar, elsewhere a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    from headrace.cli.progress_bar import PLAIN_INTERVAL_S

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("+- {task.fields[share]:.1%}"))
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=not console.is_terminal) as progress:
        tasks = {}
        last_line_s = time.monotonic()

        def show(what: str, done: float, share: float) -> None:
            nonlocal last_line_s
            if not console.is_terminal and time.monotonic() - last_line_s >= PLAIN_INTERVAL_S:
                last_line_s = time.monotonic()
                console.print(f"{what}: {done:.0%}, +- {share:.1%}", markup=False, highlight=False)
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=1.0, share=1.0)
            progress.update(tasks[what], completed=done, share=share)

        yield show
