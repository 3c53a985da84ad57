"""`headrace scale`: run as many preprocessors as the trainers of a service can take from."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import subprocess
from functools import partial

from headrace.cli.endpoint import add_endpoint
from headrace.cli.scale.scaling_loop import Limits, add_limits, follow, say

COUNT = "{count}"
COMPOSE = "docker compose up --detach --no-recreate --no-deps --scale preprocessor={count} preprocessor"
COMMAND_S = 600.0  # the longest that a command may take
_EPILOG = """\
examples:
  headrace scale --once
  headrace scale --compose --max 16
  headrace scale --run 'kubectl scale deployment/headrace-preprocessor --replicas {count}' --max 32
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace scale`."""
    parser.description = (
        "Look at a service's jobs, and start or end preprocessors: more as soon as trainers wait for data that more would bring, "
        "and no more where the trainers are the slowest part; fewer once fewer would have done for the whole --cool-down. "
        "One line for each decision says what it is and why. Without --compose or --run nothing but these lines is done."
    )
    parser.epilog = _EPILOG
    add_endpoint(parser)
    add_limits(parser)
    engine = parser.add_mutually_exclusive_group()
    engine.add_argument(
        "--compose", action="store_true", help="scale the service `preprocessor` of the compose project in this directory"
    )
    engine.add_argument(
        "--run",
        dest="engine",
        metavar="COMMAND",
        help="run this command whenever the number is to change, with {count} replaced by the number; no shell reads it",
    )
    parser.add_argument("--once", action="store_true", help="make one decision, carry it out and end")


def run(args: argparse.Namespace) -> int:
    """Make one decision after the other until Ctrl-C, or one. While no service answers, the number stays as it is.

    Raises UserError for limits that exclude each other or a command without {count}, EndpointError if no service answers at the
    start, and with --once UnavailableError if it goes away.
    """
    from headrace.jobs_client import JobsClient

    limits, command = Limits.of(args), _command(args)
    with JobsClient(args.endpoint) as client, contextlib.suppress(KeyboardInterrupt):
        follow(client, limits, partial(_carry_out, command), once=args.once)
    return 0


def _command(args: argparse.Namespace) -> list[str]:
    """Return the words of the command that changes the number, none where nothing is done. Raises UserError."""
    from headrace.errors import UserError

    text = COMPOSE if args.compose else args.engine or ""
    if text and COUNT not in text:
        raise UserError(f"--run has no {COUNT}, for which the number is put in: {text}")
    try:
        return shlex.split(text)
    except ValueError as err:
        raise UserError(f"--run cannot be read ({err}): {text}") from err


def _carry_out(command: list[str], wanted: int) -> None:
    """Run the command, if there is one."""
    if not command:
        return
    words = [word.replace(COUNT, str(wanted)) for word in command]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        say("failed", command=shlex.join(words), why=str(err))
        return
    if done.returncode:
        last = (done.stderr or done.stdout).strip().rpartition("\n")[2]
        say("failed", command=shlex.join(words), status=done.returncode, why=last)
