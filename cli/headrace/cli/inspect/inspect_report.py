"""The report of `headrace inspect` on standard output, as JSON or for people."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.cli.inspect.field_table import print_fields

MAX_REFUSED_ROWS = 3  # printed for each reason


def holdings(report: dict[str, Any]) -> str:
    """Return in words how much the data set has, or how much of it was looked at."""
    samples = count(report["samples"], "sample")
    if report["not_probed"]:
        samples += f" (of {report['not_probed'] + report['samples']:,})"
    shards = [count(report["shards"], "shard"), samples]
    if report["not_probed"] is None:
        read = f"{report['bytes_read'] / 1e6:,.1f} MB read"
        shards = [f"{samples} of {report['shards_read']:,} of {count(report['shards'], 'shard')}", read]
    return ", ".join([*shards, count(report["images"], "image"), count(report["recordings"], "recording")])


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def print_report(report: dict[str, Any], output: str) -> None:
    """Print the report on standard output in the format `output`, `json` or `table`."""
    if output == "json":
        print(json.dumps(report, ensure_ascii=False))
        return
    console = Console()
    head = Table(title=report["path"], show_header=False, title_justify="left")
    head.add_column(style="bold")
    head.add_column()
    head.add_row("holds", holdings(report))
    head.add_row("samples with", ", ".join(f"{name} {count:,}" for name, count in report["modalities"].items()))
    head.add_row("they become", ", ".join(f"{name} {count:,}" for name, count in report["combinations"].items()) or "none")
    head.add_row("LLM tokens", f"{report['tokens']:,}")
    if report["truncated"]:
        head.add_row("cut as too long", f"{report['truncated']:,}")
    head.add_row("refused", f"{len(report['refused']):,}")
    for name in ("picture", "preview", "costs"):
        if report[name]:
            head.add_row(name, report[name])
    console.print(head)
    if report["histograms"]:
        console.print(_histogram_table(report["histograms"]))
    print_fields(console, report["fields"], report["unfound"])
    _print_refused(console, report)


def _histogram_table(histograms: dict[str, dict[str, float]]) -> Table:
    from headrace.cli.inspect.histogram import PERCENTILES, QUANTITIES

    table = Table("quantity", "counted", box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for name in PERCENTILES:
        table.add_column(name, justify="right")
    for name, row in histograms.items():
        quantity = QUANTITIES[name]
        figures = [f"{row[percentile]:,.1f}" if quantity.unit == "s" else f"{row[percentile]:,}" for percentile in PERCENTILES]
        unit = "" if quantity.unit == "tokens" else f" ({quantity.unit})"
        table.add_row(f"{quantity.title}{unit}", f"{row['count']:,} {quantity.of}", *figures)
    return table


def _print_refused(console: Console, report: dict[str, Any]) -> None:
    """Print the reasons for refusals, the most frequent first, with the first few samples of each."""
    from headrace.printable import printable

    refused, filtered = report["refused"], report["filtered"]
    if (refused or filtered) and not report["samples"]:
        what = "refused or filtered out" if filtered else "refused"
        console.print(f"every sample is {what}: a job on this data would fail", style="bold")
    if refused and report["bytes_read"] is not None:
        console.print(
            "only the beginnings of archives were read: if the members of a sample do not lie together in them, some are missing "
            "here that are found without --limit",
            soft_wrap=True,
        )
    for reason, count in Counter(item["reason"] for item in (*refused, *filtered)).most_common():
        how = "filtered out, shards and single samples" if reason == "filtered" else f"refused as {reason}"
        console.print(f"{how}: {count:,}", markup=False, highlight=False)
        some = [item for item in (*refused, *filtered) if item["reason"] == reason][:MAX_REFUSED_ROWS]
        for item in some:
            console.print(f"  {printable(item['sample'])}: {item['detail']}", markup=False, highlight=False, soft_wrap=True)
        if count > len(some):
            console.print(f"  and {count - len(some):,} more")
