"""`headrace experiment`: an experiment of a paper by name, ours beside the published row."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from typing import TYPE_CHECKING

from headrace.cli.experiment.experiments import EXPERIMENTS, Experiment
from headrace.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.cli.experiment.findings import Figure, Findings, Row

_EPILOG = """\
SIMULATED means that no GPU has run it; COMPUTED needs none; MEASURED is the time of a search on this machine.
Published figures are those of the papers' text and tables. Where a row makes a claim, the column `claim` has how far ours may be
from it, and whether it holds. Below the table stands what was assumed or fitted, and where a paper contradicts itself.

examples:
  headrace experiment disttrain-fig17
  headrace experiment oobleck-table2.2 --format json

experiments:
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace experiment` to its parser."""
    parser.epilog = _EPILOG + "\n".join(_lines())
    parser.add_argument("name", nargs="?", metavar="NAME", help="one of the experiments below")
    parser.add_argument("--list", action="store_true", help="name all experiments, a line each")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of what is printed (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run `headrace experiment`: compute the experiment and print its rows. Raises UserError for an unknown name."""
    if args.list:
        if args.name is not None:
            raise UserError(f"--list names all experiments, so it does not go with {args.name!r}: leave one of the two out")
        print(_listed(args.format))
        return 0
    if args.name not in EXPERIMENTS:
        what = "name an experiment" if args.name is None else f"no experiment {args.name!r}"
        raise UserError(f"{what}; there are {', '.join(EXPERIMENTS)}")
    from headrace.cli.progress_bar import working

    experiment = EXPERIMENTS[args.name]
    with working(f"{args.name}: {experiment.line}"):
        findings = experiment.run()
    if args.format == "json":
        print(json.dumps({"experiment": args.name, "source": experiment.source, **findings.to_json()}))
    else:
        _print(experiment, findings)
    return 0


def _lines() -> list[str]:
    widest = max(map(len, EXPERIMENTS))
    return [f"  {name:<{widest}}  {experiment.source}: {experiment.line}" for name, experiment in EXPERIMENTS.items()]


def _listed(form: str) -> str:
    if form == "table":
        return "\n".join(line.strip() for line in _lines())
    return json.dumps([{"experiment": name, "source": one.source, "line": one.line} for name, one in EXPERIMENTS.items()])


def _print(experiment: Experiment, findings: Findings) -> None:
    from headrace.cli.planning.plan import print_uncut

    _print_text(f"{findings.kind}: {findings.what} ({experiment.source})")
    print_uncut(_table(findings))
    for row in findings.rows:
        if row.detail:
            _print_text(f"{row.name}: {row.detail}")
    for note in findings.notes:
        _print_text(note)


def _print_text(text: str) -> None:
    print("\n".join(textwrap.wrap(text, shutil.get_terminal_size().columns)))


def _table(findings: Findings) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    claims = any(row.within is not None for row in findings.rows)
    for name in ("", "ours", "published", *["claim"] * claims):
        table.add_column(name, justify="right" if name in ("ours", "published") else "left", no_wrap=True)
    for row in findings.rows:
        unit = f" {row.unit}" if row.unit else ""
        published = "" if row.published is None else _figure(row.published)
        table.add_row(
            row.name,
            f"{_figure(row.ours)}{unit}",
            published,
            *[_claim(row)] * claims,
            style="bold red" if row.agrees is False else None,
        )
    return table


def _claim(row: Row) -> str:
    """Return how far ours may be from the published figure, and whether it is not farther."""
    if row.within is None:
        return ""
    what = f"within {row.within:.0%}" if row.within else "in range" if isinstance(row.published, tuple) else "equal"
    return f"{what}: {'yes' if row.agrees else 'NO'}"


def _figure(figure: Figure) -> str:
    if isinstance(figure, str):
        return figure
    if isinstance(figure, tuple):
        return f"{figure[0]:.4g} to {figure[1]:.4g}"
    return f"{figure:.4g}" if figure < 1e4 else f"{figure:,.0f}"
