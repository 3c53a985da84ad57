"""Placements of a few GPUs, EMULATED: what `headrace orchestrate` writes, run by the command that it prints.

Each placement is asked for by itself. The command plans the batches by which it was judged, and runs them on a process of this
machine for each stage of each replica, with the trainers' schedule and messages, and with sleeps for computing. So a step can be
held against two forecasts: the one of just that, and the one by which the placement was chosen, which has links, the exchange of
gradients and stages with a layer more than others besides.
"""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.orchestrate.command_runs import CommandRuns
from benchmarks.report import Row, Section, at_most, failed
from headrace.cli.example import example_data
from headrace.errors import HeadraceError

MODEL, DEVICE, GPUS, GLOBAL_BATCH = "qwen2.5-vl-3b", "a40", 4, 32
CHECKPOINTED = "vision"
"""Whose activations of a whole step are more than a GPU holds."""
STEPS = 3
"""That the command emulates, and batches by which placements are judged."""
PLACEMENTS: Mapping[str, Sequence[str]] = {
    "disaggregated": (),
    "encoders-first": ("--pp", "llm=2"),
    "nested": ("--pp", "llm=2"),
}
"""By name, with further options: pipelines of the LLM that have bubbles."""
GOAL_PERCENT = 5.0
LONGEST_S = 180.0


def sections() -> Iterator[Section]:
    """Yield the emulated steps of each placement beside their forecasts, or why they could not be measured."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        commands = CommandRuns("emulated run", Path(folder), LONGEST_S)
        rows = [row for placement in PLACEMENTS for row in _rows(commands, placement)]
    yield Section(
        title=f"EMULATED steps of placements of {MODEL} on {GPUS} x {DEVICE}, {GLOBAL_BATCH} samples: processes of this machine "
        "sleep for computing; error of the forecast",
        rows=rows,
    )


def _rows(commands: CommandRuns, placement: str) -> list[Row]:
    out = commands.folder / placement
    place = ["orchestrate", "--model", MODEL, "--data", str(example_data()), "--device", DEVICE, "--gpus", str(GPUS)]
    place += ["--global-batch", str(GLOBAL_BATCH), "--allow-small-batch", "--checkpointing", CHECKPOINTED]
    place += ["--searches", "", "--placements", placement, *PLACEMENTS[placement], "--batches", str(STEPS), "--out", str(out)]
    try:
        commands.run(f"place {placement}", place)
        found = json.loads((out / "placement.json").read_text(encoding="utf-8"))
        emulate = shlex.split(found["commands"]["emulate"])[1:]
        emulated = json.loads(commands.run(f"emulate {placement}", [*emulate, "--format", "json"]))
    except (RuntimeError, HeadraceError) as err:
        return [failed(f"{placement}: {err}")]
    return rows_of(found, emulated["steps"])


def rows_of(found: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the emulated steps beside both forecasts. found: content of placement.json; steps: of what the emulation prints."""
    best = found["searches"][0]
    measured_s, forecast_s = (mean(step[name] for step in steps) for name in ("measured_s", "predicted_s"))
    judged_s = mean(found["steps_s"][: len(steps)])
    units = ", ".join(
        f"{unit} {grid['dp']} x {grid['tp']} x {grid['pp']}" + " on llm" * (unit in best["on_llm"])
        for unit, grid in best["units"].items()
    )
    overhead_s = median(step["overhead_per_action_s"] for step in steps)
    return [
        Row(
            name=f"EMULATED {best['placement']}, {units}: the mean of {len(steps)} steps",
            value=100 * abs(forecast_s / measured_s - 1.0),
            unit="%",
            goal=at_most(GOAL_PERCENT),
            detail=f"measured {measured_s:.4g} s, forecast of what is emulated {forecast_s:.4g} s; "
            f"{best['microbatches']} microbatches, planned by {', '.join(sorted({step['strategy'] for step in steps}))}; an "
            f"action takes {1e6 * overhead_s:.0f} µs besides; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        ),
        Row(
            name=f"EMULATED {best['placement']}: the same beside the forecast of headrace orchestrate",
            value=100 * abs(judged_s / measured_s - 1.0),
            unit="%",
            goal=at_most(GOAL_PERCENT),
            detail=f"forecast {judged_s:.4g} s",
        ),
    ]
