from headrace.v1 import common_pb2 as _common_pb2
from headrace.v1 import membership_pb2 as _membership_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_INDEXING: _ClassVar[JobState]
    JOB_STATE_RUNNING: _ClassVar[JobState]
    JOB_STATE_DONE: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]
    JOB_STATE_CANCELLED: _ClassVar[JobState]
    JOB_STATE_SET_ASIDE: _ClassVar[JobState]
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_INDEXING: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_DONE: JobState
JOB_STATE_FAILED: JobState
JOB_STATE_CANCELLED: JobState
JOB_STATE_SET_ASIDE: JobState

class ManifestRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class ManifestPage(_message.Message):
    __slots__ = ("shards",)
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[ManifestShard]
    def __init__(self, shards: _Optional[_Iterable[_Union[ManifestShard, _Mapping]]] = ...) -> None: ...

class ManifestShard(_message.Message):
    __slots__ = ("shard", "num_samples")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    shard: _common_pb2.Shard
    num_samples: int
    def __init__(self, shard: _Optional[_Union[_common_pb2.Shard, _Mapping]] = ..., num_samples: _Optional[int] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("spec_json",)
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    spec_json: str
    def __init__(self, spec_json: _Optional[str] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class ShowRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("finished",)
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    finished: int
    def __init__(self, finished: _Optional[int] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class DeleteReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("job", "paused")
    JOB_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    job: str
    paused: bool
    def __init__(self, job: _Optional[str] = ..., paused: _Optional[bool] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("job", "step")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    job: str
    step: int
    def __init__(self, job: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class WeightsRequest(_message.Message):
    __slots__ = ("job", "step", "weights")
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    job: str
    step: int
    weights: _containers.ScalarMap[str, float]
    def __init__(self, job: _Optional[str] = ..., step: _Optional[int] = ..., weights: _Optional[_Mapping[str, float]] = ...) -> None: ...

class TopologyRequest(_message.Message):
    __slots__ = ("job", "topology_json", "generation", "execution_json")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_JSON_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_JSON_FIELD_NUMBER: _ClassVar[int]
    job: str
    topology_json: str
    generation: int
    execution_json: str
    def __init__(self, job: _Optional[str] = ..., topology_json: _Optional[str] = ..., generation: _Optional[int] = ..., execution_json: _Optional[str] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job", "state", "message", "committed_steps", "num_steps", "committed_samples", "quarantined_samples", "num_shards", "indexed_shards", "first_loss", "last_loss", "data_wait_s", "step_s", "preprocessors", "spec_json", "planned_steps", "paused", "generation", "topology_json", "leader", "term", "ranks", "sources", "up_s", "planned_bytes", "window_bytes", "snapshot", "recoveries", "forecast_step_s", "measured_step_s", "warning", "nodes", "mixture_json")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    INDEXED_SHARDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOSS_FIELD_NUMBER: _ClassVar[int]
    LAST_LOSS_FIELD_NUMBER: _ClassVar[int]
    DATA_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    PREPROCESSORS_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    PLANNED_STEPS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_JSON_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    UP_S_FIELD_NUMBER: _ClassVar[int]
    PLANNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    RECOVERIES_FIELD_NUMBER: _ClassVar[int]
    FORECAST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    MEASURED_STEP_S_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    MIXTURE_JSON_FIELD_NUMBER: _ClassVar[int]
    job: str
    state: JobState
    message: str
    committed_steps: int
    num_steps: int
    committed_samples: int
    quarantined_samples: int
    num_shards: int
    indexed_shards: int
    first_loss: float
    last_loss: float
    data_wait_s: float
    step_s: float
    preprocessors: _containers.RepeatedCompositeFieldContainer[PreprocessorStatus]
    spec_json: str
    planned_steps: int
    paused: bool
    generation: int
    topology_json: str
    leader: str
    term: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    sources: _containers.RepeatedCompositeFieldContainer[SourceStatus]
    up_s: float
    planned_bytes: int
    window_bytes: int
    snapshot: _membership_pb2.Snapshot
    recoveries: _containers.RepeatedCompositeFieldContainer[_membership_pb2.Recovered]
    forecast_step_s: float
    measured_step_s: float
    warning: str
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    mixture_json: str
    def __init__(self, job: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., message: _Optional[str] = ..., committed_steps: _Optional[int] = ..., num_steps: _Optional[int] = ..., committed_samples: _Optional[int] = ..., quarantined_samples: _Optional[int] = ..., num_shards: _Optional[int] = ..., indexed_shards: _Optional[int] = ..., first_loss: _Optional[float] = ..., last_loss: _Optional[float] = ..., data_wait_s: _Optional[float] = ..., step_s: _Optional[float] = ..., preprocessors: _Optional[_Iterable[_Union[PreprocessorStatus, _Mapping]]] = ..., spec_json: _Optional[str] = ..., planned_steps: _Optional[int] = ..., paused: _Optional[bool] = ..., generation: _Optional[int] = ..., topology_json: _Optional[str] = ..., leader: _Optional[str] = ..., term: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., sources: _Optional[_Iterable[_Union[SourceStatus, _Mapping]]] = ..., up_s: _Optional[float] = ..., planned_bytes: _Optional[int] = ..., window_bytes: _Optional[int] = ..., snapshot: _Optional[_Union[_membership_pb2.Snapshot, _Mapping]] = ..., recoveries: _Optional[_Iterable[_Union[_membership_pb2.Recovered, _Mapping]]] = ..., forecast_step_s: _Optional[float] = ..., measured_step_s: _Optional[float] = ..., warning: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., mixture_json: _Optional[str] = ...) -> None: ...

class PreprocessorStatus(_message.Message):
    __slots__ = ("preprocessor", "endpoint", "samples_decoded", "bytes_decoded", "store_bytes", "store_budget_bytes", "leases", "slots", "occupancy", "late", "silent", "kept", "release", "clock_ahead_s")
    PREPROCESSOR_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_DECODED_FIELD_NUMBER: _ClassVar[int]
    BYTES_DECODED_FIELD_NUMBER: _ClassVar[int]
    STORE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    OCCUPANCY_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_AHEAD_S_FIELD_NUMBER: _ClassVar[int]
    preprocessor: str
    endpoint: str
    samples_decoded: int
    bytes_decoded: int
    store_bytes: int
    store_budget_bytes: int
    leases: int
    slots: int
    occupancy: _common_pb2.Occupancy
    late: int
    silent: bool
    kept: int
    release: str
    clock_ahead_s: float
    def __init__(self, preprocessor: _Optional[str] = ..., endpoint: _Optional[str] = ..., samples_decoded: _Optional[int] = ..., bytes_decoded: _Optional[int] = ..., store_bytes: _Optional[int] = ..., store_budget_bytes: _Optional[int] = ..., leases: _Optional[int] = ..., slots: _Optional[int] = ..., occupancy: _Optional[_Union[_common_pb2.Occupancy, _Mapping]] = ..., late: _Optional[int] = ..., silent: _Optional[bool] = ..., kept: _Optional[int] = ..., release: _Optional[str] = ..., clock_ahead_s: _Optional[float] = ...) -> None: ...

class SourceStatus(_message.Message):
    __slots__ = ("source", "share", "samples", "tokens", "image_patches", "mel_frames", "refused", "truncated", "filtered")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_PATCHES_FIELD_NUMBER: _ClassVar[int]
    MEL_FRAMES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    FILTERED_FIELD_NUMBER: _ClassVar[int]
    source: str
    share: float
    samples: int
    tokens: int
    image_patches: int
    mel_frames: int
    refused: int
    truncated: int
    filtered: int
    def __init__(self, source: _Optional[str] = ..., share: _Optional[float] = ..., samples: _Optional[int] = ..., tokens: _Optional[int] = ..., image_patches: _Optional[int] = ..., mel_frames: _Optional[int] = ..., refused: _Optional[int] = ..., truncated: _Optional[int] = ..., filtered: _Optional[int] = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("rank", "committed_steps", "data_wait_s", "step_s", "connected")
    RANK_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEPS_FIELD_NUMBER: _ClassVar[int]
    DATA_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    committed_steps: int
    data_wait_s: float
    step_s: float
    connected: bool
    def __init__(self, rank: _Optional[int] = ..., committed_steps: _Optional[int] = ..., data_wait_s: _Optional[float] = ..., step_s: _Optional[float] = ..., connected: _Optional[bool] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node", "connected", "leaving")
    NODE_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    node: str
    connected: bool
    leaving: bool
    def __init__(self, node: _Optional[str] = ..., connected: _Optional[bool] = ..., leaving: _Optional[bool] = ...) -> None: ...

class LedgerRequest(_message.Message):
    __slots__ = ("job", "start", "count")
    JOB_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    job: str
    start: int
    count: int
    def __init__(self, job: _Optional[str] = ..., start: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class LedgerEntry(_message.Message):
    __slots__ = ("step", "samples", "loss")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    step: int
    samples: _containers.RepeatedScalarFieldContainer[str]
    loss: float
    def __init__(self, step: _Optional[int] = ..., samples: _Optional[_Iterable[str]] = ..., loss: _Optional[float] = ...) -> None: ...

class QuarantineRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class ShowPlanRequest(_message.Message):
    __slots__ = ("job", "step")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    job: str
    step: int
    def __init__(self, job: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class ShowPlanReply(_message.Message):
    __slots__ = ("step", "plan_json", "sample_ids", "costs")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PLAN_JSON_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_IDS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    plan_json: str
    sample_ids: _containers.RepeatedScalarFieldContainer[int]
    costs: _containers.RepeatedCompositeFieldContainer[UnitCosts]
    def __init__(self, step: _Optional[int] = ..., plan_json: _Optional[str] = ..., sample_ids: _Optional[_Iterable[int]] = ..., costs: _Optional[_Iterable[_Union[UnitCosts, _Mapping]]] = ...) -> None: ...

class UnitCosts(_message.Message):
    __slots__ = ("unit", "cost_s")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    unit: str
    cost_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, unit: _Optional[str] = ..., cost_s: _Optional[_Iterable[float]] = ...) -> None: ...

class AboutRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServiceStatus(_message.Message):
    __slots__ = ("release", "protocol", "leader", "term", "up_s", "clock_s", "embedded_store", "store_tells", "forgetful", "preprocessors")
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    UP_S_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    EMBEDDED_STORE_FIELD_NUMBER: _ClassVar[int]
    STORE_TELLS_FIELD_NUMBER: _ClassVar[int]
    FORGETFUL_FIELD_NUMBER: _ClassVar[int]
    PREPROCESSORS_FIELD_NUMBER: _ClassVar[int]
    release: str
    protocol: int
    leader: str
    term: int
    up_s: float
    clock_s: float
    embedded_store: bool
    store_tells: bool
    forgetful: _containers.RepeatedCompositeFieldContainer[StoreSetting]
    preprocessors: _containers.RepeatedCompositeFieldContainer[PreprocessorStatus]
    def __init__(self, release: _Optional[str] = ..., protocol: _Optional[int] = ..., leader: _Optional[str] = ..., term: _Optional[int] = ..., up_s: _Optional[float] = ..., clock_s: _Optional[float] = ..., embedded_store: _Optional[bool] = ..., store_tells: _Optional[bool] = ..., forgetful: _Optional[_Iterable[_Union[StoreSetting, _Mapping]]] = ..., preprocessors: _Optional[_Iterable[_Union[PreprocessorStatus, _Mapping]]] = ...) -> None: ...

class StoreSetting(_message.Message):
    __slots__ = ("name", "value", "wanted")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    wanted: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ..., wanted: _Optional[str] = ...) -> None: ...
