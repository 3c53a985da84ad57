from headrace.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FleetReports(_message.Message):
    __slots__ = ("reports",)
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    reports: _containers.RepeatedCompositeFieldContainer[FleetReport]
    def __init__(self, reports: _Optional[_Iterable[_Union[FleetReport, _Mapping]]] = ...) -> None: ...

class FleetOrders(_message.Message):
    __slots__ = ("orders",)
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    orders: _containers.RepeatedCompositeFieldContainer[FleetOrder]
    def __init__(self, orders: _Optional[_Iterable[_Union[FleetOrder, _Mapping]]] = ...) -> None: ...

class FleetReport(_message.Message):
    __slots__ = ("hello", "heartbeat", "shards_listed", "shard_indexed", "samples_probed", "part_decoded", "order_failed", "goodbye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_LISTED_FIELD_NUMBER: _ClassVar[int]
    SHARD_INDEXED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PROBED_FIELD_NUMBER: _ClassVar[int]
    PART_DECODED_FIELD_NUMBER: _ClassVar[int]
    ORDER_FAILED_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    shards_listed: ShardsListed
    shard_indexed: ShardIndexed
    samples_probed: SamplesProbed
    part_decoded: PartDecoded
    order_failed: OrderFailed
    goodbye: Goodbye
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., shards_listed: _Optional[_Union[ShardsListed, _Mapping]] = ..., shard_indexed: _Optional[_Union[ShardIndexed, _Mapping]] = ..., samples_probed: _Optional[_Union[SamplesProbed, _Mapping]] = ..., part_decoded: _Optional[_Union[PartDecoded, _Mapping]] = ..., order_failed: _Optional[_Union[OrderFailed, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("preprocessor", "endpoint", "slots", "instance", "takes_lots", "other_slots", "clock_s")
    PREPROCESSOR_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TAKES_LOTS_FIELD_NUMBER: _ClassVar[int]
    OTHER_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    preprocessor: str
    endpoint: str
    slots: int
    instance: str
    takes_lots: bool
    other_slots: int
    clock_s: float
    def __init__(self, preprocessor: _Optional[str] = ..., endpoint: _Optional[str] = ..., slots: _Optional[int] = ..., instance: _Optional[str] = ..., takes_lots: _Optional[bool] = ..., other_slots: _Optional[int] = ..., clock_s: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("samples_decoded", "bytes_decoded", "store_bytes", "store_budget_bytes", "occupancy")
    SAMPLES_DECODED_FIELD_NUMBER: _ClassVar[int]
    BYTES_DECODED_FIELD_NUMBER: _ClassVar[int]
    STORE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    OCCUPANCY_FIELD_NUMBER: _ClassVar[int]
    samples_decoded: int
    bytes_decoded: int
    store_bytes: int
    store_budget_bytes: int
    occupancy: _common_pb2.Occupancy
    def __init__(self, samples_decoded: _Optional[int] = ..., bytes_decoded: _Optional[int] = ..., store_bytes: _Optional[int] = ..., store_budget_bytes: _Optional[int] = ..., occupancy: _Optional[_Union[_common_pb2.Occupancy, _Mapping]] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShardsListed(_message.Message):
    __slots__ = ("lease", "shards", "vocabulary", "more")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    lease: str
    shards: _containers.RepeatedCompositeFieldContainer[_common_pb2.Shard]
    vocabulary: _common_pb2.Vocabulary
    more: bool
    def __init__(self, lease: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[_common_pb2.Shard, _Mapping]]] = ..., vocabulary: _Optional[_Union[_common_pb2.Vocabulary, _Mapping]] = ..., more: _Optional[bool] = ...) -> None: ...

class ShardIndexed(_message.Message):
    __slots__ = ("lease", "num_samples", "rejections")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    lease: str
    num_samples: int
    rejections: _containers.RepeatedCompositeFieldContainer[_common_pb2.Rejection]
    def __init__(self, lease: _Optional[str] = ..., num_samples: _Optional[int] = ..., rejections: _Optional[_Iterable[_Union[_common_pb2.Rejection, _Mapping]]] = ...) -> None: ...

class SamplesProbed(_message.Message):
    __slots__ = ("lease", "probes", "rejections")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PROBES_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    lease: str
    probes: _containers.RepeatedCompositeFieldContainer[_common_pb2.Probe]
    rejections: _containers.RepeatedCompositeFieldContainer[_common_pb2.Rejection]
    def __init__(self, lease: _Optional[str] = ..., probes: _Optional[_Iterable[_Union[_common_pb2.Probe, _Mapping]]] = ..., rejections: _Optional[_Iterable[_Union[_common_pb2.Rejection, _Mapping]]] = ...) -> None: ...

class StepProbed(_message.Message):
    __slots__ = ("probes", "rejections", "substitutes")
    PROBES_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    SUBSTITUTES_FIELD_NUMBER: _ClassVar[int]
    probes: _containers.RepeatedCompositeFieldContainer[_common_pb2.Probe]
    rejections: _containers.RepeatedCompositeFieldContainer[_common_pb2.Rejection]
    substitutes: _containers.RepeatedCompositeFieldContainer[_common_pb2.SampleRef]
    def __init__(self, probes: _Optional[_Iterable[_Union[_common_pb2.Probe, _Mapping]]] = ..., rejections: _Optional[_Iterable[_Union[_common_pb2.Rejection, _Mapping]]] = ..., substitutes: _Optional[_Iterable[_Union[_common_pb2.SampleRef, _Mapping]]] = ...) -> None: ...

class OrderFailed(_message.Message):
    __slots__ = ("lease", "error", "damaged")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    lease: str
    error: str
    damaged: _containers.RepeatedCompositeFieldContainer[_common_pb2.Rejection]
    def __init__(self, lease: _Optional[str] = ..., error: _Optional[str] = ..., damaged: _Optional[_Iterable[_Union[_common_pb2.Rejection, _Mapping]]] = ...) -> None: ...

class PartDecoded(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: str
    def __init__(self, lease: _Optional[str] = ...) -> None: ...

class FleetOrder(_message.Message):
    __slots__ = ("welcome", "job_opened", "list_shards", "index_shard", "probe_samples", "decode_part", "step_committed", "job_closed", "decode_parts")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    JOB_OPENED_FIELD_NUMBER: _ClassVar[int]
    LIST_SHARDS_FIELD_NUMBER: _ClassVar[int]
    INDEX_SHARD_FIELD_NUMBER: _ClassVar[int]
    PROBE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DECODE_PART_FIELD_NUMBER: _ClassVar[int]
    STEP_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    JOB_CLOSED_FIELD_NUMBER: _ClassVar[int]
    DECODE_PARTS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    job_opened: JobOpened
    list_shards: ListShards
    index_shard: IndexShard
    probe_samples: ProbeSamples
    decode_part: DecodePart
    step_committed: StepCommitted
    job_closed: JobClosed
    decode_parts: DecodeParts
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., job_opened: _Optional[_Union[JobOpened, _Mapping]] = ..., list_shards: _Optional[_Union[ListShards, _Mapping]] = ..., index_shard: _Optional[_Union[IndexShard, _Mapping]] = ..., probe_samples: _Optional[_Union[ProbeSamples, _Mapping]] = ..., decode_part: _Optional[_Union[DecodePart, _Mapping]] = ..., step_committed: _Optional[_Union[StepCommitted, _Mapping]] = ..., job_closed: _Optional[_Union[JobClosed, _Mapping]] = ..., decode_parts: _Optional[_Union[DecodeParts, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("heartbeat_s", "jobs", "num_preprocessors")
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREPROCESSORS_FIELD_NUMBER: _ClassVar[int]
    heartbeat_s: float
    jobs: _containers.RepeatedScalarFieldContainer[str]
    num_preprocessors: int
    def __init__(self, heartbeat_s: _Optional[float] = ..., jobs: _Optional[_Iterable[str]] = ..., num_preprocessors: _Optional[int] = ...) -> None: ...

class JobOpened(_message.Message):
    __slots__ = ("job", "spec_json", "ticket_key")
    JOB_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    TICKET_KEY_FIELD_NUMBER: _ClassVar[int]
    job: str
    spec_json: str
    ticket_key: bytes
    def __init__(self, job: _Optional[str] = ..., spec_json: _Optional[str] = ..., ticket_key: _Optional[bytes] = ...) -> None: ...

class ListShards(_message.Message):
    __slots__ = ("lease", "job")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    lease: str
    job: str
    def __init__(self, lease: _Optional[str] = ..., job: _Optional[str] = ...) -> None: ...

class IndexShard(_message.Message):
    __slots__ = ("lease", "job", "shard")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    lease: str
    job: str
    shard: _common_pb2.Shard
    def __init__(self, lease: _Optional[str] = ..., job: _Optional[str] = ..., shard: _Optional[_Union[_common_pb2.Shard, _Mapping]] = ...) -> None: ...

class ProbeSamples(_message.Message):
    __slots__ = ("lease", "job", "samples", "shards", "trace", "killed")
    class KilledEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    LEASE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    KILLED_FIELD_NUMBER: _ClassVar[int]
    lease: str
    job: str
    samples: _containers.RepeatedCompositeFieldContainer[_common_pb2.SampleRef]
    shards: _containers.RepeatedCompositeFieldContainer[_common_pb2.Shard]
    trace: str
    killed: _containers.ScalarMap[int, int]
    def __init__(self, lease: _Optional[str] = ..., job: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[_common_pb2.SampleRef, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[_common_pb2.Shard, _Mapping]]] = ..., trace: _Optional[str] = ..., killed: _Optional[_Mapping[int, int]] = ...) -> None: ...

class DecodePart(_message.Message):
    __slots__ = ("lease", "job", "ticket", "step", "priority", "samples", "shards", "killed", "trial", "left_out", "strict")
    class KilledEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    LEASE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    KILLED_FIELD_NUMBER: _ClassVar[int]
    TRIAL_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    lease: str
    job: str
    ticket: str
    step: int
    priority: int
    samples: _containers.RepeatedCompositeFieldContainer[_common_pb2.SampleRef]
    shards: _containers.RepeatedCompositeFieldContainer[_common_pb2.Shard]
    killed: _containers.ScalarMap[int, int]
    trial: bool
    left_out: _containers.RepeatedCompositeFieldContainer[_common_pb2.Rejection]
    strict: bool
    def __init__(self, lease: _Optional[str] = ..., job: _Optional[str] = ..., ticket: _Optional[str] = ..., step: _Optional[int] = ..., priority: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[_common_pb2.SampleRef, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[_common_pb2.Shard, _Mapping]]] = ..., killed: _Optional[_Mapping[int, int]] = ..., trial: _Optional[bool] = ..., left_out: _Optional[_Iterable[_Union[_common_pb2.Rejection, _Mapping]]] = ..., strict: _Optional[bool] = ...) -> None: ...

class DecodeParts(_message.Message):
    __slots__ = ("lease", "parts", "shards")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    lease: str
    parts: _containers.RepeatedCompositeFieldContainer[DecodePart]
    shards: _containers.RepeatedCompositeFieldContainer[_common_pb2.Shard]
    def __init__(self, lease: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[DecodePart, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[_common_pb2.Shard, _Mapping]]] = ...) -> None: ...

class StepCommitted(_message.Message):
    __slots__ = ("job", "step")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    job: str
    step: int
    def __init__(self, job: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class JobClosed(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...
