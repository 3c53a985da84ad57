"""The live display of a running job, on standard error."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.bottleneck import bottleneck
from headrace.cli.planning.problem import count
from headrace.cli.progress_bar import told_every
from headrace.jobs_client import state_name
from headrace.rates import Look, Looks, decoding_rates, samples_per_s
from headrace.v1.jobs_pb2 import JOB_STATE_INDEXING

PLAIN_INTERVAL_S = 2.0  # between lines where standard error is no terminal
WAITING_INTERVAL_S = 10.0  # the same while nothing has begun
TICK_S = 1.0  # of the seconds that a terminal shows meanwhile


class Display:
    """Live display of a running job: redrawn at each `update` on a terminal, elsewhere a line every two seconds."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if self._console.is_terminal else None
        self._looks = Looks()
        self._last_line_s = 0.0

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line of text that stays on the terminal."""
        self._console.print(text, markup=False, highlight=False)

    @contextlib.contextmanager
    def waiting(self, doing: Callable[[], str]) -> Iterator[None]:
        """Show during the block for how long it has gone on, and what `doing` returns of it, from a thread of its own."""

        def tell(past_s: float) -> None:
            text = f"{past_s:.0f} s: {doing()}"
            if self._live:
                self._live.update(Text(text, "dim"), refresh=True)
            else:
                self.say(text)

        with told_every(TICK_S if self._live else WAITING_INTERVAL_S, tell):
            yield
        if self._live:
            self._live.update("", refresh=True)

    def update(self, status: Any) -> None:
        """Show the job's current status, a JobStatus message."""
        now_s = time.monotonic()
        self._looks.add(Look(at_s=now_s, status=status))
        if self._live:
            self._live.update(self._picture(status), refresh=True)
        elif now_s - self._last_line_s >= PLAIN_INTERVAL_S:
            self._last_line_s = now_s
            self.say(
                f"step {status.committed_steps}/{status.num_steps or '?'}  {samples_per_s(self._looks.held):.1f} samples/s  "
                f"loss {_loss(status.last_loss)}  data wait {_wait(status):.1%}  quarantined {status.quarantined_samples}"
            )

    def _picture(self, status: Any) -> Group:
        if status.state == JOB_STATE_INDEXING:
            return Group(f"indexing: {status.indexed_shards} of {status.num_shards or '?'} shards")
        head = Table.grid(padding=(0, 2))
        head.add_row(
            f"[bold]{status.job}[/bold] {state_name(status)}",
            f"step {status.committed_steps}/{status.num_steps or '?'}",
            ProgressBar(total=status.num_steps or None, completed=status.committed_steps, width=40),
            f"planned ahead {status.planned_steps}",
        )
        body = Table("service", "samples/s", "MB/s", "holds", "note", box=None, padding=(0, 2), header_style="dim")
        body.add_row(
            "trainer",
            f"{samples_per_s(self._looks.held):.1f}",
            "",
            "",
            f"loss {_loss(status.first_loss)} → {_loss(status.last_loss)}, data wait {_wait(status):.1%}",
        )
        rates = decoding_rates(self._looks.held)
        for member in status.preprocessors:
            body.add_row(
                f"preprocessor {member.preprocessor}",
                f"{rates[member.preprocessor].samples_per_s:.1f}",
                f"{rates[member.preprocessor].bytes_per_s / 1e6:.1f}",
                f"{member.store_bytes / 1e6:.1f} MB",
                count(member.leases, "lease"),
            )
        quarantined = f"quarantined {status.quarantined_samples}" if status.quarantined_samples else ""
        found = bottleneck(self._looks.held)
        words = str(found) if status.ranks else found.sentence  # who is missing yet, the demo starts itself
        return Group(head, body, quarantined, Text(words))


def _loss(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}"


def _wait(status: Any) -> float:
    return status.data_wait_s / status.step_s if status.step_s else 0.0
