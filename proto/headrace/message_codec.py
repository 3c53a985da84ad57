"""Conversion between Headrace's value types and their protobuf messages.

`X_message` turns a value into a message, and `X_value` turns the message back into an equal value.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import TypeVar

from headrace.errors import UserError
from headrace.manifest import ShardInfo, ShardTable, Vocabulary
from headrace.measured import MeasuredWork
from headrace.plan import LLM, Microbatch, StepPlan, Topology
from headrace.quarantine import Rejected, refusal
from headrace.sample import Probe, SampleRef
from headrace.schedule import Kind
from headrace.v1 import common_pb2, sessions_pb2

_T = TypeVar("_T")


def ref_message(ref: SampleRef) -> common_pb2.SampleRef:
    return common_pb2.SampleRef(sample_id=ref.sample_id, shard=ref.shard, row=ref.row)


def ref_value(message: common_pb2.SampleRef) -> SampleRef:
    return SampleRef(sample_id=message.sample_id, shard=message.shard, row=message.row)


def probe_message(sample_id: int, probe: Probe) -> common_pb2.Probe:
    return common_pb2.Probe(
        sample_id=sample_id,
        name=probe.name,
        num_tokens=probe.num_tokens,
        num_targets=probe.num_targets,
        image_patches=probe.image_patches,
        mel_frames=probe.mel_frames,
        is_truncated=probe.is_truncated,
        target_weight=probe.target_weight,
    )


def probe_value(message: common_pb2.Probe) -> Probe:
    return Probe(
        name=message.name,
        num_tokens=message.num_tokens,
        num_targets=message.num_targets,
        image_patches=tuple(message.image_patches),
        mel_frames=tuple(message.mel_frames),
        is_truncated=message.is_truncated,
        target_weight=message.target_weight if message.HasField("target_weight") else None,
    )


def rejection_message(item: Rejected) -> common_pb2.Rejection:
    sample_id = item.sample_id if item.sample_id is not None else -1
    return common_pb2.Rejection(
        sample_id=sample_id,
        name=item.name,
        reason=str(item.reason),
        detail=item.detail,
        row=item.row,
        modality=item.modality,
        thumbnail=item.thumbnail,
    )


def rejection_value(message: common_pb2.Rejection) -> Rejected:
    sample_id = message.sample_id if message.sample_id >= 0 else None
    row = message.row if message.HasField("row") else None
    reason, detail = refusal(message.reason, message.detail)
    return Rejected(
        name=message.name,
        reason=reason,
        detail=detail,
        sample_id=sample_id,
        row=row,
        modality=message.modality,
        thumbnail=message.thumbnail,
    )


def shard_message(number: int, shard: ShardInfo) -> common_pb2.Shard:
    return common_pb2.Shard(source=shard.source, url=shard.url, name=shard.name, number=number)


def shard_value(message: common_pb2.Shard) -> ShardInfo:
    return ShardInfo(source=message.source, url=message.url, name=message.name)


def shard_table(messages: Sequence[common_pb2.Shard]) -> ShardTable:
    """Return the shard table of a whole manifest, from its shards' messages in manifest order."""
    return ShardTable([m.source for m in messages], [m.url for m in messages], [m.name for m in messages])


def vocabulary_message(vocabulary: Vocabulary) -> common_pb2.Vocabulary:
    return common_pb2.Vocabulary(size=vocabulary.size, image_token=vocabulary.image_token, audio_token=vocabulary.audio_token)


def vocabulary_value(message: common_pb2.Vocabulary) -> Vocabulary:
    return Vocabulary(size=message.size, image_token=message.image_token, audio_token=message.audio_token)


def measured_message(work: MeasuredWork) -> sessions_pb2.MeasuredWork:
    return sessions_pb2.MeasuredWork(
        unit=work.unit,
        replica=work.replica,
        stage=work.stage,
        kind=work.kind,
        microbatches=work.microbatches,
        seconds=work.seconds,
        chunks=work.chunks,
        begins_s=work.begins_s,
        origin_unix_s=work.origin_unix_s if work.begins_s else 0.0,
        reduction_begin_s=work.reduction_begin_s if work.reduction_s else 0.0,
        reduction_s=work.reduction_s,
    )


def measured_value(message: sessions_pb2.MeasuredWork) -> MeasuredWork:
    """Return the measured work in a message of `measured_message`; its columns are arrays of four bytes an entry, times float32.

    Raises UserError where there is no such kind, or not one entry an action.
    """
    number = len(message.microbatches)
    columns = (message.seconds, message.chunks or message.microbatches, message.begins_s or message.microbatches)
    if message.kind not in list(Kind) or any(len(column) != number for column in columns):
        raise UserError(
            f"measured work of kind {message.kind} has {number} microbatches, {len(message.seconds)} times, "
            f"{len(message.chunks)} chunks and {len(message.begins_s)} begins: kinds are 0 to {max(Kind)}, one an action"
        )
    return MeasuredWork(
        unit=message.unit,
        replica=message.replica,
        stage=message.stage,
        kind=Kind(message.kind),
        microbatches=array("i", message.microbatches),
        seconds=array("f", message.seconds),
        chunks=array("i", message.chunks),
        begins_s=array("f", message.begins_s),
        origin_unix_s=message.origin_unix_s if message.begins_s else math.nan,
        reduction_begin_s=message.reduction_begin_s if message.reduction_s else math.nan,
        reduction_s=message.reduction_s,
    )


def plan_message(plan: StepPlan) -> sessions_pb2.WholePlan:
    """Return the message of a plan, without its prediction (`StepPlan.predicted`).

    Sample ids are sent relative to the smallest, so each takes at most two bytes in all but the largest global batches.
    """
    topology = plan.topology
    microbatches = list(chain.from_iterable(plan.replicas))
    first_sample = min(plan.sample_ids(), default=0)
    samples = {unit: [microbatch.units.get(unit, ()) for microbatch in microbatches] for unit in topology.stages}
    lengths = [len(replica) for replica in plan.replicas]

    def planned(unit: str, of_unit: Sequence[tuple[int, ...]], stages: int) -> sessions_pb2.PlannedUnit:
        ids = [sample - first_sample for sample in chain.from_iterable(of_unit)]
        return sessions_pb2.PlannedUnit(
            unit=unit,
            stages=stages,
            counts=map(len, of_unit),
            samples=ids,
            seconds=seconds(unit, of_unit),
            degrees=[plan.degrees.get(sample, 1) for sample in chain.from_iterable(of_unit)] if shares(unit) else (),
        )

    def shares(unit: str) -> bool:
        return unit == LLM and bool(plan.degrees)

    def seconds(unit: str, of_unit: Sequence[tuple[int, ...]]) -> list[float]:
        of_samples = plan.forward_s.get(unit, {})
        return [of_samples[sample] for sample in chain.from_iterable(of_unit)] if of_samples else []

    return sessions_pb2.WholePlan(
        strategy=plan.strategy,
        seed=plan.seed,
        generation=plan.generation,
        chosen=plan.chosen,
        replicas=topology.replicas,
        microbatches=topology.microbatches,
        lengths=lengths if set(lengths) != {topology.microbatches} else (),
        first_sample=first_sample,
        in_flight=plan.in_flight or 0,
        units=[planned(unit, of_unit, topology.stages[unit]) for unit, of_unit in samples.items()],
        dealt=[planned(unit, list(chain.from_iterable(replicas)), 0) for unit, replicas in plan.unit_replicas.items()],
    )


def plan_value(message: sessions_pb2.WholePlan) -> StepPlan:
    """Return the plan in a message of `plan_message`; its `predicted` is None."""
    topology = Topology(
        replicas=message.replicas,
        microbatches=message.microbatches,
        stages={unit.unit: unit.stages for unit in message.units},
    )
    samples = {unit.unit: _cut(unit, message.first_sample) for unit in message.units}
    bounds = [0, *accumulate(message.lengths or [topology.microbatches] * topology.replicas)]
    microbatches = [Microbatch(units={unit: of_unit[slot] for unit, of_unit in samples.items()}) for slot in range(bounds[-1])]
    return StepPlan(
        strategy=message.strategy,
        seed=message.seed,
        generation=message.generation,
        chosen=message.chosen,
        in_flight=message.in_flight or None,
        topology=topology,
        replicas=tuple(tuple(microbatches[first:end]) for first, end in pairwise(bounds)),
        unit_replicas={unit.unit: _by_replica(_cut(unit, message.first_sample), topology.microbatches) for unit in message.dealt},
        forward_s={
            unit.unit: dict(zip(chain.from_iterable(samples[unit.unit]), unit.seconds, strict=True))
            for unit in message.units
            if unit.seconds
        },
        degrees={
            sample: degree
            for unit in message.units
            for sample, degree in zip(chain.from_iterable(samples[unit.unit]), unit.degrees, strict=False)
            if degree > 1
        },
    )


def field_bytes(number: int, body: bytes) -> bytes:
    """Return a serialised message with one field, `number`, that holds the serialised message `body`.

    A message that goes into many others is so serialised only once.
    """
    return _varint(number << 3 | 2) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    groups = [value >> shift & 0x7F for shift in range(0, max(1, value.bit_length()), 7)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


def _by_replica(of_slots: Sequence[_T], microbatches: int) -> tuple[tuple[_T, ...], ...]:
    """Return what the slots have, replica by replica."""
    return tuple(tuple(of_slots[start : start + microbatches]) for start in range(0, len(of_slots), microbatches))


def _cut(unit: sessions_pb2.PlannedUnit, first_sample: int) -> list[tuple[int, ...]]:
    """Return the sample ids of a unit, one tuple per microbatch."""
    ids = tuple(first_sample + sample for sample in unit.samples)
    return [ids[start:end] for start, end in pairwise(accumulate(unit.counts, initial=0))]
