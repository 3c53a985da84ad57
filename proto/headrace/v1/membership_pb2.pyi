from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeMessage(_message.Message):
    __slots__ = ("hello", "heartbeat", "leave", "recovered", "cut_off")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_FIELD_NUMBER: _ClassVar[int]
    CUT_OFF_FIELD_NUMBER: _ClassVar[int]
    hello: NodeHello
    heartbeat: NodeHeartbeat
    leave: Leave
    recovered: Recovered
    cut_off: CutOff
    def __init__(self, hello: _Optional[_Union[NodeHello, _Mapping]] = ..., heartbeat: _Optional[_Union[NodeHeartbeat, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., recovered: _Optional[_Union[Recovered, _Mapping]] = ..., cut_off: _Optional[_Union[CutOff, _Mapping]] = ...) -> None: ...

class NodeHello(_message.Message):
    __slots__ = ("job", "node", "address", "generation", "spec", "leaving", "process")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    job: str
    node: str
    address: str
    generation: int
    spec: NodesSpec
    leaving: bool
    process: int
    def __init__(self, job: _Optional[str] = ..., node: _Optional[str] = ..., address: _Optional[str] = ..., generation: _Optional[int] = ..., spec: _Optional[_Union[NodesSpec, _Mapping]] = ..., leaving: _Optional[bool] = ..., process: _Optional[int] = ...) -> None: ...

class NodesSpec(_message.Message):
    __slots__ = ("num_nodes", "max_failures", "num_microbatches", "profile", "on_loss", "training", "gpus_per_node")
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_FAILURES_FIELD_NUMBER: _ClassVar[int]
    NUM_MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    ON_LOSS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    GPUS_PER_NODE_FIELD_NUMBER: _ClassVar[int]
    num_nodes: int
    max_failures: int
    num_microbatches: int
    profile: ModelProfile
    on_loss: str
    training: str
    gpus_per_node: int
    def __init__(self, num_nodes: _Optional[int] = ..., max_failures: _Optional[int] = ..., num_microbatches: _Optional[int] = ..., profile: _Optional[_Union[ModelProfile, _Mapping]] = ..., on_loss: _Optional[str] = ..., training: _Optional[str] = ..., gpus_per_node: _Optional[int] = ...) -> None: ...

class ModelProfile(_message.Message):
    __slots__ = ("units", "seconds", "layer_bytes", "memory_bytes")
    UNITS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAYER_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    units: _containers.RepeatedCompositeFieldContainer[UnitLayers]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    layer_bytes: _containers.RepeatedScalarFieldContainer[int]
    memory_bytes: int
    def __init__(self, units: _Optional[_Iterable[_Union[UnitLayers, _Mapping]]] = ..., seconds: _Optional[_Iterable[float]] = ..., layer_bytes: _Optional[_Iterable[int]] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class UnitLayers(_message.Message):
    __slots__ = ("unit", "num_layers")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    unit: str
    num_layers: int
    def __init__(self, unit: _Optional[str] = ..., num_layers: _Optional[int] = ...) -> None: ...

class NodeHeartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Leave(_message.Message):
    __slots__ = ("done",)
    DONE_FIELD_NUMBER: _ClassVar[int]
    done: bool
    def __init__(self, done: _Optional[bool] = ...) -> None: ...

class Recovered(_message.Message):
    __slots__ = ("generation", "step", "phases", "change", "choice", "formation")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    FORMATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    phases: _containers.RepeatedCompositeFieldContainer[Phase]
    change: str
    choice: str
    formation: Formation
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., phases: _Optional[_Iterable[_Union[Phase, _Mapping]]] = ..., change: _Optional[str] = ..., choice: _Optional[str] = ..., formation: _Optional[_Union[Formation, _Mapping]] = ...) -> None: ...

class Formation(_message.Message):
    __slots__ = ("generation", "first_step", "pipelines")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    PIPELINES_FIELD_NUMBER: _ClassVar[int]
    generation: int
    first_step: int
    pipelines: _containers.RepeatedCompositeFieldContainer[Pipeline]
    def __init__(self, generation: _Optional[int] = ..., first_step: _Optional[int] = ..., pipelines: _Optional[_Iterable[_Union[Pipeline, _Mapping]]] = ...) -> None: ...

class CutOff(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class Phase(_message.Message):
    __slots__ = ("name", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("generation", "nodes", "pipelines", "at_step_end", "change", "error", "urgent", "choice")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    PIPELINES_FIELD_NUMBER: _ClassVar[int]
    AT_STEP_END_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    URGENT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    pipelines: _containers.RepeatedCompositeFieldContainer[Pipeline]
    at_step_end: bool
    change: str
    error: str
    urgent: int
    choice: str
    def __init__(self, generation: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., pipelines: _Optional[_Iterable[_Union[Pipeline, _Mapping]]] = ..., at_step_end: _Optional[bool] = ..., change: _Optional[str] = ..., error: _Optional[str] = ..., urgent: _Optional[int] = ..., choice: _Optional[str] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("name", "address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Pipeline(_message.Message):
    __slots__ = ("stages", "num_microbatches")
    STAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedCompositeFieldContainer[PipelineStage]
    num_microbatches: int
    def __init__(self, stages: _Optional[_Iterable[_Union[PipelineStage, _Mapping]]] = ..., num_microbatches: _Optional[int] = ...) -> None: ...

class PipelineStage(_message.Message):
    __slots__ = ("rank", "unit", "first_layer", "end_layer", "process")
    RANK_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    unit: str
    first_layer: int
    end_layer: int
    process: int
    def __init__(self, rank: _Optional[int] = ..., unit: _Optional[str] = ..., first_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., process: _Optional[int] = ...) -> None: ...
