"""`python -m benchmarks.pipeline`: EMULATED pipelines beside the simulator, and what the runtime costs: a table, a JSON file.

Sixteen processes on this machine, 8 stages x 2 replicas, run the executor, the schedule and the messages (gloo) of the pipeline
runtime; only their computing is sleep. Costs are the repository's heavy-tailed table. Beside them real training: one stage
against a plain loop, and what data cost the trainers.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median

from benchmarks.pipeline import alone, bare_gloo, counted, dealt, images, wait
from benchmarks.pipeline.emulated import Emulated
from benchmarks.planning.inputs import SEED, SYNTHCHART
from benchmarks.report import RESULTS, Goal, Report, Rival, Row, Section, at_least, at_most
from benchmarks.timing import progress
from headrace.cli.planning.emulated_ranks import EmulatedRanks, MeasuredStep
from headrace.cli.planning.outcome import Outcome
from headrace.plan import LLM, Topology
from headrace.reorder_service.planning import warm_up
from headrace.reorder_service.planning.batch import make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.strategies import plan_of
from headrace.trainer.pipeline.emulated_stage import EMULATED

REPLICAS, MICROBATCHES, SAMPLES = 2, 32, 256
STEPS = 2
"""Global batches: the table has as many rows."""
ROUNDS = 3
"""Times that each is measured; the median counts, as whatever else this machine does makes one of them longer."""
TIME_SCALE = 0.2
"""Of the table's seconds: the mean forward of a microbatch on a stage is then 50 ms, and a step 5 to 10 s."""
ERROR_GOAL_PERCENT, OVERHEAD_GOAL_US = 5.0, 150.0
DISTTRAIN_GOAL, RANDOM_GOAL = 1.20, 1.30
PAIR = Topology(replicas=1, microbatches=MICROBATCHES, stages={"encoder": 1, LLM: 1})
"""Two processes, which have a core each on the smallest machine."""
STRATEGIES = ("random", "disttrain", "entrain", "joint")
SCHEDULES = {
    "interleaved in 2 chunks": Execution(schedule="interleaved", chunks=2),
    "eager": Execution(schedule="eager", in_flight=12),
    "gpipe": Execution(schedule="gpipe"),
    "zero-bubble": Execution(schedule="zero-bubble"),
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one step of everything, once")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where pipeline.json goes")
    options = parser.parse_args()
    steps, rounds = (1, 1) if options.quick else (STEPS, ROUNDS)
    warm_up()
    progress("starting the processes")
    with EmulatedRanks(REPLICAS * sum(SYNTHCHART.stages.values())) as ranks:
        by_strategy = {name: _emulate(ranks, name, Execution(), steps, rounds) for name in STRATEGIES}
        by_schedule = {name: _emulate(ranks, "joint", execution, steps, rounds) for name, execution in SCHEDULES.items()}
    pair = _planned("joint", Execution(), 0, PAIR, TIME_SCALE / (REPLICAS * sum(SYNTHCHART.stages.values())))
    progress(f"{EMULATED} {PAIR.num_stages} processes")
    with EmulatedRanks(PAIR.num_stages) as ranks:
        ranks.warm_up(pair)
        of_pair = [ranks.run(pair) for _ in range(rounds)]
    mean_sleep_s = mean(one.asked_s for one in of_pair) / sum(len(recording.events) for recording in of_pair[0].recordings)
    of_gloo = bare_gloo.overheads_s(MICROBATCHES, SAMPLES // MICROBATCHES, mean_sleep_s, rounds)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        sections = [
            _errors("strategies, 1F1B", by_strategy),
            _errors("schedules, joint", by_schedule),
            _gains(by_strategy),
            *dealt.sections(rounds=rounds),
            _overheads(
                [one for by in (by_strategy, by_schedule) for steps in by.values() for step in steps for one in step.rounds],
                of_pair,
                of_gloo,
            ),
            *counted.sections(quick=options.quick),
            alone.section(quick=options.quick),
            wait.section(quick=options.quick),
            images.section(Path(folder) / "images", quick=options.quick),
        ]
    report = Report(
        benchmark="pipeline", date=datetime.now(UTC).isoformat(timespec="seconds"), quick=options.quick, sections=sections
    )
    report.write(options.results / "pipeline.json")
    report.show()


def _planned(
    strategy: str, execution: Execution, step: int, topology: Topology | None = None, time_scale: float = TIME_SCALE
) -> Outcome:
    table = SYNTHCHART.table()
    rows = slice(step * SAMPLES, (step + 1) * SAMPLES)
    costs = {unit: time_scale * column[rows] for unit, column in table.costs.items()}
    topology = topology or SYNTHCHART.topology(REPLICAS, MICROBATCHES)
    batch = make_batch(table.sample_ids[rows], costs, topology, SEED, execution=execution)
    return Outcome.of(plan_of(strategy, batch), batch)


def _emulate(ranks: EmulatedRanks, strategy: str, execution: Execution, steps: int, rounds: int) -> list[Emulated]:
    emulated = []
    ranks.warm_up(_planned(strategy, execution, 0))
    for step in range(steps):
        progress(f"{EMULATED} {strategy}, {execution.schedule}, step {step + 1} of {steps}")
        outcome = _planned(strategy, execution, step)
        emulated.append(Emulated(outcome=outcome, rounds=[ranks.run(outcome) for _ in range(rounds)]))
    return emulated


def _errors(what: str, measured: dict[str, list[Emulated]]) -> Section:
    rows = []
    for name, steps in measured.items():
        num_deferred = sum(step.outcome.num_deferred() for step in steps)
        times = ", ".join(f"{step.predicted_s:.3f} -> {step.measured_s:.3f} s" for step in steps)
        rows.append(
            Row(
                name=f"{name}, {num_deferred} samples deferred" if num_deferred else name,
                value=max(step.error_percent for step in steps),
                unit="%",
                goal=at_most(ERROR_GOAL_PERCENT),
                detail=f"predicted -> measured: {times}",
            )
        )
    return Section(
        title=f"{EMULATED} {what}: iteration time, measured (median of the rounds) against simulated, the step that is worst",
        rows=rows,
    )


def _gains(measured: dict[str, list[Emulated]]) -> Section:
    goals: dict[str, Goal] = {"disttrain": at_least(DISTTRAIN_GOAL), "random": at_least(RANDOM_GOAL)}
    seconds = {name: sum(step.measured_s for step in steps) for name, steps in measured.items()}
    predicted = {name: sum(step.predicted_s for step in steps) for name, steps in measured.items()}
    rows = [
        Row(
            name=f"joint over {name}",
            value=seconds[name] / seconds["joint"],
            unit="x",
            goal=goal,
            detail=f"simulated {predicted[name] / predicted['joint']:.3f}",
        )
        for name, goal in goals.items()
    ]
    return Section(
        title=f"{EMULATED} measured speed-up: synthchart, {SAMPLES} samples, D={REPLICAS}, K={MICROBATCHES}, 8 stages", rows=rows
    )


def _overheads(shared_cores: Sequence[MeasuredStep], own_cores: Sequence[MeasuredStep], of_gloo: Sequence[float]) -> Section:
    gloo = Rival(value=1e6 * mean(of_gloo), source="sends and receives of gloo alone, in the same pattern")
    rows = [
        _overhead("16 processes that wait for a core of this machine's", shared_cores),
        _overhead("2 processes", own_cores, gloo),
        Row(
            name="sleeps longer than asked for, 16 processes",
            value=100 * mean(one.oversleep for one in shared_cores),
            unit="%",
        ),
    ]
    title = f"{EMULATED} overhead on gloo: an action, beside computing and waiting for a peer; the mean"
    return Section(title=title, rows=rows)


def _overhead(name: str, measured: Sequence[MeasuredStep], rival: Rival | None = None) -> Row:
    overheads_s = [overhead_s for one in measured for overhead_s in one.overheads_s]
    return Row(
        name=name,
        value=1e6 * mean(overheads_s),
        unit="µs",
        rival=rival,
        goal=at_most(OVERHEAD_GOAL_US),
        detail=f"median {1e6 * median(overheads_s):.0f} of {len(overheads_s):,}",
    )


if __name__ == "__main__":
    main()
