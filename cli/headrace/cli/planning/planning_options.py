"""The arguments that planning commands (`plan`, `simulate`, `compare`, `train --emulate`) share, and what they are turned into.

They describe a pipeline and how it runs: a `Topology`, an `Execution` and a `Problem`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.backward_factors import BackwardTimes, backward_factors, weight_factor
from headrace.cli.former_names import also_called
from headrace.cli.planning import option_values, orchmllm_option
from headrace.cli.planning.problem import Problem
from headrace.cli.planning.sharing_options import add_sharing_arguments, sharing_of
from headrace.errors import UserError
from headrace.plan import BASELINE_STRATEGIES, GENERATOR, LLM, Topology
from headrace.schedule import SCHEDULES, Kind

if TYPE_CHECKING:
    from headrace.cli.costs.cost_table import CostTable
    from headrace.reorder_service.planning.execution import Execution

STRATEGY_NAMES = "random, disttrain, entrain, orchmllm, joint, taper or auto"
DEFAULT_REPLICAS, DEFAULT_MICROBATCHES, DEFAULT_STAGES = 4, 32, 8
_UNIT_FLAGS = {"encoder": "--encoder-stages", LLM: "--llm-stages", GENERATOR: "--generator-stages"}


def add_table_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument COSTS, a cost table, and the option that says which of its rows make up the global batch."""
    parser.add_argument(
        "costs", metavar="COSTS", help="cost table: a .parquet or .jsonl file, or - for JSONL on standard input (see below)"
    )
    parser.add_argument(
        "--global-batch", type=int, metavar="N", help="plan the first N rows (default: all rows are one global batch)"
    )
    also_called(parser, "--global-batch", "--batch")
    parser.add_argument(
        "--coefficients",
        type=Path,
        metavar="FILE",
        help="a file of `headrace profile`, of which the backward's share of each unit is taken and, where the table is in "
        "seconds, what microbatches take besides their samples (default: counted operations)",
    )


def add_pipeline_arguments(
    parser: argparse.ArgumentParser, *, microbatches: str = str(DEFAULT_MICROBATCHES), of: str = ""
) -> None:
    """Add the options for replicas, microbatches and stages, and for how they run.

    microbatches: the default number of microbatches as the help names it. of: what follows the names of both groups.
    """
    shape = parser.add_argument_group(f"pipelines{of}")
    shape.add_argument(
        "--replicas", type=int, default=DEFAULT_REPLICAS, metavar="N", help="data-parallel pipelines (default: %(default)s)"
    )
    shape.add_argument("--dp", default="", metavar="UNIT=N,...", help="replicas of units that have another number, like vision=3")
    shape.add_argument("--microbatches", type=int, metavar="N", help=f"of each replica and step (default: {microbatches})")
    shape.add_argument("--stages", metavar="UNIT=N,...", help="pipeline stages of each unit, like vision=2,audio=1,llm=5")
    shape.add_argument("--encoder-stages", type=int, metavar="P", help="for tables of encoder and llm")
    shape.add_argument("--llm-stages", type=int, metavar="Q", help="together with --encoder-stages")
    shape.add_argument("--generator-stages", type=int, metavar="R", help="for tables that have a generator too")
    shape.add_argument(
        "--num-stages",
        type=int,
        metavar="S",
        help=f"stages in all, divided among the units so that the step is shortest (default: {DEFAULT_STAGES})",
    )
    shape.add_argument(
        "--layers", metavar="UNIT=N,...", help="layers of units, like vision=32,llm=28: no unit may have more stages"
    )
    shape.add_argument(
        "--pack-tokens",
        type=int,
        metavar="N",
        help="pack samples into sequences of N tokens first, each charged to the LLM at its full length; needs a column tokens",
    )
    shape.add_argument("--seed", type=int, default=0, metavar="N", help="of the strategies that search (default: %(default)s)")

    how = parser.add_argument_group(f"how pipelines run{of}")
    how.add_argument("--schedule", default="1f1b", metavar="NAME", help=f"{', '.join(SCHEDULES)} (default: %(default)s)")
    how.add_argument("--chunks", type=int, default=1, metavar="V", help="parts of the model on a stage, interleaved (default: 1)")
    how.add_argument("--in-flight", type=int, metavar="N", help="most microbatches a stage holds, eager (default: what fits)")
    how.add_argument("--whole-backward", action="store_true", help="do not split the backward where samples are deferred")
    how.add_argument("--frozen", default="", metavar="UNIT,...", help="units that are not trained")
    how.add_argument("--checkpointing", default="", metavar="UNIT,...", help="units that run their forward again in the backward")
    how.add_argument(
        "--stage-loads",
        default="",
        metavar="UNIT=X:...,...",
        help="times of a unit's stages, relative to each other, like llm=1:1:1.4 (default: all alike)",
    )
    how.add_argument(
        "--exchange",
        default="",
        metavar="UNIT=X:Y,...",
        help="times in which a unit's replicas exchange weights before, and gradients after its microbatches (default: none)",
    )
    add_sharing_arguments(how)
    how.add_argument("--latency", type=float, default=0.0, metavar="T", help="time of a transfer between stages (default: 0)")
    how.add_argument("--bandwidth", type=float, default=math.inf, metavar="B", help="bytes per unit of time between stages")
    how.add_argument(
        "--memory-limit", type=float, default=math.inf, metavar="M", help="most activations on a stage, in the table's unit"
    )
    how.add_argument(
        "--crossing",
        action="store_true",
        help="auto may take plans whose samples change their replica, as in a job with `trainer: pipeline`",
    )
    how.add_argument(
        "--coarse-quantile",
        type=float,
        default=0.5,
        metavar="Q",
        help="entrain spreads samples above this quantile of the LLM's costs first (default: %(default)s)",
    )
    how.add_argument("--orchmllm", default="", metavar="UNIT=FORM,...", help=orchmllm_option.HELP)


def check_numbers(args: argparse.Namespace) -> None:
    """Raise UserError if --replicas, --microbatches or --seed is out of range, which does not depend on the data."""
    for flag, number in (("--replicas", args.replicas), ("--microbatches", args.microbatches)):
        if number is not None and number < 1:
            raise UserError(f"{flag} must be at least 1, got {number}")
    if not 0 <= args.seed < 2**63:
        raise UserError(f"--seed must be from 0 to 2**63 - 1, got {args.seed}")


def topology_of(args: argparse.Namespace, table: CostTable, layers: Mapping[str, int] | None = None) -> Topology:
    """Return the topology that the arguments ask for. Raises UserError.

    layers: number of layers of the model's units, if known, which limits their stages; --layers takes precedence.
    `with_fastest_stages` improves on stages that the arguments do not give by unit.
    """
    check_numbers(args)
    stages = _stages_of(args, table, most_stages(args, layers))
    _check_layers(stages, args.chunks, _layers(args, layers))
    return Topology(replicas=args.replicas, microbatches=args.microbatches or DEFAULT_MICROBATCHES, stages=stages)


def execution_of(args: argparse.Namespace, topology: Topology, table: CostTable) -> Execution:
    """Return how the pipelines run, as the arguments ask for: schedule, backward, links and memory limit. Raises UserError."""
    from headrace.reorder_service.planning.execution import Execution
    from headrace.reorder_service.planning.stratification_options import Stratification

    frozen = option_values.parse_units("--frozen", args.frozen, topology.stages)
    _check_execution(args)
    if args.bandwidth < math.inf and table.transfer_bytes is None:
        raise UserError(f"--bandwidth needs to know what is sent: give {table.name} a bytes_<unit> column per unit")
    execution = Execution(
        schedule=args.schedule,
        chunks=args.chunks,
        in_flight=args.in_flight,
        split_backward=not args.whole_backward,
        backward_factors=_backward_factors(args, topology.stages, table),
        weight_gradient_factors={
            unit: weight_factor(frozen=unit in frozen, times=table.backward.get(unit, BackwardTimes()))
            for unit in topology.stages
        },
        stage_loads=_stage_loads(args, topology),
        exchange_s=_exchange(args, topology),
        latency_s=args.latency,
        bytes_per_s=args.bandwidth,
        memory_limit=args.memory_limit,
        may_cross_replicas=args.crossing,
        unit_replicas=(own := _unit_replicas(args, topology)),
        sharing=sharing_of(args, topology, own),
        stratification=Stratification(coarse_quantile=args.coarse_quantile),
        post_balancing=orchmllm_option.post_balancing_of(args.orchmllm, topology.stages),
    )
    fixed = table.microbatch_s(execution.backward_factors)
    return dataclasses.replace(
        execution, microbatch_s={unit: execution.by_kind(unit, *seconds) for unit, seconds in fixed.items()}
    )


def problem_of(args: argparse.Namespace, table: CostTable, strategy: str = "auto") -> Problem:
    """Return the global batch that the arguments take from the cost table, on the pipelines they describe. Raises UserError.

    strategy: the one for which `with_fastest_stages` divides the stages. Prints a hint on standard error if there are fewer packs
    than microbatches.
    """
    if args.global_batch is not None and not 1 <= args.global_batch <= len(table.sample_ids):
        raise UserError(
            f"--global-batch must be from 1 to the {len(table.sample_ids)} rows of {table.name}, got {args.global_batch}"
        )
    table = table.take(slice(args.global_batch))
    if args.coefficients is not None:
        table = _with_measured(args.coefficients, table)
    topology = topology_of(args, table)
    problem = Problem.of(table, topology, execution_of(args, topology, table), seed=args.seed, pack_tokens=args.pack_tokens)
    [problem] = with_fastest_stages(args, [problem], strategy)
    if problem.hint_on_empty_microbatches:
        print(problem.hint_on_empty_microbatches, file=sys.stderr)
    return problem


def with_fastest_stages(
    args: argparse.Namespace, problems: Sequence[Problem], strategy: str = "auto", layers: Mapping[str, int] | None = None
) -> list[Problem]:
    """Return the global batches on as many stages, divided so that the strategy's step for the first batch is the shortest.

    They stay as they are if the arguments give the stages by unit, or if units share ranks, of which each needs as many as the
    LLM. layers: as for `topology_of`.
    """
    from headrace.reorder_service.planning.search.stage_allocation import fastest_stages
    from headrace.reorder_service.planning.strategies import run_strategy

    batch = problems[0].batch
    if _gives_stages(args) or batch.execution.sharing is not None:
        return list(problems)
    most = most_stages(args, layers)
    stages = fastest_stages(batch, lambda batch: run_strategy(strategy, batch)[1], most)
    return [problem.with_topology(dataclasses.replace(batch.topology, stages=stages)) for problem in problems]


def most_stages(args: argparse.Namespace, layers: Mapping[str, int] | None) -> dict[str, int]:
    """Return the most stages that the units can have whose layers are known. layers: as for `topology_of`. Raises UserError."""
    return {unit: number // max(1, args.chunks) for unit, number in _layers(args, layers).items()}


def check_strategies(names: Iterable[str]) -> list[str]:
    """Return the given strategies, each once, with `all` replaced by every strategy. Raises UserError for an unknown name."""
    from headrace.reorder_service.planning import STRATEGIES

    wanted = list(dict.fromkeys(name for given in names for name in (STRATEGIES if given == "all" else [given])))
    for name in wanted:
        if name not in (*STRATEGIES, *BASELINE_STRATEGIES):
            raise UserError(f"no strategy {name!r}; there are {', '.join((*STRATEGIES, *BASELINE_STRATEGIES))}")
    return wanted


def _layers(args: argparse.Namespace, layers: Mapping[str, int] | None) -> dict[str, int]:
    return dict(layers or {}) | (option_values.parse_counts("--layers", args.layers) if args.layers else {})


def _gives_stages(args: argparse.Namespace) -> bool:
    """Return whether the arguments give the stages by unit."""
    return args.stages is not None or any(getattr(args, f"{unit}_stages") is not None for unit in _UNIT_FLAGS)


def _unit_replicas(args: argparse.Namespace, topology: Topology) -> dict[str, int]:
    """Return the number of replicas of the units that have another number than the LLM. Raises UserError."""
    given = option_values.parse_counts("--dp", args.dp) if args.dp else {}
    option_values.parse_units("--dp", ",".join(given), topology.stages)
    if LLM in given:
        raise UserError(f"--replicas says how many {LLM!r} has, so --dp must not name it: take {LLM}={given[LLM]} away")
    return {unit: number for unit, number in given.items() if number != topology.replicas}


def _stage_loads(args: argparse.Namespace, topology: Topology) -> dict[str, list[list[float]]]:
    """Return the time of each stage over an even share, for every kind of action, by named unit. Raises UserError."""
    if args.stage_loads and not _gives_stages(args):
        raise UserError("--stage-loads needs to know the stages: give them by unit, with --stages")
    loads = {}
    for unit, times in option_values.parse_times("--stage-loads", args.stage_loads, topology.stages).items():
        if len(times) != topology.stages[unit]:
            raise UserError(f"--stage-loads gives {unit!r} {len(times)} times, but it has {topology.stages[unit]} stages")
        if not sum(times):
            raise UserError(f"--stage-loads gives {unit!r} no time at all: give one of its stages some")
        loads[unit] = [[time * len(times) / sum(times)] * len(Kind) for time in times]
    return loads


def _exchange(args: argparse.Namespace, topology: Topology) -> dict[str, tuple[float, float]]:
    """Return the times before and after the microbatches of the units that are named. Raises UserError."""
    exchange = {}
    for unit, times in option_values.parse_times("--exchange", args.exchange, topology.stages).items():
        if len(times) != 2:
            raise UserError(f"--exchange gives {unit!r} {len(times)} times, and takes two: before and after its microbatches")
        exchange[unit] = times[0], times[1]
    return exchange


def _backward_factors(args: argparse.Namespace, units: Collection[str], table: CostTable) -> dict[str, float]:
    frozen = option_values.parse_units("--frozen", args.frozen, units)
    checkpointing = option_values.parse_units("--checkpointing", args.checkpointing, units)
    measured = {unit: times for unit, times in table.backward.items() if unit in units}
    return backward_factors(units, frozen=frozen, checkpointing=checkpointing, measured=measured)


def _with_measured(path: Path, table: CostTable) -> CostTable:
    """Return the table with measured costs of its model. Raises UserError for a file that lacks one of its units."""
    from headrace.cli.costs.dataset_costs import read_coefficients

    table = dataclasses.replace(table, measured=read_coefficients(path))
    if lacking := [unit for unit in table.units if unit not in table.backward]:
        raise UserError(f"{path} has no times of unit {lacking[0]!r}, but {table.name} has {', '.join(table.units)}")
    return table


def _stages_of(args: argparse.Namespace, table: CostTable, most: Mapping[str, int]) -> dict[str, int]:
    """Return the number of stages of each unit that the arguments ask for, by default such that the heaviest is the lightest.

    most: the most stages that a unit can have, if its layers are known. Raises UserError.
    """
    from headrace.reorder_service.planning.search.stage_allocation import level_stages

    totals = table.totals()
    by_flag = {unit: getattr(args, f"{unit}_stages") for unit in _UNIT_FLAGS}
    by_flag = {unit: count for unit, count in by_flag.items() if count is not None}
    ways = [args.stages is not None, bool(by_flag), args.num_stages is not None]
    if sum(ways) > 1:
        raise UserError("give --stages, or --encoder-stages and --llm-stages, or --num-stages, not several of them")
    if LLM not in totals:
        raise UserError(f"{table.name} has no unit {LLM!r} (it has {', '.join(totals)}); every plan has one, so add cost_{LLM}")
    if by_flag:
        _check_flags(by_flag, table)
        stages = by_flag
    elif args.stages is not None:
        stages = option_values.parse_counts("--stages", args.stages)
    else:
        room = sum(max(1, most.get(unit, DEFAULT_STAGES)) for unit in totals)
        num_stages = min(DEFAULT_STAGES, room) if args.num_stages is None else args.num_stages
        try:
            stages = level_stages(totals, num_stages, backward_factors=_backward_factors(args, totals, table), most=most)
        except ValueError as err:
            raise UserError(f"--num-stages {err}") from err
    if missing := [unit for unit in stages if unit not in totals]:
        raise UserError(f"{table.name} lacks cost_{missing[0]}; it has {', '.join(f'cost_{unit}' for unit in totals)}")
    if left := [unit for unit in totals if unit not in stages]:
        raise UserError(f"the stages leave out {', '.join(left)} of {table.name}; add it, or drop its cost_{left[0]}")
    return {unit: stages[unit] for unit in totals}


def _check_flags(by_flag: Mapping[str, int], table: CostTable) -> None:
    others = [unit for unit in table.units if unit not in _UNIT_FLAGS]
    if others:
        example = ",".join(f"{unit}=1" for unit in table.units)
        raise UserError(f"{table.name} has {', '.join(table.units)}, so --encoder-stages is not clear; use --stages {example}")
    for unit in table.units:
        if unit not in by_flag:
            raise UserError(f"{_UNIT_FLAGS[unit]} is missing; {table.name} has cost_{unit}")
    for unit, count in by_flag.items():
        if count < 1:
            raise UserError(f"{_UNIT_FLAGS[unit]} must be at least 1, got {count}")


def _check_layers(stages: Mapping[str, int], chunks: int, layers: Mapping[str, int]) -> None:
    for unit, count in layers.items():
        if unit not in stages:
            raise UserError(f"--layers names {unit!r}, which is no unit of the pipeline ({', '.join(stages)})")
        parts = stages[unit] * max(1, chunks)
        if parts > count:
            raise UserError(f"unit {unit!r} has {count} layers, too few for {parts} stages or chunks; give it fewer")


def _check_execution(args: argparse.Namespace) -> None:
    """Raise UserError, in the words of the command line, for arguments that `Execution` would refuse."""
    if args.schedule not in SCHEDULES:
        raise UserError(f"no schedule {args.schedule!r}; there are {', '.join(SCHEDULES)}")
    for flag, number, schedule, none in (
        ("--chunks", args.chunks, "interleaved", 1),
        ("--in-flight", args.in_flight, "eager", None),
    ):
        if number != none and number < 1:
            raise UserError(f"{flag} must be at least 1, got {number}")
        if number != none and args.schedule != schedule:
            raise UserError(f"{flag} {number} needs --schedule {schedule}, got {args.schedule}")
    if not 0 <= args.coarse_quantile <= 1:
        raise UserError(f"--coarse-quantile must be from 0 to 1, got {args.coarse_quantile}")
    if not 0 <= args.latency < math.inf:
        raise UserError(f"--latency must be finite and not negative, got {args.latency}")
    for flag, amount in (("--bandwidth", args.bandwidth), ("--memory-limit", args.memory_limit)):
        if not amount > 0:
            raise UserError(f"{flag} must be positive, got {amount}")
