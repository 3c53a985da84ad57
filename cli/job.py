"""`headrace job`: submit, list, show, cancel."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from cli.endpoint import add_endpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    submit = actions.add_parser("submit", help="start the job of a YAML spec; submitting the same spec again changes nothing")
    submit.add_argument("spec", type=Path, metavar="SPEC.yaml")
    show = actions.add_parser("show", help="state, progress, rates and quarantine of one job")
    show.add_argument("job")
    actions.add_parser("list", help="every job that the service knows")
    cancel = actions.add_parser("cancel", help="end a job for good; its ledger stays")
    cancel.add_argument("job")
    for action in actions.choices.values():
        add_endpoint(action)
        action.add_argument("--format", choices=("table", "json"), default="table", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Do what `args.action` says."""
    from cli.client import JobsClient, state_name
    from cli.summary import print_summary, summarise
    from headrace.spec import load_spec_yaml
    from preprocessor.sources.metadataset import expand

    with JobsClient(args.endpoint) as client:
        match args.action:
            case "submit":
                job = client.submit(expand(load_spec_yaml(args.spec)))
                _print([{"job": job, "state": state_name(client.show(job))}], args.format)
            case "list":
                _print([_row(status, state_name(status)) for status in client.jobs()], args.format)
            case "show":
                print_summary(summarise(client, args.job), args.format)
                status = client.show(args.job)
                if status.message and args.format == "table":
                    print(status.message)
            case "cancel":
                status = client.cancel(args.job)
                _print([_row(status, state_name(status))], args.format)
    return 0


def _row(status: Any, state: str) -> dict[str, Any]:
    return {
        "job": status.job,
        "state": state,
        "committed_steps": status.committed_steps,
        "num_steps": status.num_steps,
        "samples": status.committed_samples,
        "quarantined": status.quarantined_samples,
        "message": status.message,
    }


def _print(rows: list[dict[str, Any]], output: str) -> None:
    if output == "json":
        print(json.dumps({"jobs": rows}, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    if not rows:
        print("no jobs")
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
