"""Draw the figures of `headrace top` as tables. This knows nothing of services, and only the size of the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

OVER = ("done", "failed", "cancelled")
WIDE = 120  # columns from which on there is room for bytes in place of shares
MAX_RECOVERIES = 3
_WARNING_LINES = 3  # that a warning takes in a terminal of 80 columns
MAX_ENDED = 3  # jobs that have ended to list; further ones are counted
PLAIN_ROWS = 10  # of each table, if the height is not limited
MIN_ROWS = 3
_OTHER_LINES, _LINES_PER_JOB = 5, 10  # besides the rows of the preprocessors, and of ranks and sources
_NAME_CHARS = 16


def picture(figures: dict[str, Any], *, width: int, height: int | None = None, trouble: str = "") -> Group:
    """Draw the figures for a terminal of `width` columns and `height` rows; None: unlimited.

    `trouble`: a message to show at the top if the figures are out of date.
    """
    jobs = figures["jobs"]
    shown = [job for job in jobs if job["state"] not in OVER] or jobs[-1:]
    ended = [job for job in jobs if job not in shown]
    max_rows = PLAIN_ROWS if height is None else _rows_that_fit(height, shown, figures["preprocessors"])
    parts: list[RenderableType] = [Text(trouble, style="bold red") if trouble else _service(figures)]
    for job in shown:
        parts += ["", _head(job), _progress(job), *_step_times(job), _bottleneck(job["bottleneck"])]
        if job["warning"]:
            parts.append(Text(job["warning"], style="yellow"))
        if job["nodes"]:
            parts += ["", *_nodes(job["nodes"], job["recoveries"])]
        if job["sources"] or job["ranks"]:
            parts += ["", _side_by_side(_sources(job["sources"], max_rows), _ranks(job["ranks"], max_rows))]
    if not jobs:
        parts += ["", Text("no jobs: start one with `headrace job submit JOB.yaml`")]
    if figures["preprocessors"]:
        parts += ["", _preprocessors(figures["preprocessors"], width, max_rows)]
    if ended:
        parts += ["", _ended(ended)]
    return Group(*parts)


def _rows_that_fit(height: int, jobs: list[dict[str, Any]], preprocessors: list[dict[str, Any]]) -> int:
    """Return the most rows that a table may have for all to fit into `height`; each table counts the rows left out."""
    rows = [len(preprocessors), *(max(len(job["sources"]), len(job["ranks"])) for job in jobs)]
    of_nodes = sum(3 + len(job["recoveries"][-MAX_RECOVERIES:]) for job in jobs if job["nodes"])
    of_warnings = sum(_WARNING_LINES for job in jobs if job["warning"])
    free = height - _OTHER_LINES - _LINES_PER_JOB * len(jobs) - of_nodes - of_warnings
    return max((most for most in range(MIN_ROWS, height) if sum(min(most, n) for n in rows) <= free), default=MIN_ROWS)


def _service(figures: dict[str, Any]) -> Text:
    service, count = figures["service"], len(figures["preprocessors"])
    if service is None:
        return Text("connected")
    members = f"{count} preprocessor{'' if count == 1 else 's'}"
    if service["preprocessors_needed"] not in (None, count):
        members += f", {service['preprocessors_needed']} would do now"
    return Text.assemble((service["leader"], "bold"), f" leads in term {service['term']}, for {span(service['up_s'])}; {members}")


def _head(job: dict[str, Any]) -> Table:
    head = Table.grid(padding=(0, 2))
    steps = f"step {job['committed_steps']}/{job['num_steps'] or '?'}"
    bar = ProgressBar(total=job["num_steps"], completed=job["committed_steps"], width=24)
    state = Text.assemble("job ", (job["job"], "bold"), " ", (job["state"], "yellow" if job["state"] == "paused" else ""))
    state.truncate(30, overflow="ellipsis")
    head.add_row(state, steps, bar, f"generation {job['generation']}")
    return head


def _progress(job: dict[str, Any]) -> Text:
    parts = [
        f"{job['samples_per_s']:.1f} samples/s",
        f"{job['steps_per_s']:.2f} steps/s",
        f"data wait {_share(job['data_wait_fraction'])}",
        f"planned ahead {job['planned_steps']}",
        f"quarantined {job['quarantined']}",
    ]
    return Text("  ".join(parts))


def _step_times(job: dict[str, Any]) -> list[Text]:
    """Return a line on what a step takes and what it was forecast to take; none before there is a forecast."""
    if job["forecast_error"] is None:
        return []
    measured, forecast = seconds(job["measured_step_s"]), seconds(job["forecast_step_s"])
    return [Text(f"step {measured}, forecast {forecast} ({job['forecast_error']:+.0%})")]


def _bottleneck(finding: dict[str, str]) -> Table:
    line = Table.grid(padding=(0, 1))
    text = Text(finding["sentence"], style="bold")
    if finding["remedy"]:
        text.append(": ").append(finding["remedy"], style="bold green")
    line.add_row(Text("→", style="bold"), text)
    return line


def _nodes(nodes: dict[str, Any], recoveries: list[dict[str, Any]]) -> list[Text]:
    """Return lines on the pipelines of a recoverable job, on what was chosen last, and on its latest recoveries."""
    sizes = [len({stage["node"] for stage in pipeline["stages"]} - {None}) for pipeline in nodes["pipelines"]]
    shares = "+".join(str(pipeline["microbatches"]) for pipeline in nodes["pipelines"])
    shape = f"{sum(sizes)} nodes in pipelines of {'+'.join(map(str, sizes))} with {shares} microbatches"
    lines = [Text.assemble((f"pipelines {nodes['generation']}", "bold"), f"  {nodes['error'] or shape}")]
    for recovery in reversed(recoveries[-MAX_RECOVERIES:]):
        phases = "  ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in recovery["phases_s"].items())
        head = f"recovery {recovery['generation']}  step {recovery['step']}  {recovery['total_s'] * 1e3:.0f} ms"
        lines.append(Text(f"{head}: {phases}  {recovery['change']}"))
    if nodes["choice"]:
        lines.insert(1, Text(nodes["choice"]))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def _side_by_side(*tables: Table) -> Table:
    grid = Table.grid(padding=(0, 4, 0, 0))
    grid.add_row(*tables)
    return grid


def _table(*columns: str, gap: int = 2) -> Table:
    """Return an empty table: text in the first column, numbers in the others."""
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="dim", pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _sources(sources: list[dict[str, Any]], max_rows: int) -> Table:
    table = _table("source", "asked", "samples", "tokens")
    for source in sorted(sources, key=lambda source: -source["share"])[:max_rows] if len(sources) > max_rows else sources:
        shares = (source["share"], source["samples_share"], source["tokens_share"])
        table.add_row(_name(source["source"]), *map(_share, shares))
    _count_others(table, len(sources), max_rows)
    return table


def _ranks(ranks: list[dict[str, Any]], max_rows: int) -> Table:
    """Draw the ranks; of many, those that are late and then those that wait most."""
    table = _table("rank", "next step", "data wait", "of its step")
    if len(ranks) > max_rows:
        ranks = sorted(ranks, key=lambda rank: (rank["next_step"], -(rank["data_wait_fraction"] or 0.0)))
    for rank in ranks[:max_rows]:
        table.add_row(str(rank["rank"]), str(rank["next_step"]), seconds(rank["data_wait_s"]), _share(rank["data_wait_fraction"]))
    _count_others(table, len(ranks), max_rows)
    return table


def _preprocessors(members: list[dict[str, Any]], width: int, max_rows: int) -> Table:
    """Draw the preprocessors; of many, the busiest and among these the slowest."""
    gap = 3 if width >= WIDE else 1
    table = _table("preprocessor", "samples/s", "MB/s", "leases", "ordered", "read", "decoding", "stored", "store", gap=gap)
    count = len(members)
    if count > max_rows:
        members = sorted(members, key=lambda m: (-m["leases"] / max(1, m["slots"]), m["samples_per_s"]))
    for member in members[:max_rows]:
        table.add_row(
            _name(member["preprocessor"]),
            f"{member['samples_per_s']:.1f}",
            f"{member['bytes_per_s'] / 1e6:.1f}",
            f"{member['leases']}/{member['slots']}",
            *(str(member[stage]) for stage in ("ordered", "read", "decoding", "stored")),
            _store(member["store_bytes"], member["store_budget_bytes"], width),
        )
    _count_others(table, count, max_rows)
    return table


def _store(held: int, budget: int, width: int) -> Table:
    """Draw the use of a store: a bar, and beside it the share, or the bytes if there is room."""
    cell = Table.grid(padding=(0, 1))
    said = f"{held / 2**20:.0f} of {budget / 2**20:.0f} MiB" if width >= WIDE else _share(held / budget if budget else 0.0)
    cell.add_row(ProgressBar(total=budget or 1, completed=held, width=16 if width >= WIDE else 5), said)
    return cell


def _ended(jobs: list[dict[str, Any]]) -> Text:
    lines = [f"job {job['job']} {job['state']} after {job['committed_steps']} steps" for job in jobs[-MAX_ENDED:]]
    if len(jobs) > MAX_ENDED:
        lines.append(f"and {len(jobs) - MAX_ENDED} more that ended")
    return Text("\n".join(lines), style="dim")


def _count_others(table: Table, count: int, max_rows: int) -> None:
    if count > max_rows:
        table.add_row(f"and {count - max_rows} more", style="dim")


def _name(name: str) -> Text:
    """Shorten a long name to its end, which tells it from others."""
    return Text(name if len(name) <= _NAME_CHARS else "…" + name[1 - _NAME_CHARS :])


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def seconds(value: float | None) -> str:
    """Write a short time in seconds or milliseconds; None as a dash."""
    if value is None:
        return "–"
    return f"{value:.1f} s" if value >= 1.0 else f"{value * 1e3:.0f} ms"


def span(seconds: float) -> str:
    """Write a time as the two largest of its days, hours, minutes and seconds."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds % 60)} s" if minutes else f"{seconds:.0f} s"
