from headrace.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenRequest(_message.Message):
    __slots__ = ("job", "rank", "num_ranks", "resume_step", "generation", "replicas", "together", "patient", "unit", "continues", "states")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    RESUME_STEP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    PATIENT_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    job: str
    rank: int
    num_ranks: int
    resume_step: int
    generation: int
    replicas: _containers.RepeatedScalarFieldContainer[int]
    together: bool
    patient: bool
    unit: str
    continues: str
    states: _containers.RepeatedCompositeFieldContainer[TrainerState]
    def __init__(self, job: _Optional[str] = ..., rank: _Optional[int] = ..., num_ranks: _Optional[int] = ..., resume_step: _Optional[int] = ..., generation: _Optional[int] = ..., replicas: _Optional[_Iterable[int]] = ..., together: _Optional[bool] = ..., patient: _Optional[bool] = ..., unit: _Optional[str] = ..., continues: _Optional[str] = ..., states: _Optional[_Iterable[_Union[TrainerState, _Mapping]]] = ...) -> None: ...

class TrainerState(_message.Message):
    __slots__ = ("step", "content")
    STEP_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    step: int
    content: int
    def __init__(self, step: _Optional[int] = ..., content: _Optional[int] = ...) -> None: ...

class OpenReply(_message.Message):
    __slots__ = ("session", "generation", "next_step", "spec_json", "vocabulary", "waiting", "state", "occupied")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OCCUPIED_FIELD_NUMBER: _ClassVar[int]
    session: str
    generation: int
    next_step: int
    spec_json: str
    vocabulary: _common_pb2.Vocabulary
    waiting: str
    state: TrainerState
    occupied: bool
    def __init__(self, session: _Optional[str] = ..., generation: _Optional[int] = ..., next_step: _Optional[int] = ..., spec_json: _Optional[str] = ..., vocabulary: _Optional[_Union[_common_pb2.Vocabulary, _Mapping]] = ..., waiting: _Optional[str] = ..., state: _Optional[_Union[TrainerState, _Mapping]] = ..., occupied: _Optional[bool] = ...) -> None: ...

class PlansRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class PlanEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[PlanEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[PlanEvent, _Mapping]]] = ...) -> None: ...

class PlanEvent(_message.Message):
    __slots__ = ("plan", "location", "ended")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    plan: RankPlan
    location: PartLocation
    ended: JobEnded
    def __init__(self, plan: _Optional[_Union[RankPlan, _Mapping]] = ..., location: _Optional[_Union[PartLocation, _Mapping]] = ..., ended: _Optional[_Union[JobEnded, _Mapping]] = ...) -> None: ...

class RankPlan(_message.Message):
    __slots__ = ("step", "microbatches", "num_samples", "whole", "formation", "content", "seconds", "num_targets", "max_tokens", "target_weight", "most_microbatches")
    STEP_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    FORMATION_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGETS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MOST_MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    step: int
    microbatches: _containers.RepeatedCompositeFieldContainer[RankMicrobatch]
    num_samples: int
    whole: WholePlan
    formation: int
    content: int
    seconds: _containers.RepeatedScalarFieldContainer[float]
    num_targets: int
    max_tokens: int
    target_weight: float
    most_microbatches: int
    def __init__(self, step: _Optional[int] = ..., microbatches: _Optional[_Iterable[_Union[RankMicrobatch, _Mapping]]] = ..., num_samples: _Optional[int] = ..., whole: _Optional[_Union[WholePlan, _Mapping]] = ..., formation: _Optional[int] = ..., content: _Optional[int] = ..., seconds: _Optional[_Iterable[float]] = ..., num_targets: _Optional[int] = ..., max_tokens: _Optional[int] = ..., target_weight: _Optional[float] = ..., most_microbatches: _Optional[int] = ...) -> None: ...

class WholePlan(_message.Message):
    __slots__ = ("strategy", "seed", "generation", "chosen", "replicas", "microbatches", "first_sample", "units", "lengths", "dealt", "in_flight")
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    FIRST_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    DEALT_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    strategy: str
    seed: int
    generation: int
    chosen: str
    replicas: int
    microbatches: int
    first_sample: int
    units: _containers.RepeatedCompositeFieldContainer[PlannedUnit]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    dealt: _containers.RepeatedCompositeFieldContainer[PlannedUnit]
    in_flight: int
    def __init__(self, strategy: _Optional[str] = ..., seed: _Optional[int] = ..., generation: _Optional[int] = ..., chosen: _Optional[str] = ..., replicas: _Optional[int] = ..., microbatches: _Optional[int] = ..., first_sample: _Optional[int] = ..., units: _Optional[_Iterable[_Union[PlannedUnit, _Mapping]]] = ..., lengths: _Optional[_Iterable[int]] = ..., dealt: _Optional[_Iterable[_Union[PlannedUnit, _Mapping]]] = ..., in_flight: _Optional[int] = ...) -> None: ...

class PlannedUnit(_message.Message):
    __slots__ = ("unit", "stages", "counts", "samples", "seconds", "degrees")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEGREES_FIELD_NUMBER: _ClassVar[int]
    unit: str
    stages: int
    counts: _containers.RepeatedScalarFieldContainer[int]
    samples: _containers.RepeatedScalarFieldContainer[int]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    degrees: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, unit: _Optional[str] = ..., stages: _Optional[int] = ..., counts: _Optional[_Iterable[int]] = ..., samples: _Optional[_Iterable[int]] = ..., seconds: _Optional[_Iterable[float]] = ..., degrees: _Optional[_Iterable[int]] = ...) -> None: ...

class RankMicrobatch(_message.Message):
    __slots__ = ("replica", "index", "tickets", "num_samples", "parts", "packs", "sources")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PACKS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    replica: int
    index: int
    tickets: _containers.RepeatedScalarFieldContainer[str]
    num_samples: int
    parts: _containers.RepeatedCompositeFieldContainer[PartSamples]
    packs: _containers.RepeatedCompositeFieldContainer[Pack]
    sources: _containers.RepeatedCompositeFieldContainer[SourceSamples]
    def __init__(self, replica: _Optional[int] = ..., index: _Optional[int] = ..., tickets: _Optional[_Iterable[str]] = ..., num_samples: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[PartSamples, _Mapping]]] = ..., packs: _Optional[_Iterable[_Union[Pack, _Mapping]]] = ..., sources: _Optional[_Iterable[_Union[SourceSamples, _Mapping]]] = ...) -> None: ...

class SourceSamples(_message.Message):
    __slots__ = ("source", "sample_ids")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_IDS_FIELD_NUMBER: _ClassVar[int]
    source: int
    sample_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, source: _Optional[int] = ..., sample_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Pack(_message.Message):
    __slots__ = ("sample_ids",)
    SAMPLE_IDS_FIELD_NUMBER: _ClassVar[int]
    sample_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sample_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PartSamples(_message.Message):
    __slots__ = ("sample_ids",)
    SAMPLE_IDS_FIELD_NUMBER: _ClassVar[int]
    sample_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sample_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PartLocation(_message.Message):
    __slots__ = ("ticket", "lease", "endpoint", "left_out")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    lease: str
    endpoint: str
    left_out: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ticket: _Optional[str] = ..., lease: _Optional[str] = ..., endpoint: _Optional[str] = ..., left_out: _Optional[_Iterable[int]] = ...) -> None: ...

class JobEnded(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class ReportLostRequest(_message.Message):
    __slots__ = ("session", "ticket", "lease")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    session: str
    ticket: str
    lease: str
    def __init__(self, session: _Optional[str] = ..., ticket: _Optional[str] = ..., lease: _Optional[str] = ...) -> None: ...

class ReportLostReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session", "step", "rejections", "loss", "step_s", "data_wait_s", "wait", "measured", "content")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    DATA_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    session: str
    step: int
    rejections: _containers.RepeatedCompositeFieldContainer[_common_pb2.Rejection]
    loss: float
    step_s: float
    data_wait_s: float
    wait: bool
    measured: _containers.RepeatedCompositeFieldContainer[MeasuredWork]
    content: int
    def __init__(self, session: _Optional[str] = ..., step: _Optional[int] = ..., rejections: _Optional[_Iterable[_Union[_common_pb2.Rejection, _Mapping]]] = ..., loss: _Optional[float] = ..., step_s: _Optional[float] = ..., data_wait_s: _Optional[float] = ..., wait: _Optional[bool] = ..., measured: _Optional[_Iterable[_Union[MeasuredWork, _Mapping]]] = ..., content: _Optional[int] = ...) -> None: ...

class MeasuredWork(_message.Message):
    __slots__ = ("unit", "replica", "stage", "kind", "microbatches", "seconds", "chunks", "begins_s", "origin_unix_s", "reduction_begin_s", "reduction_s")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BEGINS_S_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_BEGIN_S_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_S_FIELD_NUMBER: _ClassVar[int]
    unit: str
    replica: int
    stage: int
    kind: int
    microbatches: _containers.RepeatedScalarFieldContainer[int]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    chunks: _containers.RepeatedScalarFieldContainer[int]
    begins_s: _containers.RepeatedScalarFieldContainer[float]
    origin_unix_s: float
    reduction_begin_s: float
    reduction_s: float
    def __init__(self, unit: _Optional[str] = ..., replica: _Optional[int] = ..., stage: _Optional[int] = ..., kind: _Optional[int] = ..., microbatches: _Optional[_Iterable[int]] = ..., seconds: _Optional[_Iterable[float]] = ..., chunks: _Optional[_Iterable[int]] = ..., begins_s: _Optional[_Iterable[float]] = ..., origin_unix_s: _Optional[float] = ..., reduction_begin_s: _Optional[float] = ..., reduction_s: _Optional[float] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("committed", "missing")
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    committed: bool
    missing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, committed: _Optional[bool] = ..., missing: _Optional[_Iterable[int]] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class CloseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RelayRequest(_message.Message):
    __slots__ = ("listen", "leave", "commits", "opens")
    LISTEN_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    listen: _containers.RepeatedScalarFieldContainer[str]
    leave: _containers.RepeatedScalarFieldContainer[str]
    commits: _containers.RepeatedCompositeFieldContainer[CommitRequest]
    opens: _containers.RepeatedCompositeFieldContainer[RelayedOpenRequest]
    def __init__(self, listen: _Optional[_Iterable[str]] = ..., leave: _Optional[_Iterable[str]] = ..., commits: _Optional[_Iterable[_Union[CommitRequest, _Mapping]]] = ..., opens: _Optional[_Iterable[_Union[RelayedOpenRequest, _Mapping]]] = ...) -> None: ...

class RelayedOpenRequest(_message.Message):
    __slots__ = ("call", "request")
    CALL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    call: int
    request: OpenRequest
    def __init__(self, call: _Optional[int] = ..., request: _Optional[_Union[OpenRequest, _Mapping]] = ...) -> None: ...

class RelayReply(_message.Message):
    __slots__ = ("events", "ends", "commits", "opened", "opens")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[RelayedEvents]
    ends: _containers.RepeatedCompositeFieldContainer[RelayedEnd]
    commits: _containers.RepeatedCompositeFieldContainer[RelayedCommit]
    opened: _containers.RepeatedCompositeFieldContainer[RelayedOpenReply]
    opens: bool
    def __init__(self, events: _Optional[_Iterable[_Union[RelayedEvents, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[RelayedEnd, _Mapping]]] = ..., commits: _Optional[_Iterable[_Union[RelayedCommit, _Mapping]]] = ..., opened: _Optional[_Iterable[_Union[RelayedOpenReply, _Mapping]]] = ..., opens: _Optional[bool] = ...) -> None: ...

class RelayedOpenReply(_message.Message):
    __slots__ = ("call", "reply", "status", "error")
    CALL_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    call: int
    reply: OpenReply
    status: int
    error: str
    def __init__(self, call: _Optional[int] = ..., reply: _Optional[_Union[OpenReply, _Mapping]] = ..., status: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class RelayedEvents(_message.Message):
    __slots__ = ("sessions", "events", "compressed")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    COMPRESSED_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedScalarFieldContainer[str]
    events: bytes
    compressed: bool
    def __init__(self, sessions: _Optional[_Iterable[str]] = ..., events: _Optional[bytes] = ..., compressed: _Optional[bool] = ...) -> None: ...

class RelayedEnd(_message.Message):
    __slots__ = ("session", "status", "error")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    session: str
    status: int
    error: str
    def __init__(self, session: _Optional[str] = ..., status: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class RelayedCommit(_message.Message):
    __slots__ = ("sessions", "step", "reply", "status", "error")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedScalarFieldContainer[str]
    step: int
    reply: CommitReply
    status: int
    error: str
    def __init__(self, sessions: _Optional[_Iterable[str]] = ..., step: _Optional[int] = ..., reply: _Optional[_Union[CommitReply, _Mapping]] = ..., status: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...
