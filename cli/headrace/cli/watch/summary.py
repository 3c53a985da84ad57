"""The summary of a job, as one JSON object or one table."""

from __future__ import annotations

import json
import math
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.bottleneck import bottleneck, is_over
from headrace.cli.watch.top_figures import step_times
from headrace.cli.watch.top_table import seconds, span
from headrace.jobs_client import JobsClient, state_name
from headrace.ledger import ledger_sha256
from headrace.printable import printable
from headrace.quarantine import Reason
from headrace.rates import Look
from headrace.v1.jobs_pb2 import JobStatus

MAX_QUARANTINE_ROWS = 12


def summarise(client: JobsClient, job: str) -> dict[str, Any]:
    """Return the summary in its public JSON form, without `picture`.

    Losses are null if no step reported one, step times until one was forecast, `bottleneck` if the job is over. `truncated` and
    `filtered` count samples of committed steps; `quarantined` leaves out what filters have left out.
    """
    status = client.show(job)
    spec = json.loads(status.spec_json)
    samples = status.committed_samples
    return {
        "job": job,
        "state": state_name(status),
        "message": status.message,
        "sources": [source["name"] or source["path"] for source in spec["sources"]],
        "topology": json.loads(status.topology_json) if status.topology_json else spec["topology"],
        "preprocessors": len(status.preprocessors),
        "ranks": len(status.ranks),
        "strategy": spec["strategy"],
        "steps": status.committed_steps,
        "num_steps": status.num_steps,
        "left_s": _left_s(status),
        "samples": samples,
        "samples_per_s": samples / status.step_s if status.step_s else 0.0,
        "first_loss": _number(status.first_loss),
        "last_loss": _number(status.last_loss),
        "data_wait_fraction": status.data_wait_s / status.step_s if status.step_s else 0.0,
        **step_times(status),
        "truncated": sum(source.truncated for source in status.sources),
        "filtered": sum(source.filtered for source in status.sources),
        "quarantined": [
            {"sample": item.name, "reason": str(item.reason), "detail": item.detail}
            for item in client.quarantine(job)
            if item.reason is not Reason.FILTERED
        ],
        "bottleneck": None if is_over(status) else str(bottleneck([Look(at_s=0.0, status=status)])),
        "warning": status.warning or None,
        "ledger_sha256": ledger_sha256(client.ledger(job)),
    }


def print_summary(summary: dict[str, Any], output: str) -> None:
    """Print the summary on standard output, in the format `output` (`json` or `table`)."""
    if output == "json":
        print(json.dumps(summary, ensure_ascii=False))
        return
    console = Console()
    table = Table(title=f"job {summary['job']}: {summary['state']}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    steps = f"{summary['steps']} of {summary['num_steps']}" if summary["num_steps"] else str(summary["steps"])
    table.add_row("steps", steps if summary["left_s"] is None else f"{steps}, {span(summary['left_s'])} left at this rate")
    table.add_row("sources", ", ".join(summary["sources"]))
    topology = summary["topology"]
    stages = ", ".join(f"{unit} {number}" for unit, number in topology["stages"].items())
    table.add_row("planned for", f"{topology['replicas']} x {topology['microbatches']} microbatches, stages: {stages}")
    table.add_row("strategy", summary["strategy"])
    if summary["bottleneck"]:
        table.add_row("connected", f"preprocessors: {summary['preprocessors']}, ranks: {summary['ranks']}")
    if summary["steps"]:
        table.add_row("samples", f"{summary['samples']}, {summary['samples_per_s']:.1f} per second")
        table.add_row("data wait", f"{summary['data_wait_fraction']:.1%} of the trainer's time")
    if summary["forecast_error"] is not None:
        times = f"{seconds(summary['measured_step_s'])}, forecast {seconds(summary['forecast_step_s'])}"
        table.add_row("step", f"{times} ({summary['forecast_error']:+.1%})")
    if summary["last_loss"] is not None:
        table.add_row("loss", f"{_text(summary['first_loss'])} at first, {summary['last_loss']:.3f} at last")
    if summary["bottleneck"]:
        table.add_row("bottleneck", summary["bottleneck"])
    if summary["warning"]:
        table.add_row("warning", summary["warning"])
    for name, what in (("truncated", "cut as too long"), ("filtered", "filtered by size")):
        if summary[name]:
            table.add_row(what, str(summary[name]))
    table.add_row("quarantined", str(len(summary["quarantined"])))
    table.add_row("ledger", summary["ledger_sha256"] if summary["steps"] else "no step is committed yet")
    if summary.get("picture"):
        table.add_row("picture", summary["picture"])
    console.print(table)
    for item in summary["quarantined"][:MAX_QUARANTINE_ROWS]:
        console.print(
            f"  quarantined {printable(item['sample'])}: {item['reason']}, {item['detail']}", markup=False, highlight=False
        )
    more = len(summary["quarantined"]) - MAX_QUARANTINE_ROWS
    if more > 0:
        console.print(f"  and {more} more")


def _left_s(status: JobStatus) -> float | None:
    """Seconds until the last step at the mean pace so far; None if the job is over, or too little is known."""
    if is_over(status) or not (status.num_steps and status.committed_steps and status.step_s):
        return None
    return float((status.num_steps - status.committed_steps) * status.step_s / status.committed_steps)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _text(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
