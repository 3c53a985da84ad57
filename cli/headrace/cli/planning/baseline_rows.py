"""What other systems would make of the same global batches on as many GPUs: the rows of `--baselines`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.cli.progress_bar import ProgressBar
    from headrace.reorder_service.planning.batch import Batch

BASELINE_NAMES = ("llm-only", "megatron", "megatron-balanced", "ratio", "dip", "encoders-replicated", "fsdp", "fsdp-orchmllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRow:
    """The simulated steps of one baseline, as means over global batches."""

    name: str
    iteration_s: float
    bubble: float
    """Share of all GPUs' time in which they are idle."""
    speedup: float
    """How many times as fast a step is as the planned one in arrival order."""
    best: float
    """How many times as fast as it the best strategy's step is."""

    def to_json(self) -> dict[str, Any]:
        """Return the public JSON form."""
        return {
            "baseline": self.name,
            "iteration_s": self.iteration_s,
            "bubble": self.bubble,
            "speedup": self.speedup,
            "best_over_it": self.best,
        }


def add_baselines_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the baselines."""
    parser.add_argument(
        "--baselines",
        default="",
        metavar="NAME,...",
        help=f"simulate other systems on as many GPUs too: all, or some of {', '.join(BASELINE_NAMES)} (default: none)",
    )


def baselines_asked(args: argparse.Namespace) -> list[str]:
    """Return the names that the option gives, each once. Raises UserError for an unknown one, and where units share ranks."""
    given = [name.strip() for name in args.baselines.split(",") if name.strip()]
    names = list(dict.fromkeys(name for one in given for name in (BASELINE_NAMES if one == "all" else [one])))
    for name in names:
        if name not in BASELINE_NAMES:
            raise UserError(f"no baseline {name!r}; there are {', '.join(BASELINE_NAMES)}, and all")
    if names and args.on_llm:
        raise UserError("--baselines are of pipelines whose units have GPUs of their own: take it or --on-llm away")
    return names


def baseline_rows(
    names: Sequence[str], batches: Sequence[Batch], *, arrival_s: float, best_s: float, bar: ProgressBar
) -> list[BaselineRow]:
    """Simulate the named baselines on global batches, and say on standard error which cannot have them.

    arrival_s, best_s: the mean step of samples in arrival order, and of the best strategy, on the pipelines that are planned.
    bar: shows how far it is.
    """
    from headrace.cli.planning.outcome import time_ratio
    from headrace.reorder_service.planning.strategies.baselines import BASELINES

    rows = []
    bar.begin("baselines simulated", len(names))
    for name in names:
        bar.advance()
        try:
            steps = [BASELINES[name](batch) for batch in batches]
        except ValueError as err:
            print(f"{name} is left out: {err}", file=sys.stderr)
            continue
        total = sum(step.iteration_s for step in steps)
        mean = total / len(steps)
        rows.append(
            BaselineRow(
                name=name,
                iteration_s=mean,
                bubble=sum(step.iteration_s * step.bubble for step in steps) / total if total > 0 else 0.0,
                speedup=time_ratio(arrival_s, mean),
                best=time_ratio(mean, best_s),
            )
        )
    return rows


def baselines_table(rows: Sequence[BaselineRow]) -> Table:
    """Return the table that is printed below that of the strategies."""
    from rich.table import Table

    title = "SIMULATED baselines on as many GPUs"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for name in ("baseline", "step", "x", "idle", "the best is"):
        table.add_column(name, justify="left" if name == "baseline" else "right", no_wrap=True)
    for row in rows:
        table.add_row(row.name, f"{row.iteration_s:.4g}", f"{row.speedup:.2f}", f"{row.bubble:.0%}", f"{row.best:.2f} x")
    return table
