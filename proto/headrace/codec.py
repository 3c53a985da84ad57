"""Values to messages and back."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.manifest import ShardInfo, ShardTable, Vocabulary
from headrace.quarantine import Reason, Rejected
from headrace.sample import Probe, SampleRef
from headrace.v1 import common_pb2


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
    )


def probe_value(message: common_pb2.Probe) -> Probe:
    return Probe(
        name=message.name,
        num_tokens=message.num_tokens,
        num_targets=message.num_targets,
        image_patches=tuple(message.image_patches),
        mel_frames=tuple(message.mel_frames),
    )


def rejection_message(item: Rejected) -> common_pb2.Rejection:
    sample_id = item.sample_id if item.sample_id is not None else -1
    return common_pb2.Rejection(sample_id=sample_id, name=item.name, reason=str(item.reason), detail=item.detail, row=item.row)


def rejection_value(message: common_pb2.Rejection) -> Rejected:
    sample_id = message.sample_id if message.sample_id >= 0 else None
    row = message.row if message.HasField("row") else None
    return Rejected(name=message.name, reason=Reason(message.reason), detail=message.detail, sample_id=sample_id, row=row)


def shard_message(number: int, shard: ShardInfo) -> common_pb2.Shard:
    return common_pb2.Shard(source=shard.source, url=shard.url, name=shard.name, number=number)


def shard_value(message: common_pb2.Shard) -> ShardInfo:
    return ShardInfo(source=message.source, url=message.url, name=message.name)


def shard_table(messages: Sequence[common_pb2.Shard]) -> ShardTable:
    """Of a whole manifest, in its order."""
    return ShardTable([m.source for m in messages], [m.url for m in messages], [m.name for m in messages])


def vocabulary_message(vocabulary: Vocabulary) -> common_pb2.Vocabulary:
    return common_pb2.Vocabulary(size=vocabulary.size, image_token=vocabulary.image_token, audio_token=vocabulary.audio_token)


def vocabulary_value(message: common_pb2.Vocabulary) -> Vocabulary:
    return Vocabulary(size=message.size, image_token=message.image_token, audio_token=message.audio_token)
