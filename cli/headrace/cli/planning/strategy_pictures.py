"""A picture of every strategy, of one global batch: for `headrace compare --strategy-pictures`, and for docs/strategies.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headrace.cli.costs.cost_table import SECONDS
from headrace.cli.planning.gain import Gain, measure
from headrace.cli.planning.gain_picture import draw_bars
from headrace.cli.planning.problem import Problem, count
from headrace.cli.planning.rank_picture import RankStep, draw_ranks
from headrace.cli.planning.strategy_picture import draw_strategy, new_figure, place, save
from headrace.cli.planning.timeline import ARRIVAL
from headrace.errors import UserError
from headrace.plan import BASELINE_STRATEGIES, Topology
from headrace.reorder_service.planning.batch import Batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.simulation.phase_step import AFTER_PHASES
from headrace.reorder_service.planning.strategies import AUTO, CANDIDATES, COLOCATED, arrival, run_strategy

ARRIVING = "random"
IDEAS = {
    ARRIVING: "samples are dealt as they arrive",
    "llm-only": "the LLM's work is level, the encoder's as it falls",
    "disttrain": "replicas get equal work, and microbatches an order",
    "entrain": "the encoder's work is level, the LLM's is put off",
    "orchmllm": "each unit is level by itself over the replicas",
    "joint": "all units are level at once",
    "taper": "light microbatches fill and drain the pipeline",
    AUTO: "all are simulated, and the fastest is taken",
    COLOCATED: "ranks that have all units get equal sums",
    AFTER_PHASES: "ranks that meet after every unit get equal parts of it",
}
"""What each strategy does, in the words of its picture's title; `phases` is `orchmllm` where ranks have all units."""
DRAWN = (ARRIVING, *BASELINE_STRATEGIES, *(name for name in CANDIDATES if name != ARRIVING), AUTO, COLOCATED, AFTER_PHASES)
"""The names of the pictures, in the order of the page."""
_ON_RANKS = (COLOCATED, AFTER_PHASES)
_BARS_EDGES, _BAR_IN, _BARS_EXTRA_IN = (0.2, 0.99), 0.27, 0.12


def draw_strategies(folder: Path, problem: Problem, source: str) -> list[Path]:
    """Plan a global batch with every strategy, and write a PNG for each into a folder that exists; return them.

    Strategies that cannot plan for these pipelines are left out, and plans for ranks that have all units where units share ranks
    or have replicas of their own. source: name of the data, for the subtitles.
    """
    gains = {name: gain for name in DRAWN if name not in _ON_RANKS and (gain := _measured(name, problem))}
    written = []
    for name, gain in gains.items():
        out, title = folder / f"{name}.png", f"{name}: {IDEAS[name]}"
        if name == AUTO:
            written.append(_draw_choice(out, list(gains.values()), title, problem, source))
            continue
        planned = {f"As planned ({name})": gain.outcomes[0]} if name != ARRIVING else {}
        outcomes = {ARRIVAL: gains[ARRIVING].outcomes[0]} | planned
        subtitle = f"{_subject(problem, source)}. Left: forward of a stage for each microbatch, right: the pipelines. Simulated."
        written.append(draw_strategy(out, outcomes, title=title, subtitle=subtitle, seconds=problem.time_unit == SECONDS))
    if problem.batch.execution.sharing is None and not problem.batch.execution.unit_replicas:
        written += [_draw_ranks(folder, name, problem, source) for name in _ON_RANKS]
    return written


def _measured(name: str, problem: Problem) -> Gain | None:
    try:
        return measure(name, [problem])
    except UserError:
        if name == ARRIVING:
            raise
        return None


def _subject(problem: Problem, source: str) -> str:
    topology = problem.batch.topology
    stages = " + ".join(f"{number} {unit}" for unit, number in topology.stages.items())
    return f"{problem.size} of {source} on {count(topology.replicas, 'replica')} of {stages} stages"


def _draw_choice(out: Path, gains: Sequence[Gain], title: str, problem: Problem, source: str) -> Path:
    """Write the picture of `auto`: a bar for the step of each strategy that it considers, and for that of the one it takes."""
    considered = [gain for gain in gains if gain.strategy not in BASELINE_STRATEGIES]
    [auto] = [gain for gain in considered if gain.strategy == AUTO]
    best = next((gain for gain in considered if gain.strategy in auto.chosen), auto)
    axes_in = len(considered) * _BAR_IN
    subtitle = f"{_subject(problem, source)}: time of a step, arrival order = 100. Simulated."
    figure, height, top_in = new_figure(axes_in + _BARS_EXTRA_IN, title, subtitle)
    draw_bars(figure.add_axes(place(height, top_in, axes_in, _BARS_EDGES)), considered, best)
    return save(figure, out)


def _draw_ranks(folder: Path, name: str, problem: Problem, source: str) -> Path:
    """Write the picture of the same batch on as many ranks, each of which has all units."""
    batch = _on_ranks(problem.batch, name)
    ranks, microbatches = batch.topology.replicas, batch.topology.microbatches
    slots = {ARRIVAL: arrival.plan_slots(batch), f"As planned ({name})": run_strategy(AUTO, batch)[1]}
    where = f"{count(ranks, 'rank')} with all units, {count(microbatches, 'microbatch')} each"
    subtitle = f"{problem.size} of {source} on {where}. Left: work of each microbatch, right: the ranks. Simulated."
    steps = {headline: RankStep.of(batch, of_plan) for headline, of_plan in slots.items()}
    seconds, title = problem.time_unit == SECONDS, f"{name}: {IDEAS[name]}"
    return draw_ranks(folder / f"{name}.png", steps, title=title, subtitle=subtitle, seconds=seconds)


def _on_ranks(batch: Batch, name: str) -> Batch:
    """Return the batch on as many ranks as the pipelines have stages, with about as many samples in a microbatch."""
    replicas, stages = batch.topology.replicas, batch.topology.num_stages
    topology = Topology(
        replicas=replicas * stages,
        microbatches=max(1, batch.topology.microbatches // stages),
        stages=dict.fromkeys(batch.units, 1),
    )
    factors = batch.execution.backward_factors
    execution = Execution(colocated="microbatch" if name == COLOCATED else "phases", backward_factors=factors)
    return replace(batch, topology=topology, execution=execution)
