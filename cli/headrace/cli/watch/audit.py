"""`headrace audit`: prove from a job's ledger that every sample was consumed once, or say what is wrong."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from headrace.cli.endpoint import add_endpoint

if TYPE_CHECKING:
    from headrace.cli.watch.order_lookup import JobOrder
    from headrace.jobs_client import JobsClient
    from headrace.ledger import LedgerEntry
    from headrace.reorder_service.jobs.audit import Check
    from headrace.sample import SampleRef
    from headrace.v1.jobs_pb2 import JobStatus

MAX_SHOWN = 8  # findings of each rule that the table shows
_EPILOG = """\
what must hold, for all steps that are committed:
  steps       they are 0, 1, 2, ..., each once
  places      every step has as many samples of each shard as the global order puts there, less the quarantined ones; the
              order is computed again, from the spec, the rows of the shards and the changes of the mixture
  once        no sample comes twice in one epoch
  whole       in every complete epoch of a shard, consumed and quarantined samples together are its rows, the same in each
  quarantine  no quarantined sample was consumed from then on

The ledger has names, and the order has rows. Which name stands in which row only the shards know: so two samples of one shard
that changed places within an epoch are found with --by-name only, and so is a name that the data set does not have.

exit codes: 0 all of it holds, 1 something is wrong, 2 it cannot be audited.

examples:
  headrace audit my-job
  headrace audit my-job --by-name
  headrace audit my-job --format json | jq '.checks[] | select(.num_findings > 0)'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace audit`."""
    parser.epilog = _EPILOG
    parser.add_argument("job", metavar="JOB", help="name of a job, under way or over")
    parser.add_argument(
        "--by-name", action="store_true", help="also index the shards on this machine, and compare every step name by name"
    )
    add_endpoint(parser)
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of what is printed (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Audit a job; return 1 if something is wrong, else 0."""
    from headrace.cli.watch.order_lookup import job_order
    from headrace.errors import ConflictError
    from headrace.jobs_client import JobsClient, state_name

    with JobsClient(args.endpoint) as client:
        status = client.show(args.job)  # first, so that all it counts is in the quarantine and the ledger that are read later
        order = job_order(client, status)
        with _names(order) if args.by_name else contextlib.nullcontext() as name_of:
            checks = _audit(client, status, order, name_of)
        if client.show(args.job).generation != status.generation:
            raise ConflictError(f"job {args.job!r} was reset or planned anew while it was audited; audit it again")
    report = _report(args.job, state_name(status), status.committed_steps, checks)
    _print(report, args.format)
    return 0 if report["ok"] else 1


def _audit(client: JobsClient, status: JobStatus, order: JobOrder, name_of: Callable[[SampleRef], str] | None) -> list[Check]:
    from headrace.reorder_service.jobs.audit import audit

    num_steps = status.committed_steps
    return audit(
        _progress(islice(client.ledger(status.job), num_steps), num_steps),
        num_steps=num_steps,
        refs=order.batches.refs,
        shards=[(shard.name, rows) for shard, rows in zip(order.manifest.shards, order.manifest.num_rows.tolist(), strict=True)],
        quarantined=client.quarantine(status.job),
        name_of=name_of,
    )


@contextlib.contextmanager
def _names(order: JobOrder) -> Iterator[Callable[[SampleRef], str]]:
    """Yield a function that returns the name of a sample, which it reads from the shards on this machine."""
    from headrace.preprocessor.job_work import JobWork

    job = JobWork(order.spec.name, order.spec)
    job.shards = order.manifest.shards
    try:
        yield job.sample_name
    finally:
        job.close()


def _progress(entries: Iterable[LedgerEntry], num_steps: int) -> Iterator[LedgerEntry]:
    """Show on standard error how many of `entries` are consumed."""
    from headrace.cli.progress_bar import ProgressBar

    with ProgressBar() as bar:
        bar.begin("steps audited", num_steps)
        for entry in entries:
            yield entry
            bar.advance()


def _report(job: str, state: str, num_steps: int, checks: list[Check]) -> dict[str, Any]:
    """Return the report of an audit in its public JSON form."""
    return {
        "job": job,
        "state": state,
        "steps": num_steps,
        "ok": not any(check.num_findings for check in checks),
        "checks": [
            {
                "rule": str(check.rule),
                "compared": check.compared,
                "num_findings": check.num_findings,
                "findings": [
                    {"step": finding.step, "sample": finding.sample or None, "sentence": finding.sentence}
                    for finding in check.findings
                ],
            }
            for check in checks
        ],
    }


def _print(report: dict[str, Any], output: str) -> None:
    """Print the report on standard output, in the format `output` (`json` or `table`)."""
    if output == "json":
        print(json.dumps(report, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    from headrace.printable import printable

    verdict = "every sample once" if report["ok"] else "something is wrong"
    table = Table("rule", "", "compared", title=f"job {report['job']} ({report['state']}): {verdict}", title_justify="left")
    for check in report["checks"]:
        table.add_row(check["rule"], "[red]no[/red]" if check["num_findings"] else "[green]yes[/green]", check["compared"])
    console = Console()
    console.print(table)
    for check in report["checks"]:
        for finding in check["findings"][:MAX_SHOWN]:
            console.print(f"{check['rule']}: {printable(finding['sentence'])}", markup=False, highlight=False, soft_wrap=True)
        more = check["num_findings"] - MAX_SHOWN
        if more > 0:
            console.print(f"{check['rule']}: and {more:,} more", markup=False, highlight=False)
