"""`headrace replay`: read and decode one sample of a job again on this machine, and show what was found on the way."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.cli.endpoint import add_endpoint

if TYPE_CHECKING:
    from rich.console import Console

    from headrace.jobs_client import JobsClient
    from headrace.manifest import ShardInfo
    from headrace.spec import JobSpec
    from headrace.v1.jobs_pb2 import JobStatus

MAX_FIELDS = 40  # of a record that the table shows
_UNITS = {"str": "characters", "bytes": "bytes", "list": "items", "dict": "items"}
_EPILOG = """\
SAMPLE is SOURCE/SHARD/KEY, as `headrace job quarantine` and the ledger have it, or the sample's number in the job's global
order: step s of a job with global batches of B samples has the numbers s * B to s * B + B - 1.

The sample is read from its shard on this machine, with the job's spec, and goes through the pipeline piece by piece: its
fields, its turns, the headers of its media, its tokens and their labels, and what decoding gives, each with its time. Where it
is refused, the piece that refused it, the whole reason and the traceback are shown.

exit codes: 0 the sample is good, 1 it is refused, 2 it cannot be looked at.

examples:
  headrace replay my-job charts/shard-0007.tar/000123
  headrace replay my-job 4711
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace replay`."""
    parser.epilog = _EPILOG
    parser.add_argument("job", metavar="JOB", help="name of the job")
    parser.add_argument("sample", metavar="SAMPLE", help="SOURCE/SHARD/KEY, or a number in the global order (4711 or '#4711')")
    add_endpoint(parser)
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of what is printed (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Replay the sample; return 1 if it is refused, else 0."""
    from headrace.jobs_client import JobsClient
    from headrace.peer_spec import load_peer_spec_json

    with JobsClient(args.endpoint) as client:
        status = client.show(args.job)
        shards, _ = client.manifest(args.job)
        wanted = _wanted(client, status, shards, args.sample)
        quarantined = {item.name: item for item in client.quarantine(args.job)}
    report = {"job": args.job, **_replay(load_peer_spec_json(status.spec_json), shards[wanted.shard], wanted)}
    item = quarantined.get(report["sample"])
    report["number"] = wanted.number if item is None or item.sample_id is None else item.sample_id
    report["quarantined"] = None if item is None else {"reason": str(item.reason), "detail": item.detail}
    if args.format == "json":
        print(json.dumps(report, ensure_ascii=False))
    else:
        _print(report)
    return 0 if report["refusal"] is None else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """The sample to replay, given by its key or by its row."""

    name: str
    shard: int
    key: str = ""
    row: int | None = None
    number: int | None = None


def _wanted(client: JobsClient, status: JobStatus, shards: Sequence[ShardInfo], sample: str) -> _Wanted:
    """Find the sample to replay.

    Raises NotFoundError if the job has no such sample, ConflictError for a number that its order does not reach yet.
    """
    from headrace.cli.watch.order_lookup import job_order
    from headrace.errors import NotFoundError
    from headrace.manifest import split_name

    if not sample.removeprefix("#").isdecimal():
        place = split_name(sample, {shard.name: number for number, shard in enumerate(shards)})
        if place is None:
            raise NotFoundError(
                f"{sample!r} is in no shard of job {status.job!r}; a sample is SOURCE/SHARD/KEY, as `headrace job quarantine` "
                "has it, or a number in the global order"
            )
        return _Wanted(name=sample, shard=place[0], key=place[1])
    number, order = int(sample.removeprefix("#")), job_order(client, status)
    step, within = divmod(number, order.spec.global_batch)
    order.check(step)
    refs = order.batches.refs(step) if order.batches.knows(step) else []
    if within >= len(refs):
        raise NotFoundError(f"job {status.job!r} has no sample #{number}: it ends with step {order.batches.num_steps - 1}")
    return _Wanted(name=sample, shard=refs[within].shard, row=refs[within].row, number=number)


def _replay(spec: JobSpec, info: ShardInfo, wanted: _Wanted) -> dict[str, Any]:
    """Replay a sample; return the report in its public JSON form, without what only the service knows.

    Raises NotFoundError if the shard has no such sample, DatasetError if it cannot be read on this machine.
    """
    from headrace.cli.inspect.dissection import dissect, refusal_of
    from headrace.errors import DatasetError, NotFoundError
    from headrace.preprocessor.sources import open_shard

    source = spec.sources[info.source]
    try:
        with open_shard(info.url, source) as shard:
            row = wanted.row
            if row is None:
                row = next((row for row in range(shard.num_rows) if shard.key(row) == wanted.key), None)
            if row is not None:
                place = {"sample": f"{info.name}/{shard.key(row)}", "url": info.url, "row": row}
                return place | dissect(spec, shard, row, source)
            damage = next((item for item in shard.rejected if item.name == wanted.key), None)
    except (OSError, MemoryError) as err:
        raise DatasetError(f"cannot read {info.url} on this machine: {err or type(err).__name__}") from err
    if damage is None:
        raise NotFoundError(f"{info.url} has no sample with the key {wanted.key!r}; it has {shard.num_rows:,} others")
    return {"sample": wanted.name, "url": info.url, "row": None} | refusal_of(damage)


def _print(report: dict[str, Any]) -> None:
    """Print the report on standard output, for people."""
    from rich.console import Console
    from rich.text import Text

    from headrace.printable import printable

    console = Console(highlight=False)

    def say(line: str, style: str = "") -> None:
        console.print(Text(printable(line, keep="\n"), style), soft_wrap=True)

    say(report["sample"], "bold")
    number = "" if report["number"] is None else f", sample #{report['number']} of the job"
    say(f"row {'–' if report['row'] is None else report['row']} of {report['url']}{number}")
    if report["quarantined"]:
        say(f"quarantined by the job: {report['quarantined']['reason']}, {report['quarantined']['detail']}")
    for title, lines in (
        ("fields", _field_lines(report)),
        ("turns", _turn_lines(report)),
        ("media", _media_lines(report)),
    ):
        if lines:
            say(f"\n{title}", "bold")
        for line in lines:
            say(f"  {line}")
    if report["tokens"]:
        _print_tokens(console, report["tokens"])
    if report["pieces"]:
        say("\ntimes", "bold")
    for piece in report["pieces"]:
        say(f"  {piece['ms']:9.2f} ms  {piece['piece']}")
    if report["refusal"] is None:
        say("\ngood", "bold green")
        return
    refusal = report["refusal"]
    say(f"\nrefused when it came to: {refusal['piece']}", "bold red")
    say(f"{refusal['reason']}: {refusal['detail']}")
    if refusal["traceback"]:
        say(f"\n{refusal['traceback'].rstrip()}", "dim")


def _field_lines(report: dict[str, Any]) -> list[str]:
    lines = []
    for field in report["fields"][:MAX_FIELDS]:
        size = "" if field["size"] is None else f", {field['size']:,} {_UNITS[field['kind']]}"
        lines.append(f"{field['name']} ({field['kind']}{size}): {' '.join(field['value'].split())}")
    if len(report["fields"]) > MAX_FIELDS:
        lines.append(f"and {len(report['fields']) - MAX_FIELDS:,} more")
    return lines + ([f"members: {', '.join(report['members'])}"] if report["members"] else [])


def _turn_lines(report: dict[str, Any]) -> list[str]:
    lines = []
    for turn in report["turns"]:
        lines.append(f"{turn['role']}{', learnt' if turn['loss'] else ''}")
        for segment in turn["segments"]:
            unit = "characters" if segment["kind"] == "text" else "bytes"
            text = f": {' '.join(segment['text'].split())}" if segment["text"] else ""
            lines.append(f"  {segment['kind']}, {segment['size']:,} {unit}{text}")
    return lines


def _media_lines(report: dict[str, Any]) -> list[str]:
    lines = []
    for medium in report["media"]:
        about = ", ".join(f"{name} {_value(value)}" for name, value in medium.items() if name != "medium" and value is not None)
        lines.append(f"{medium['medium']}: {about}")
    return lines


def _value(value: Any) -> str:
    if isinstance(value, list):
        return " x ".join(f"{side:,}" for side in value)
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _print_tokens(console: Console, tokens: dict[str, Any]) -> None:
    from rich.text import Text

    from headrace.printable import printable

    console.print(Text(f"\ntokens: {tokens['count']:,}, {tokens['with_loss']:,} of them with loss (underlined)", "bold"))
    text = Text()
    for piece, learnt in tokens["text"]:
        text.append(printable(piece, keep="\n\t"), "underline" if learnt else "")
    console.print(text)
