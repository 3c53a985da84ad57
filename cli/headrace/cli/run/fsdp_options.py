"""The options of `headrace train` for FSDP ranks, and what becomes of them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from headrace.errors import UserError
from headrace.execution_spec import FSDP

if TYPE_CHECKING:
    from headrace.spec import JobSpec


def add_fsdp_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of FSDP ranks to those of `headrace train`."""
    group = parser.add_argument_group("FSDP ranks, which have all units each (under torchrun; docs/fsdp.md)")
    group.add_argument(
        "--fsdp",
        action="store_true",
        help="train a job that says `execution: {trainer: fsdp}`, for which it is the default; refused for any other job",
    )
    group.add_argument(
        "--shard-ranks",
        type=int,
        metavar="N",
        help="cut weights over groups of so many ranks, and replicate them between groups (default: over all ranks)",
    )


def refuse_fsdp_options(args: argparse.Namespace) -> None:
    """Raise UserError for options that exclude each other."""
    if args.fsdp and args.nodes is not None:
        raise UserError("--fsdp and --nodes exclude each other: nodes form pipelines")


def trains_fsdp(args: argparse.Namespace, spec: JobSpec) -> bool:
    """Return whether the job is trained on FSDP ranks. Raises UserError where the options are for others, or for none."""
    of_job = spec.execution.trainer == FSDP
    if args.nodes is not None and of_job:
        raise UserError(f"job {spec.name!r} is for FSDP ranks (trainer: fsdp), and --nodes form pipelines: leave it out")
    if args.fsdp and not of_job:
        planned = f"trainer: {spec.execution.trainer}" if spec.execution.trainer else "no trainer"
        raise UserError(
            f"job {spec.name!r} says {planned} in its execution, and --fsdp is for jobs with execution: {{trainer: fsdp}}: "
            "submit it so under a name of its own, or leave out --fsdp"
        )
    if args.shard_ranks is not None and not of_job:
        raise UserError("--shard-ranks goes with FSDP ranks: set execution: {trainer: fsdp} in the job")
    return of_job


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return what a topology file, or the options, say of the model and its training. Raises SpecError and UserError."""
    from headrace.spec import read_yaml
    from headrace.trainer.optimizer_spec import load_optimizer_yaml

    settings: dict[str, Any] = {}
    if args.topology is not None:
        document = read_yaml(args.topology, "topology")
        settings = dict(document) if isinstance(document, dict) else {}
        if wrong := sorted(set(settings) - {"model", "optimizer", "dropout"}):
            raise UserError(
                f"{args.topology} has {', '.join(wrong)}, but FSDP ranks have all units, of which the job's execution says the "
                "rest: keep model, optimizer and dropout in it alone"
            )
    if args.optimizer is not None:
        settings["optimizer"] = load_optimizer_yaml(args.optimizer)
    if args.dropout is not None:
        settings["dropout"] = args.dropout
    return settings
