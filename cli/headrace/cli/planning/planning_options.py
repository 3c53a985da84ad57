"""The arguments that `plan`, `simulate` and `compare` share, and what they stand for: a pipeline and how it runs."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.backward import backward_factors, weight_factor
from headrace.errors import UserError
from headrace.plan import GENERATOR, LLM, StepPlan, Topology
from headrace.schedule import SCHEDULES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.cli.costs.cost_table import CostTable
    from headrace.reorder_service.planning.batch import Batch
    from headrace.reorder_service.planning.execution import Execution

STRATEGY_NAMES = "random, disttrain, entrain, orchmllm, joint, taper or auto"
DEFAULT_REPLICAS, DEFAULT_MICROBATCHES, DEFAULT_STAGES = 4, 32, 8
_UNIT_FLAGS = {"encoder": "--encoder-stages", LLM: "--llm-stages", GENERATOR: "--generator-stages"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """One global batch on the pipelines that it is planned for."""

    samples: Batch
    batch: Batch
    """What is planned: the samples, or the packs that they are in."""
    packs: NDArray[np.int64] | None
    """(n,) pack of each sample; None: samples are not packed."""
    time_unit: str = ""
    """Of the costs; empty: unknown."""
    memory_unit: str = ""

    @classmethod
    def of(cls, table: CostTable, topology: Topology, execution: Execution, args: argparse.Namespace) -> Problem:
        """Raises UserError with the row and the rule that it breaks."""
        from headrace.reorder_service.planning.batch import make_batch
        from headrace.reorder_service.planning.packing import pack_batch

        units = {"time_unit": table.time_unit, "memory_unit": table.memory_unit if table.memory else table.time_unit}
        if args.pack_tokens is not None:
            _check_lengths(table, args.pack_tokens)
        try:
            samples = make_batch(
                table.sample_ids, table.costs, topology, args.seed,
                execution=execution, memory=table.memory, transfer_bytes=table.transfer_bytes,
            )  # fmt: skip
            if args.pack_tokens is None or table.tokens is None:
                return cls(samples=samples, batch=samples, packs=None, **units)
            batch, packs = pack_batch(samples, table.tokens, args.pack_tokens)
        except ValueError as err:
            raise UserError(f"{table.name}: {err}") from err
        return cls(samples=samples, batch=batch, packs=packs, **units)

    @property
    def size(self) -> str:
        """`512 samples in 93 packs`"""
        packs = "" if self.packs is None else f" in {count(len(self.batch.sample_ids), 'pack')}"
        return f"{count(len(self.samples.sample_ids), 'sample')}{packs}"

    @property
    def planned(self) -> str:
        """What the plan places and its figures count: `samples` or `packs`."""
        return "samples" if self.packs is None else "packs"

    @property
    def empty_places(self) -> str:
        """A hint, where there are fewer packs than microbatches to put them into; else empty."""
        packs, places = len(self.batch.sample_ids), self.batch.num_slots
        if self.packs is None or packs >= places:
            return ""
        return (
            f"{count(packs, 'pack')} cannot fill {count(places, 'microbatch')}: some stay empty; give fewer --microbatches or "
            "--replicas, or a shorter --pack-tokens"
        )

    def memory_in_words(self, amount: float) -> str:
        """`1.25 GiB` where memory is known to be in bytes, else just the number."""
        return f"{amount / 2**30:.3g} GiB" if self.memory_unit == "bytes" else f"{amount:.4g}"

    def of_samples(self, plan: StepPlan) -> StepPlan:
        """A plan of the batch as one of the samples."""
        from headrace.reorder_service.planning.packing import plan_of_samples

        return plan if self.packs is None else plan_of_samples(plan, self.samples, self.packs)


def count(number: int, noun: str) -> str:
    """`1 pack`, `2 packs`, `3 microbatches`"""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def add_table_arguments(parser: argparse.ArgumentParser) -> None:
    """COSTS and which of its rows make the global batch."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "costs", metavar="COSTS", help="cost table: a .parquet or .jsonl file, or - for JSONL on standard input (see below)"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="plan the first N rows (default: all rows are one global batch)")


def add_pipeline_arguments(parser: argparse.ArgumentParser, *, microbatches: str = str(DEFAULT_MICROBATCHES)) -> None:
    """Replicas, microbatches, stages, and how they run. `microbatches` names the default in the help."""
    shape = parser.add_argument_group("pipelines")
    shape.add_argument(
        "--replicas", type=int, default=DEFAULT_REPLICAS, metavar="D", help="data-parallel pipelines (default: %(default)s)"
    )
    shape.add_argument("--microbatches", type=int, metavar="K", help=f"of each replica and step (default: {microbatches})")
    shape.add_argument("--stages", metavar="UNIT=N,...", help="pipeline stages of each unit, like vision=2,audio=1,llm=5")
    shape.add_argument("--encoder-stages", type=int, metavar="P", help="for tables of encoder and llm")
    shape.add_argument("--llm-stages", type=int, metavar="Q", help="together with --encoder-stages")
    shape.add_argument("--generator-stages", type=int, metavar="R", help="for tables that have a generator too")
    shape.add_argument(
        "--num-stages",
        type=int,
        metavar="S",
        help=f"stages in all, dealt out in proportion to the costs (default: {DEFAULT_STAGES})",
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
    shape.add_argument("--seed", type=int, default=0, help="of the strategies that search (default: %(default)s)")

    how = parser.add_argument_group("how they run")
    how.add_argument("--schedule", default="1f1b", metavar="NAME", help=f"{', '.join(SCHEDULES)} (default: %(default)s)")
    how.add_argument("--chunks", type=int, default=1, metavar="V", help="parts of the model on a stage, interleaved (default: 1)")
    how.add_argument("--in-flight", type=int, metavar="N", help="most microbatches a stage holds, eager (default: any)")
    how.add_argument("--whole-backward", action="store_true", help="do not split the backward where samples are deferred")
    how.add_argument("--frozen", default="", metavar="UNIT,...", help="units that are not trained")
    how.add_argument("--checkpointing", default="", metavar="UNIT,...", help="units that run their forward again in the backward")
    how.add_argument("--latency", type=float, default=0.0, metavar="T", help="time of a transfer between stages (default: 0)")
    how.add_argument("--bandwidth", type=float, default=math.inf, metavar="B", help="bytes per unit of time between stages")
    how.add_argument(
        "--memory-limit", type=float, default=math.inf, metavar="M", help="most activations on a stage, in the table's unit"
    )
    how.add_argument(
        "--crossing", action="store_true", help="auto may take plans whose samples change their replica, as no job's auto does"
    )


def check_numbers(args: argparse.Namespace) -> None:
    """Raise UserError for what is wrong whatever the data are."""
    for flag, number in (("--replicas", args.replicas), ("--microbatches", args.microbatches)):
        if number is not None and number < 1:
            raise UserError(f"{flag} must be at least 1, got {number}")
    if not 0 <= args.seed < 2**63:
        raise UserError(f"--seed must be from 0 to 2**63 - 1, got {args.seed}")


def topology_of(args: argparse.Namespace, table: CostTable, layers: Mapping[str, int] | None = None) -> Topology:
    """The pipelines that the arguments ask for. layers: of the model's units, where known. Raises UserError."""
    check_numbers(args)
    layers = dict(layers or {}) | (_counts("--layers", args.layers) if args.layers else {})
    parts = {unit: number // max(1, args.chunks) for unit, number in layers.items()}
    stages = _stages_of(args, table, parts)
    _check_layers(stages, args.chunks, layers)
    return Topology(replicas=args.replicas, microbatches=args.microbatches or DEFAULT_MICROBATCHES, stages=stages)


def execution_of(args: argparse.Namespace, topology: Topology, table: CostTable) -> Execution:
    """How the pipelines run. Raises UserError."""
    from headrace.reorder_service.planning.execution import Execution

    frozen = _units("--frozen", args.frozen, topology)
    checkpointing = _units("--checkpointing", args.checkpointing, topology)
    _check_execution(args)
    if args.bandwidth < math.inf and table.transfer_bytes is None:
        raise UserError(f"--bandwidth needs to know what is sent: give {table.name} a bytes_<unit> column per unit")
    return Execution(
        schedule=args.schedule,
        chunks=args.chunks,
        in_flight=args.in_flight,
        split_backward=not args.whole_backward,
        backward=backward_factors(topology.stages, frozen=frozen, checkpointing=checkpointing),
        weights={unit: weight_factor(frozen=unit in frozen) for unit in topology.stages},
        latency_s=args.latency,
        bytes_per_s=args.bandwidth,
        memory_limit=args.memory_limit,
        crossing=args.crossing,
    )


def problem_of(args: argparse.Namespace, table: CostTable) -> Problem:
    """The global batch of `add_table_arguments` on the pipelines of `add_pipeline_arguments`. Raises UserError."""
    if args.batch is not None and not 1 <= args.batch <= len(table.sample_ids):
        raise UserError(f"--batch must be from 1 to the {len(table.sample_ids)} rows of {table.name}, got {args.batch}")
    table = table.take(slice(args.batch))
    topology = topology_of(args, table)
    problem = Problem.of(table, topology, execution_of(args, topology, table), args)
    if problem.empty_places:
        print(problem.empty_places, file=sys.stderr)
    return problem


def check_strategies(names: Iterable[str]) -> list[str]:
    """The names, `all` replaced by every strategy. Raises UserError for one that is none."""
    from headrace.reorder_service.planning import STRATEGIES

    wanted = list(dict.fromkeys(name for given in names for name in (STRATEGIES if given == "all" else [given])))
    for name in wanted:
        if name not in STRATEGIES:
            raise UserError(f"no strategy {name!r}; there are {', '.join(STRATEGIES)}")
    return wanted


def deal_stages(totals: Mapping[str, float], num_stages: int, most: Mapping[str, int] | None = None) -> dict[str, int]:
    """At least one stage for every unit, and the heaviest stage as light as can be.

    totals: cost by unit. most: stages that a unit can have at most, where there is such a bound. One by one, a stage goes to
    the unit whose stages are the heaviest so far, among those that can have more: since every split with a lighter heaviest
    stage has at least as many stages in that unit, no split is better. Raises UserError.
    """
    if num_stages < len(totals):
        raise UserError(f"--num-stages must be at least 1 per unit ({', '.join(totals)}), got {num_stages}")
    stages = dict.fromkeys(totals, 1)
    for _ in range(num_stages - len(totals)):
        free = [unit for unit in totals if stages[unit] < (most or {}).get(unit, num_stages)]
        if not free:
            raise UserError(
                f"--num-stages {num_stages} is more than the layers of {', '.join(totals)} can be cut into; give fewer"
            )
        stages[max(free, key=lambda unit: totals[unit] / stages[unit])] += 1
    return stages


def _check_lengths(table: CostTable, capacity: int) -> None:
    if table.tokens is None:
        raise UserError(f"--pack-tokens needs to know how long samples are: give {table.name} a column 'tokens'")
    if capacity < 1:
        raise UserError(f"--pack-tokens must be at least 1, got {capacity}")
    wrong = ((table.tokens < 1) | (table.tokens > capacity)).nonzero()[0]
    if wrong.size:
        sample, length = table.sample_ids[wrong[0]], table.tokens[wrong[0]]
        raise UserError(f"{table.name}: sample {sample} has {length} tokens, but --pack-tokens {capacity} packs 1 to {capacity}")


def _stages_of(args: argparse.Namespace, table: CostTable, most: Mapping[str, int]) -> dict[str, int]:
    """most: stages of a unit, where its layers are known."""
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
        stages = _counts("--stages", args.stages)
    else:
        room = sum(max(1, most.get(unit, DEFAULT_STAGES)) for unit in totals)
        stages = deal_stages(totals, min(DEFAULT_STAGES, room) if args.num_stages is None else args.num_stages, most)
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
    """What `Execution` refuses too, in the words of the command line."""
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
    if not 0 <= args.latency < math.inf:
        raise UserError(f"--latency must be finite and not negative, got {args.latency}")
    for flag, amount in (("--bandwidth", args.bandwidth), ("--memory-limit", args.memory_limit)):
        if not amount > 0:
            raise UserError(f"{flag} must be positive, got {amount}")


def _counts(flag: str, text: str) -> dict[str, int]:
    """`vision=2,llm=5` as a dict. Raises UserError."""
    counts: dict[str, int] = {}
    for item in text.split(","):
        unit, _, number = item.strip().partition("=")
        if not unit or not number.isdecimal() or int(number) < 1:
            raise UserError(f"{flag} must look like vision=2,llm=5 with numbers of at least 1, got {item!r}")
        if unit in counts:
            raise UserError(f"{flag} names {unit!r} twice")
        counts[unit] = int(number)
    return counts


def _units(flag: str, text: str, topology: Topology) -> tuple[str, ...]:
    units = tuple(unit.strip() for unit in text.split(",") if unit.strip())
    for unit in units:
        if unit not in topology.stages:
            raise UserError(f"{flag} names {unit!r}, which is no unit of the pipeline ({', '.join(topology.stages)})")
    return units
