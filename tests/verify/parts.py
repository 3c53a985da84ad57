"""The parts of what is compared, each with its cases and the processes that run them."""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tests.verify.cases import CONTEXT_DEGREES, DEGREES, MOST_PROCESSES, Case, every_case
from tests.verify.comparison import differences
from tests.verify.context_comparison import context_differences, every_context_case
from tests.verify.context_processes import context_processes
from tests.verify.covering import covering_cases
from tests.verify.fsdp_cases import every_fsdp_case
from tests.verify.fsdp_comparison import fsdp_differences
from tests.verify.fsdp_processes import fsdp_processes
from tests.verify.processes import TRANSPORTS, Processes

STRENGTH = 3
STRENGTH_OF_CONTEXT = 2
"""Of pipelines whose ranks share sequences, which differ from the others in the LLM's attention and in what comes to it."""


@dataclass(frozen=True, slots=True)
class Part:
    """What is compared of one kind of trainer."""

    cases: Callable[[Namespace], Sequence[Any]]
    """Those that the options of `python -m tests.verify` ask for; what is printed of each is its str()."""
    start: Callable[[], Processes]
    differences: Callable[[Processes, Any], list[str]]
    """What a case computes otherwise than one process, in words."""


@dataclass(frozen=True, slots=True)
class Carried:
    """A pipeline's case, and what carries its messages, one after the other."""

    case: Case
    transports: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.case}, {' and '.join(self.transports)}"


def _drawn(cases: Sequence[Any], args: Namespace) -> Sequence[Any]:
    cases = [case for case in cases if args.only in str(case)]
    return cases if args.cases is None else random.Random(args.seed).sample(cases, min(args.cases, len(cases)))


def _of_pipelines(strength: int, degrees: Collection[str]) -> Part:
    """Those that cover every `strength` choices, with these degrees, or the draw from all of these degrees."""

    def carried(args: Namespace) -> Sequence[Carried]:
        transports = (args.transport,) if args.transport else tuple(TRANSPORTS)
        cases = covering_cases(strength, degrees) if args.cases is None else list(every_case(degrees))
        return [Carried(case, transports) for case in _drawn(cases, args)]

    return Part(
        carried,
        lambda: Processes(MOST_PROCESSES),
        lambda processes, carried: differences(processes, carried.case, transports=carried.transports),
    )


PARTS = {
    "pipeline": _of_pipelines(STRENGTH, DEGREES),
    "pipeline-cp": _of_pipelines(STRENGTH_OF_CONTEXT, CONTEXT_DEGREES),
    "fsdp": Part(lambda args: _drawn(every_fsdp_case(), args), fsdp_processes, fsdp_differences),
    "context": Part(lambda args: _drawn(every_context_case(), args), context_processes, context_differences),
}
"""By name, in the order in which they run."""
