"""`headrace doctor`: examine an installation and a running stack, and say in words what is wrong and what to do about it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.cli.endpoint import DEFAULT_ENDPOINT, add_endpoint

if TYPE_CHECKING:
    from headrace.cli.doctor.diagnosis import Diagnosis, Say

INSTALLATION, STACK = "installation", "stack"
_EPILOG = """
exit codes: 0 nothing is at fault, though there may be warnings, 1 something is, 2 an argument is wrong.

examples:
  headrace doctor
  headrace doctor --endpoint 10.0.0.1:7070 --tls papers/client
  headrace doctor --only installation --format json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace doctor`."""
    parser.epilog = _EPILOG
    add_endpoint(parser, note=" of the stack to examine too", otherwise=None, without="the installation alone")
    parser.add_argument(
        "--only",
        choices=(INSTALLATION, STACK),
        help=f"leave the other out; the stack is that at {DEFAULT_ENDPOINT} where none is named (default: both)",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of what is printed (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Make all checks, print what they found, and return 1 if anything is at fault. Raises EndpointError for a malformed one."""
    from rich.console import Console

    from headrace.cli.doctor.diagnosis import State, worst
    from headrace.cli.doctor.doctor_table import document, picture

    parts: dict[str, list[Diagnosis]] = {}
    with _progress() as say:
        if args.only != STACK:
            from headrace.cli.doctor.installation import examine_installation

            parts[INSTALLATION] = examine_installation(say)
        if args.only == STACK or (args.endpoint and args.only is None):
            from headrace.cli.doctor.stack import examine_stack

            parts[STACK] = examine_stack(args.endpoint or DEFAULT_ENDPOINT, say)
    if args.format == "json":
        print(json.dumps(document(parts), ensure_ascii=False))
    else:
        Console().print(picture(parts))
    return 1 if worst(one for found in parts.values() for one in found) is State.FAULT else 0


@contextmanager
def _progress() -> Iterator[Say]:
    """Show on a terminal, on standard error, which check is being made during the block."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as status:
        yield lambda check: status.update(f"examining {check} ...")
