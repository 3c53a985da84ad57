"""Check preprocessors' reports before anything acts on them: who they are, the numbers they give, the orders they answer.

A report that breaks a rule ends the stream it came by, with the rule in a sentence. The work leased over that stream goes to
another preprocessor, and nothing of the report gets into the manifest or the window.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from headrace.errors import ConflictError, UserError
from headrace.limits import MAX_PATH
from headrace.manifest import MAX_SHARD_ROWS
from headrace.reorder_service.fleet.fleet import Fleet
from headrace.reorder_service.fleet.member import Member
from headrace.rpc import check_endpoint
from headrace.v1 import fleet_pb2

MOST_SLOTS = 1 << 14  # a preprocessor asks for about twice as many as it has threads
MOST_CHARACTERS = 255  # in names and endpoints; the limit of host names
MOST_SHARDS = 1 << 24  # in a job
MOST_PATH = 2 * MAX_PATH  # characters in a shard's URL or its name: a source's folder, and a path in it
MOST_LISTED_BYTES = 1 << 30  # in a list of shards, all pages together: a million shards take some 200 MB
MOST_COUNT = 1 << 50  # upper bound of every number in a heartbeat

_COUNTS = [field.name for field in fleet_pb2.Heartbeat.DESCRIPTOR.fields if field.message_type is None]
_OCCUPANCY = [field.name for field in fleet_pb2.Heartbeat.DESCRIPTOR.fields_by_name["occupancy"].message_type.fields]

_REASON = re.compile("[a-z_]{1,64}")  # one of headrace.quarantine.Reason, or one that a newer release has besides

ANSWERS = {
    "list_shards": "shards_listed",
    "index_shard": "shard_indexed",
    "probe_samples": "samples_probed",
    "decode_part": "part_decoded",
    "decode_parts": "part_decoded",
}
"""Kind of order -> kind of report that ends it; order_failed ends any."""


def check_hello(hello: fleet_pb2.Hello) -> None:
    """Raise UserError if a preprocessor's hello has an invalid name, endpoint, instance or number of slots."""
    for what, text in (("name", hello.preprocessor), ("endpoint", hello.endpoint), ("instance", hello.instance)):
        if len(text) > MOST_CHARACTERS or not text.isprintable():
            raise UserError(
                f"a preprocessor's {what} must be up to {MOST_CHARACTERS} printable characters, got {text[:64]!r} of {len(text)}"
            )
    if not hello.preprocessor:
        raise UserError("a preprocessor must have a name, got an empty one")
    check_endpoint(hello.endpoint)
    if not 1 <= hello.slots <= MOST_SLOTS:
        raise UserError(f"preprocessor {hello.preprocessor!r} must have 1 to {MOST_SLOTS} slots, got {hello.slots}")
    if not 0 <= hello.clock_s <= MOST_COUNT:
        raise UserError(f"preprocessor {hello.preprocessor!r} must have a clock of 0 to {MOST_COUNT} s, got {hello.clock_s}")
    if not 0 <= hello.other_slots <= MOST_SLOTS:
        raise UserError(f"preprocessor {hello.preprocessor!r} may have 0 to {MOST_SLOTS} other_slots, got {hello.other_slots}")


def check_report(fleet: Fleet, member: Member, kind: str, report: Any) -> None:
    """Raise UserError if a report has impossible values, and ConflictError if it answers an order that the member did not get."""
    if kind in _CHECKS:
        _CHECKS[kind](report)
    if kind not in ANSWERS.values():
        return
    work = fleet.at_work(member, report.lease)
    if work is not None and work.answer_kind not in ("", kind):
        raise ConflictError(f"lease {report.lease[:MOST_CHARACTERS]!r} is to be answered with {work.answer_kind}, got {kind}")
    if kind == "shards_listed" and work is None and not fleet.has_given(member, report.lease):
        raise ConflictError(
            f"nobody asked preprocessor {member.name!r} for the shards of lease {report.lease[:MOST_CHARACTERS]!r}"
        )


def check_listed(num_shards: int, num_bytes: int) -> None:
    """Raise UserError if the pages received of a list of shards exceed the number or bytes that a job may have."""
    if num_shards > MOST_SHARDS or num_bytes > MOST_LISTED_BYTES:
        raise UserError(
            f"a job has at most {MOST_SHARDS} shards, whose list has up to {MOST_LISTED_BYTES} bytes, "
            f"got {num_shards} of {num_bytes} bytes and perhaps more: make larger shards"
        )


def _heartbeat(beat: fleet_pb2.Heartbeat) -> None:
    for message, names in ((beat, _COUNTS), (beat.occupancy, _OCCUPANCY)):
        for name in names:
            if not 0 <= (value := getattr(message, name)) <= MOST_COUNT:
                raise UserError(f"a heartbeat's {name} must be 0 to 2^50, got {value}")


def _listed(page: fleet_pb2.ShardsListed) -> None:
    for shard in page.shards:
        if shard.source < 0 or not 0 <= shard.number < MOST_SHARDS:
            raise UserError(f"a shard's source and number must be 0 or more, got {shard.source} and {shard.number}")
        for what, text in (("URL", shard.url), ("name", shard.name)):
            if len(text) > MOST_PATH:
                raise UserError(f"a shard's {what} must have up to {MOST_PATH} characters, got {len(text)}: {text[:64]!r}...")


def _indexed(indexed: fleet_pb2.ShardIndexed) -> None:
    if not 0 <= indexed.num_samples <= MAX_SHARD_ROWS:
        raise UserError(f"a shard must have 0 to {MAX_SHARD_ROWS} rows, got {indexed.num_samples}: split the shard")
    _rejected(indexed.rejections)


def _probed(probed: fleet_pb2.SamplesProbed) -> None:
    for probe in probed.probes:
        least_sizes = min(probe.image_patches, default=0), min(probe.mel_frames, default=0)
        if (least := min(probe.sample_id, probe.num_tokens, probe.num_targets, *least_sizes)) < 0:
            raise UserError(f"what is probed of a sample must be 0 or more, got {least} of {probe.name[:MOST_CHARACTERS]!r}")
        if not 0 <= probe.target_weight < math.inf:
            raise UserError(f"targets must weigh 0 or more, got {probe.target_weight} of {probe.name[:MOST_CHARACTERS]!r}")
    _rejected(probed.rejections)


def _rejected(rejections: Iterable[Any]) -> None:
    for item in rejections:
        if not _REASON.fullmatch(item.reason):
            raise UserError(f"{item.reason[:64]!r} is no reason to refuse a sample, of {item.name[:MOST_CHARACTERS]!r}")


_CHECKS: dict[str, Callable[[Any], None]] = {
    "heartbeat": _heartbeat,
    "shards_listed": _listed,
    "shard_indexed": _indexed,
    "samples_probed": _probed,
    "order_failed": lambda failed: _rejected(failed.damaged),
}
