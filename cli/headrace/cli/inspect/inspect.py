"""`headrace inspect`: reports what is in a data set from headers and text; only samples of a preview are decoded."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from headrace.cli.costs.model_options import add_model_arguments, check_inspected
from headrace.cli.output import attempted, make_folder
from headrace.errors import DatasetError, UserError
from headrace.sample import SampleRef

if TYPE_CHECKING:
    from headrace.cli.costs.dataset_costs import CostRecorder
    from headrace.cli.costs.survey import MeasuredSample, MeasuringJob, Tally
    from headrace.quarantine import Rejected
    from headrace.spec import JobSpec

MAX_REFUSED_ROWS = 3  # printed for each reason
MAX_PREVIEW = 60  # about 150 MB of pixels
CHUNK_SAMPLES = 16  # per task of the thread pool: less than a tenth of a second on local disks
PLAIN_INTERVAL_S = 2.0  # between lines where standard error is no terminal
_EPILOG = """\
examples:
  headrace inspect /data/charts
  headrace inspect /data/charts --preview --limit 200
  headrace inspect /data/charts --costs costs.parquet --model 7b --units vision,audio,llm

The cost table has a row per good sample: sample_id, name, tokens, and for each unit cost_<unit> (forward seconds at a nominal
speed, or from measured --coefficients), memory_<unit> (bytes of activations) and bytes_<unit> (bytes between stages).
`headrace plan` and `headrace simulate` read it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace inspect` to its parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("path", metavar="PATH", help="folder, file, glob or URL of shards")
    parser.add_argument("--limit", type=int, metavar="N", help="look at N samples, evenly spread over the shards (default: all)")
    add_reading_arguments(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("headrace-inspect"), metavar="DIR", help="for the pictures (default: %(default)s)"
    )
    parser.add_argument(
        "--preview",
        type=int,
        nargs="?",
        const=12,
        metavar="N",
        help="also draw N samples as the model will see them: patches, log-mel, tokens and loss mask (default: %(const)s)",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="(default: %(default)s)")
    costs = parser.add_argument_group("cost table")
    costs.add_argument("--costs", type=Path, metavar="FILE", help="write what every sample costs in every unit, as Parquet")
    add_model_arguments(costs)


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options --tokenizer, --template and --max-pixels, which say how samples become tokens and patches."""
    parser.add_argument(
        "--tokenizer", default="", metavar="PATH", help="path or URL of a tokenizer.json (default: the bundled one)"
    )
    parser.add_argument(
        "--template", default="chatml", metavar="NAME", help="prompt template, as in a job spec (default: %(default)s)"
    )
    parser.add_argument("--max-pixels", type=int, metavar="N", help="larger images are scaled down (default: as in a job spec)")


def run(args: argparse.Namespace) -> int:
    """Survey the data set, print the report, write the files that were asked for, and return the exit code.

    Raises UserError for options that cannot be used, DatasetError where the data set cannot be read or has no sample.
    """
    from headrace.cli.costs.survey import MeasuringJob, Tally
    from headrace.preprocessor.sources import list_shards

    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit must be at least 1, got {args.limit}")
    if args.preview is not None and not 1 <= args.preview <= MAX_PREVIEW:
        raise UserError(f"--preview must be 1 to {MAX_PREVIEW} samples, got {args.preview}")
    check_inspected(args)
    spec = reading_spec(args)
    job = MeasuringJob(spec)
    job.shards = tuple(list_shards(spec))
    make_folder(args.out)
    tally = Tally(spec)
    try:
        with contextlib.ExitStack() as stack:
            record = stack.enter_context(_recorder(args, job)).add if args.costs else None

            def take(sample: MeasuredSample) -> None:
                tally.add(sample)
                if record is not None:
                    record(sample)

            rows, refused = _survey(job, args.limit, take)
    finally:
        job.close()
    if not tally.samples and not refused:
        raise DatasetError(f"{args.path} holds no sample in {_count(len(job.shards), 'shard')}")
    report = _report(args.path, len(job.shards), tally, refused, _left_out(rows, args.limit))
    report["picture"], failure = attempted(args.out, lambda: _draw(report, tally, args.out))
    report["preview"] = _preview(args, job, rows)
    report["costs"] = str(args.costs) if args.costs and tally.samples else None
    _print_report(report, args.format)
    if failure is not None:
        raise failure
    return 0


def evenly_spaced_samples(rows: Sequence[int], limit: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose at most `limit` samples that are equally far apart in the sequence of all rows of all shards.

    rows: number of samples in each shard. Returns the samples' shards and rows, two arrays (n,), n = min(limit, sum(rows)).
    """
    total = sum(rows)
    count = total if limit is None else min(limit, total)
    if not count:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    starts = np.cumsum([0, *rows], dtype=np.int64)
    places = (np.arange(count, dtype=np.int64) * total + total // 2) // count
    shards = np.searchsorted(starts, places, side="right") - 1
    return shards, places - starts[shards]


def reading_spec(args: argparse.Namespace) -> JobSpec:
    """Return the spec of a job that reads `args.path` under the options of `add_reading_arguments`. Raises SpecError."""
    from headrace.preprocessor.sources.metadataset import expand
    from headrace.spec import parse_spec

    return expand(
        parse_spec(
            {
                "name": "inspect",
                "sources": [{"path": args.path}],
                "image": {} if args.max_pixels is None else {"max_pixels": args.max_pixels},
                "text": {"tokenizer": args.tokenizer, "template": args.template},
            }
        )
    )


def survey(job: MeasuringJob, limit: int | None, take: Callable[[MeasuredSample], object]) -> tuple[list[Rejected], int]:
    """Index all shards, probe at most `limit` samples and pass the good ones to `take`, in order.

    Returns the refused samples, and how many samples `limit` left out.
    """
    rows, refused = _survey(job, limit, take)
    return refused, _left_out(rows, limit)


def _survey(job: MeasuringJob, limit: int | None, take: Callable[[MeasuredSample], object]) -> tuple[list[int], list[Rejected]]:
    """Do the work of `survey`, and return the number of samples in each shard and the refused samples."""
    refused: list[Rejected] = []
    rows: list[int] = []
    with _Bar() as bar:
        bar.begin("indexing shards", len(job.shards))
        for shard in range(len(job.shards)):
            num_rows, damage = job.index(shard)
            rows.append(num_rows)
            refused += damage
            bar.advance(1)
        shards, places = evenly_spaced_samples(rows, limit)
        bar.begin("probing samples", len(shards))
        for good, bad in _measure_all(job, shards, places):
            for sample in good:
                take(sample)
            refused += bad
            bar.advance(len(good) + len(bad))
    return rows, refused


def _left_out(rows: Sequence[int], limit: int | None) -> int:
    return 0 if limit is None else max(0, sum(rows) - limit)


def _measure_all(
    job: MeasuringJob, shards: NDArray[np.int64], rows: NDArray[np.int64]
) -> Iterator[tuple[list[MeasuredSample], list[Rejected]]]:
    """Probe the samples at `rows` of `shards` in threads; yield the good and the refused ones of each chunk, in order."""

    def measure(start: int) -> tuple[list[MeasuredSample], list[Rejected]]:
        chunk = range(start, min(start + CHUNK_SAMPLES, len(shards)))
        return job.measure([SampleRef(sample_id=n, shard=int(shards[n]), row=int(rows[n])) for n in chunk])

    pool = ThreadPoolExecutor()
    try:
        yield from pool.map(measure, range(0, len(shards), CHUNK_SAMPLES))
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt does not wait for the samples that are left


def _recorder(args: argparse.Namespace, job: MeasuringJob) -> CostRecorder:
    from headrace.cli.costs.cost_table import CostTableWriter
    from headrace.cli.costs.dataset_costs import CostRecorder
    from headrace.cli.costs.model_options import estimator_of

    estimator = estimator_of(args, job.spec, job.processor.vocabulary.size)
    return CostRecorder(CostTableWriter(args.costs), estimator)


def _report(path: str, num_shards: int, tally: Tally, refused: list[Rejected], not_probed: int) -> dict[str, Any]:
    """Return the report in its public JSON form, without `picture`, `preview` and `costs`."""
    from headrace.cli.inspect.histogram import percentiles

    columns = tally.columns()
    return {
        "path": path,
        "shards": num_shards,
        "samples": tally.samples,
        "not_probed": not_probed,
        "modalities": tally.modalities(),
        "combinations": dict(sorted(tally.combinations.items())),
        "images": len(columns.get("image_side_px", ())),
        "recordings": tally.recordings,
        "tokens": sum(columns["tokens"].tolist()) if tally.samples else 0,
        "histograms": {name: {"count": len(values), **percentiles(values)} for name, values in columns.items()},
        "refused": [{"sample": item.name, "reason": str(item.reason), "detail": item.detail} for item in refused],
    }


def _draw(report: dict[str, Any], tally: Tally, out: Path) -> str | None:
    """Draw the histograms and return the picture's path; None where no sample is good."""
    from headrace.cli.inspect.histogram import draw_histograms

    if not tally.samples:
        return None
    subtitle = f"{_holdings(report)}; {report['tokens']:,} tokens; {len(report['refused']):,} refused"
    title = report["path"].rstrip("/")
    return str(draw_histograms(out / "inspect.png", tally.columns(), tally.combinations, title=title, subtitle=subtitle))


def _preview(args: argparse.Namespace, job: MeasuringJob, rows: Sequence[int]) -> str | None:
    """Write the contact sheet and return its path; None where none is asked for or no shard has a row."""
    from headrace.cli.inspect.preview import write_preview

    if args.preview is None or not sum(rows):
        return None
    shards, places = evenly_spaced_samples(rows, args.preview)
    refs = [SampleRef(sample_id=n, shard=int(shards[n]), row=int(places[n])) for n in range(len(shards))]
    subtitle = f"{_count(len(refs), 'sample')} of {sum(rows):,}, evenly spread"
    return str(write_preview(args.out / "preview.png", job.spec, job.shards, refs, subtitle=subtitle))


def _holdings(report: dict[str, Any]) -> str:
    samples = _count(report["samples"], "sample")
    if report["not_probed"]:
        samples += f" (of {report['not_probed'] + report['samples']:,})"
    counts = [
        _count(report["shards"], "shard"),
        samples,
        _count(report["images"], "image"),
        _count(report["recordings"], "recording"),
    ]
    return ", ".join(counts)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _print_report(report: dict[str, Any], output: str) -> None:
    """Print the report on standard output in the format `output`, `json` or `table`."""
    if output == "json":
        print(json.dumps(report, ensure_ascii=False))
        return
    console = Console()
    head = Table(title=report["path"], show_header=False, title_justify="left")
    head.add_column(style="bold")
    head.add_column()
    head.add_row("holds", _holdings(report))
    head.add_row("samples with", ", ".join(f"{name} {count:,}" for name, count in report["modalities"].items()))
    head.add_row("of these", ", ".join(f"{name} {count:,}" for name, count in report["combinations"].items()) or "none")
    head.add_row("LLM tokens", f"{report['tokens']:,}")
    head.add_row("refused", f"{len(report['refused']):,}")
    for name in ("picture", "preview", "costs"):
        if report[name]:
            head.add_row(name, report[name])
    console.print(head)
    if report["histograms"]:
        console.print(_histogram_table(report["histograms"]))
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

    refused = report["refused"]
    if refused and not report["samples"]:
        console.print("every sample is refused: a job on this data would fail", style="bold")
    for reason, count in Counter(item["reason"] for item in refused).most_common():
        console.print(f"refused as {reason}: {count:,}", markup=False, highlight=False)
        some = [item for item in refused if item["reason"] == reason][:MAX_REFUSED_ROWS]
        for item in some:
            console.print(f"  {printable(item['sample'])}: {item['detail']}", markup=False, highlight=False, soft_wrap=True)
        if count > len(some):
            console.print(f"  and {count - len(some):,} more")


class _Bar:
    """Shows progress on standard error: a bar on a terminal, elsewhere a line every two seconds."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._what, self._done, self._total = "", 0, 0
        self._last_line_s = time.monotonic()

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self, what: str, total: int) -> None:
        """Start counting a new task, `what`, of `total` items."""
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        self._progress.add_task(what, total=total)
        self._what, self._done, self._total = what, 0, total

    def advance(self, count: int) -> None:
        """Count `count` more items as done."""
        self._done += count
        for task in self._progress.task_ids:
            self._progress.update(task, completed=self._done)
        now_s = time.monotonic()
        if self._progress.disable and now_s - self._last_line_s >= PLAIN_INTERVAL_S:
            self._last_line_s = now_s
            self._console.print(f"{self._what}: {self._done:,} of {self._total:,}", markup=False, highlight=False)
