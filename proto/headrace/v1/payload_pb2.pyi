from headrace.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FetchRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    def __init__(self, ticket: _Optional[str] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PartHeader
    chunk: bytes
    def __init__(self, header: _Optional[_Union[PartHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class PartHeader(_message.Message):
    __slots__ = ("num_bytes", "num_samples", "rejections")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    num_samples: int
    rejections: _containers.RepeatedCompositeFieldContainer[_common_pb2.Rejection]
    def __init__(self, num_bytes: _Optional[int] = ..., num_samples: _Optional[int] = ..., rejections: _Optional[_Iterable[_Union[_common_pb2.Rejection, _Mapping]]] = ...) -> None: ...
