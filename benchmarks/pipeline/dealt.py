"""EMULATED pipelines whose encoder has replicas of its own: what is forecast of them, and what planning gains there."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.pipeline.emulated import Emulated
from benchmarks.planning.inputs import SEED, SYNTHCHART
from benchmarks.report import Row, Section, at_least, at_most
from benchmarks.timing import progress
from headrace.cli.planning.emulated_ranks import EmulatedRanks, pipeline_of
from headrace.cli.planning.outcome import Outcome
from headrace.reorder_service.planning.batch import make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.strategies import plan_of
from headrace.trainer.pipeline.emulated_stage import EMULATED

LLM_REPLICAS, MICROBATCHES, SAMPLES = 2, 16, 256
ENCODER_REPLICAS = (3, 4)
TIME_SCALE = 0.2
"""Of the table's seconds: a step is then 5 to 8 s."""
STRATEGIES = ("disttrain", "joint", "taper")
ERROR_GOAL_PERCENT, GAIN_GOAL = 3.0, 1.15


def sections(*, rounds: int) -> Iterator[Section]:
    """One step of each strategy, for every number of the encoder's replicas."""
    for replicas in ENCODER_REPLICAS:
        steps = _emulate(replicas, rounds)
        gains = {name: steps["disttrain"].measured_s / steps[name].measured_s for name in ("joint", "taper")}
        best = max(gains, key=gains.__getitem__)
        forecast = steps["disttrain"].predicted_s / steps[best].predicted_s
        rows = [
            Row(
                name=f"{name}, measured against simulated",
                value=step.error_percent,
                unit="%",
                goal=at_most(ERROR_GOAL_PERCENT),
                detail=f"{step.predicted_s:.3f} -> {step.measured_s:.3f} s",
            )
            for name, step in steps.items()
        ]
        gain = Row(
            name=f"{best} over disttrain",
            value=gains[best],
            unit="x",
            goal=at_least(GAIN_GOAL),
            detail=f"simulated {forecast:.3f}",
        )
        title = f"{EMULATED} encoder dp {replicas} beside llm dp {LLM_REPLICAS}: synthchart, {SAMPLES} samples, K={MICROBATCHES}"
        yield Section(title=title, rows=[*rows, gain])


def _emulate(replicas: int, rounds: int) -> dict[str, Emulated]:
    planned = {strategy: _planned(strategy, replicas) for strategy in STRATEGIES}
    with EmulatedRanks(pipeline_of(planned["joint"].batch).world_size) as ranks:
        emulated = {}
        for strategy, outcome in planned.items():
            progress(f"{EMULATED} {strategy}, encoder dp {replicas}")
            ranks.warm_up(outcome)
            emulated[strategy] = Emulated(outcome=outcome, rounds=[ranks.run(outcome) for _ in range(rounds)])
    return emulated


def _planned(strategy: str, replicas: int) -> Outcome:
    table = SYNTHCHART.table().take(slice(SAMPLES))
    costs = {unit: TIME_SCALE * column for unit, column in table.costs.items()}
    execution = Execution(unit_replicas={"encoder": replicas})
    batch = make_batch(table.sample_ids, costs, SYNTHCHART.topology(LLM_REPLICAS, MICROBATCHES), SEED, execution=execution)
    return Outcome.of(plan_of(strategy, batch), batch)
