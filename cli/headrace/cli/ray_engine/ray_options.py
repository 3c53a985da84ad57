"""The options of `headrace preprocessor --engine ray`, and what is left of the command line for each preprocessor."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.cli.scale.scaling_loop import Limits, add_limits
from headrace.errors import UserError

CPUS = 1.0
ALONE = ("address", "ray_cpus", "ray_resource", "min", "max", "interval", "cool_down")
"""The arguments that mean nothing without --engine ray."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """Which preprocessors are to run where on which Ray cluster."""

    address: str
    """Of the cluster; empty: the one that runs here."""
    limits: Limits
    cpus: float
    """That Ray sets aside for each preprocessor."""
    resources: Mapping[str, float]
    """Custom resources that each needs."""
    listen: str
    """Empty: a free port of the node's own address."""
    arguments: Sequence[str]
    """Of `headrace` for each, without --listen."""

    def __post_init__(self) -> None:
        if not 0 <= self.cpus < math.inf:
            raise UserError(f"--ray-cpus must be 0 or more, got {self.cpus:g}")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add --engine and what belongs to it."""
    group = parser.add_argument_group("Ray cluster")
    group.add_argument(
        "--engine",
        choices=("ray",),
        help="run preprocessors on a Ray cluster, as many as the trainers take from, instead of one here: for what follows",
    )
    _add_ray_options(group)


def _add_ray_options(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="the Ray cluster, of which this machine is a node (default: $RAY_ADDRESS, or the one here)",
    )
    group.add_argument(
        "--ray-cpus",
        type=float,
        metavar="N",
        help=f"CPUs that Ray sets aside for each (default: --threads, or {CPUS:g}, and then as many threads)",
    )
    group.add_argument(
        "--ray-resource",
        action="append",
        metavar="NAME=N",
        help="a custom resource of Ray that each needs, for nodes that have it only; several times for several",
    )
    add_limits(group)


def ray_settings(args: argparse.Namespace) -> RaySettings | None:
    """Return the settings of --engine ray; None without it. Raises UserError for its options without it, or with bad values."""
    if args.engine is None:
        for name in ALONE:
            if getattr(args, name) is not None:
                raise UserError(
                    f"--{name.replace('_', '-')} is for --engine ray, which is not given: add it, or leave the option away"
                )
        return None
    if args.advertise:
        raise UserError(
            "--advertise names one address, and --engine ray runs preprocessors on several: each tells its node's own"
        )
    own, arguments = _own_options(args.arguments)
    cpus = args.ray_cpus if args.ray_cpus is not None else float(own.threads or CPUS)
    threads = own.threads if own.threads is not None else max(1, math.ceil(cpus))
    return RaySettings(
        address=args.address or "",
        limits=Limits.of(args),
        cpus=cpus,
        resources=dict(map(_resource, args.ray_resource or ())),
        listen=own.listen or "",
        arguments=(*arguments, "--threads", str(threads)),
    )


def free_port_of(node: str) -> str:
    """Return the endpoint of any free port at a node's address."""
    return f"[{node}]:0" if ":" in node else f"{node}:0"


def _own_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, Sequence[str]]:
    """Return what the driver reads of a command line, and the others, which each preprocessor reads."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--engine")
    parser.add_argument("--listen")
    parser.add_argument("--threads", type=int)
    _add_ray_options(parser)
    return parser.parse_known_args(list(arguments))


def _resource(text: str) -> tuple[str, float]:
    name, _, amount = text.partition("=")
    try:
        number = float(amount or "1")
    except ValueError:
        number = math.nan
    if not name or not 0 < number < math.inf:
        raise UserError(f"--ray-resource is NAME=N with a number above 0, got {text!r}")
    return name, number
