"""`headrace top`: a live view of a running service, and what holds its jobs up."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

from headrace.cli.endpoint import add_endpoint

if TYPE_CHECKING:
    from rich.console import Console

    from headrace.jobs_client import JobsClient
    from headrace.rates import Looks

_EPILOG = """\
examples:
  headrace top
  headrace top my-job --endpoint 10.0.0.1:7070
  headrace top --once --format json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace top`."""
    parser.epilog = _EPILOG
    parser.add_argument("job", nargs="?", metavar="JOB", help="name of a job (default: every job)")
    add_endpoint(parser)
    parser.add_argument(
        "--once",
        action="store_true",
        help="look twice, print the rates in between, and end; a table is always printed so where the output is no terminal",
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds between looks; with --once, take more than a step does (default: %(default)s)",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--format",
        choices=("table", "json"),
        default="table",
        help="of what is printed; json is printed once (default: %(default)s)",
    )
    output.add_argument(
        "--plain",
        action="store_true",
        help="for logs and pipes: at every look, or a single time with --once, print a line for each job, rank, node and "
        "preprocessor, such as `preprocessor p1 ready slots=4 busy=3 late=0 kept=12 store=5%% rate=120.0/s`, without any "
        "control characters",
    )


def run(args: argparse.Namespace) -> int:
    """Show the view until Ctrl-C, or once.

    Raises EndpointError if no service answers at the start, NotFoundError if it has no such job.
    """
    from rich.console import Console

    from headrace.errors import UserError
    from headrace.jobs_client import JobsClient

    if not args.interval > 0:
        raise UserError(f"--interval must be above 0 seconds, got {args.interval:g}")
    console = Console()
    with JobsClient(args.endpoint) as client:
        watch = Watch(client, args.job)
        if args.plain:
            _plain(watch, args.interval, once=args.once)
        elif args.format == "table" and console.is_terminal and not args.once:
            _live(watch, args.interval, console)
        else:
            _once(watch, args.interval, args.format, console)
    return 0


class Watch:
    """The latest looks at all jobs of a service, or at one of them."""

    def __init__(self, client: JobsClient, job: str | None) -> None:
        self.endpoint = client.endpoint
        self._client = client
        self._job = job
        self._looks: dict[str, Looks] = {}

    def look(self) -> None:
        """Look at the jobs once more.

        Raises UnavailableError if the service does not answer, NotFoundError if it has no such job.
        """
        from headrace.cli.watch.job import LISTED_FINISHED
        from headrace.rates import Look, Looks

        statuses = list(self._client.jobs(LISTED_FINISHED)) if self._job is None else [self._client.show(self._job)]
        statuses = [status for status in statuses if status.spec_json]  # jobs set aside and those over for long have none
        now_s = time.monotonic()
        looks = {status.job: self._looks.get(status.job, Looks()) for status in statuses}
        for status in statuses:
            looks[status.job].add(Look(at_s=now_s, status=status))
        self._looks = looks

    def lines(self) -> list[str]:
        """Return one line for each job, rank, node and preprocessor (headrace.cli.watch.status_lines) from the looks so far."""
        from headrace.cli.watch.status_lines import status_lines

        return list(status_lines([looks.held for looks in self._looks.values()]))

    def figures(self) -> dict[str, Any]:
        """Return the figures (headrace.cli.watch.top_figures) of the looks so far."""
        from headrace.cli.watch.top_figures import figures

        return figures([looks.held for looks in self._looks.values()])


def _once(watch: Watch, interval_s: float, output: str, console: Console) -> None:
    from headrace.cli.watch.top_table import picture

    watch.look()
    time.sleep(interval_s)
    watch.look()
    figures = watch.figures()
    if output == "json":
        print(json.dumps(figures, ensure_ascii=False))
    else:
        console.print(picture(figures, width=console.width))


def _plain(watch: Watch, interval_s: float, *, once: bool) -> None:
    """Print the lines at every look until Ctrl-C, from the second look on since rates need two, or once.

    Each look begins with a line on the service, which says so while it does not answer.
    """
    from headrace.errors import UnavailableError

    watch.look()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(interval_s)
            try:
                watch.look()
                lines = watch.lines()
            except UnavailableError:
                if once:
                    raise
                lines = [f"service {watch.endpoint} away: not connected, trying again"]
            print("\n".join(lines), flush=True)
            if once:
                return


def _live(watch: Watch, interval_s: float, console: Console) -> None:
    """Show the view on the alternate screen until Ctrl-C, and leave its last state on the ordinary one."""
    from rich.live import Live

    from headrace.cli.watch.top_table import picture
    from headrace.errors import UnavailableError

    watch.look()
    seen_s, trouble = time.monotonic(), ""
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                width, height = console.size
                live.update(picture(watch.figures(), width=width, height=height, trouble=trouble), refresh=True)
                time.sleep(interval_s)
                try:
                    watch.look()
                    seen_s, trouble = time.monotonic(), ""
                except UnavailableError:
                    age = f"what you see is {time.monotonic() - seen_s:.0f} s old"
                    trouble = f"{watch.endpoint}: not connected, trying again; {age}"
    except KeyboardInterrupt:
        console.print(picture(watch.figures(), width=console.width))
