"""`headrace inspect`: reports what is in a data set from headers and text; only samples of a preview are decoded."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.costs.model_options import add_model_arguments, check_inspected
from headrace.cli.costs.reading_options import add_reading_arguments, reading_spec, shown_source
from headrace.cli.output import attempted, make_folder
from headrace.errors import DatasetError, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.cli.costs.dataset_costs import CostRecorder
    from headrace.cli.costs.sample_choice import Choice
    from headrace.cli.costs.survey import Look, MeasuringJob, Tally
    from headrace.cli.inspect.field_table import FieldTally
    from headrace.quarantine import Rejected

MAX_PREVIEW = 60  # about 150 MB of pixels
_EPILOG = """\
examples:
  headrace inspect /data/charts
  headrace inspect /data/charts --preview --limit 200
  headrace inspect s3://bucket/films --limit 20 --mapping text=title --mapping ignore=mp4
  headrace inspect --spec job.yaml --preview
  headrace inspect /data/charts --costs costs.parquet --model 7b --units vision,audio,llm

The table of fields says what each field and each extension of tar members is used as, and the
refused samples what stands in the way. What helps here as --mapping helps in a job as the
`mapping` of its source.

The cost table has a row per good sample: sample_id, name, tokens, and for each unit cost_<unit>
(forward seconds at a nominal speed, or from measured --coefficients), memory_<unit> (bytes of
activations) and bytes_<unit> (bytes between stages). `headrace plan` and `headrace simulate` read
it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace inspect` to its parser."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "path", nargs="?", metavar="PATH", help="folder, file, glob or URL of shards; a source's name with --spec"
    )
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="look at N samples: of local shards evenly spread, of remote ones the first of few shards (default: all)",
    )
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
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of what is printed (default: %(default)s)")
    add_reading_arguments(parser)
    costs = parser.add_argument_group("cost table")
    costs.add_argument("--costs", type=Path, metavar="FILE", help="write what every sample costs in every unit, as Parquet")
    add_model_arguments(costs)


def run(args: argparse.Namespace) -> int:
    """Survey the data set, print the report, write the files that were asked for, and return the exit code.

    Raises UserError for options that cannot be used, and, after the report, for a mapping of which nothing is there; DatasetError
    where the data set cannot be read or has no sample.
    """
    from headrace.cli.costs.survey import MeasuringJob, Tally, survey
    from headrace.cli.inspect.field_table import FieldTally
    from headrace.cli.inspect.inspect_report import count, print_report
    from headrace.quarantine import Rejected

    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit must be at least 1, got {args.limit}")
    if args.preview is not None and not 1 <= args.preview <= MAX_PREVIEW:
        raise UserError(f"--preview must be 1 to {MAX_PREVIEW} samples, got {args.preview}")
    check_inspected(args)
    spec = reading_spec(args, {"name": "inspect"}, {"path": args.path})
    job = MeasuringJob(spec, args.limit)
    make_folder(args.out)
    tally, fields, refused = Tally(spec), FieldTally(spec), list[Rejected]()
    try:
        with contextlib.ExitStack() as stack:
            record = stack.enter_context(_recorder(args, job)).add if args.costs else None

            def take(look: Look) -> None:
                fields.add(look)
                if isinstance(look.result, Rejected):
                    refused.append(look.result)
                    return
                tally.add(look.result)
                if record is not None:
                    record(look.result)

            choice = survey(job, args.limit, take)
    finally:
        job.close()
    refused = [*choice.damage, *refused]
    if not tally.samples and not refused:
        raise DatasetError(f"{shown_source(args)} holds no sample in {count(len(job.shards), 'shard')}")
    report = _report(shown_source(args), job, choice, tally, fields, refused)
    report["picture"], failure = attempted(args.out, lambda: _draw(report, tally, args.out))
    report["preview"] = _preview(args, job, choice)
    report["costs"] = str(args.costs) if args.costs and tally.samples else None
    print_report(report, args.format)
    if failure is not None:
        raise failure
    if complaint := fields.complaint():
        raise UserError(complaint)
    return 0


def _recorder(args: argparse.Namespace, job: MeasuringJob) -> CostRecorder:
    from headrace.cli.costs.cost_table import CostTableWriter
    from headrace.cli.costs.dataset_costs import CostRecorder
    from headrace.cli.costs.model_options import estimator_of

    estimator = estimator_of(args, job.spec, job.processor.vocabulary.size)
    return CostRecorder(CostTableWriter(args.costs), estimator)


def _report(
    path: str, job: MeasuringJob, choice: Choice, tally: Tally, fields: FieldTally, refused: Sequence[Rejected]
) -> dict[str, Any]:
    """Return the report in its public JSON form, without `picture`, `preview` and `costs`.

    not_probed is null where it is not known, bytes_read where all that was wanted was there or fetched whole.
    """
    from headrace.cli.inspect.histogram import percentiles
    from headrace.quarantine import Reason

    columns = tally.columns()
    return {
        "path": path,
        "shards": len(job.shards),
        "shards_read": choice.num_shards,
        "bytes_read": None if job.beginnings is None else job.beginnings.bytes_read,
        "samples": tally.samples,
        "not_probed": choice.num_left,
        "modalities": tally.modalities(),
        "combinations": dict(sorted(tally.combinations.items())),
        "images": len(columns.get("image_side_px", ())),
        "recordings": tally.recordings,
        "tokens": sum(columns["tokens"].tolist()) if tally.samples else 0,
        "truncated": tally.truncated,
        "histograms": {name: {"count": len(values), **percentiles(values)} for name, values in columns.items()},
        "fields": fields.rows(),
        "unfound": fields.unfound(),
        "refused": [_shown(item) for item in refused if item.reason is not Reason.FILTERED],
        "filtered": [_shown(item) for item in refused if item.reason is Reason.FILTERED],
    }


def _shown(item: Rejected) -> dict[str, str]:
    return {"sample": item.name, "reason": str(item.reason), "detail": item.detail}


def _draw(report: dict[str, Any], tally: Tally, out: Path) -> str | None:
    """Draw the histograms and return the picture's path; None where no sample is good."""
    from headrace.cli.inspect.histogram import draw_histograms
    from headrace.cli.inspect.inspect_report import holdings

    if not tally.samples:
        return None
    subtitle = f"{holdings(report)}; {report['tokens']:,} tokens; {len(report['refused']):,} refused"
    title = report["path"].rstrip("/")
    return str(draw_histograms(out / "inspect.png", tally.columns(), tally.combinations, title=title, subtitle=subtitle))


def _preview(args: argparse.Namespace, job: MeasuringJob, choice: Choice) -> str | None:
    """Write the contact sheet and return its path; None where none is asked for or there is no sample."""
    from headrace.cli.inspect.inspect_report import count
    from headrace.cli.inspect.preview import PreviewJob, write_preview

    if args.preview is None or not len(choice.shards):
        return None
    refs = choice.thinned(args.preview)
    subtitle = f"{count(len(refs), 'sample')} of {len(choice.shards):,}, evenly spread"
    preview = PreviewJob(job.spec.name, job.spec, job.beginnings)
    preview.shards = job.shards
    title = shown_source(args).rstrip("/")
    return str(write_preview(args.out / "preview.png", preview, refs, title=title, subtitle=subtitle))
