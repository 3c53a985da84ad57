from headrace.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OfferRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OfferReply(_message.Message):
    __slots__ = ("arena", "flight_port", "ucx_port", "ucx_token")
    ARENA_FIELD_NUMBER: _ClassVar[int]
    FLIGHT_PORT_FIELD_NUMBER: _ClassVar[int]
    UCX_PORT_FIELD_NUMBER: _ClassVar[int]
    UCX_TOKEN_FIELD_NUMBER: _ClassVar[int]
    arena: str
    flight_port: int
    ucx_port: int
    ucx_token: bytes
    def __init__(self, arena: _Optional[str] = ..., flight_port: _Optional[int] = ..., ucx_port: _Optional[int] = ..., ucx_token: _Optional[bytes] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("ticket", "columns")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    columns: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ticket: _Optional[str] = ..., columns: _Optional[_Iterable[str]] = ...) -> None: ...

class PartHeader(_message.Message):
    __slots__ = ("num_bytes", "num_samples", "rejections", "crc32")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    num_samples: int
    rejections: _containers.RepeatedCompositeFieldContainer[_common_pb2.Rejection]
    crc32: int
    def __init__(self, num_bytes: _Optional[int] = ..., num_samples: _Optional[int] = ..., rejections: _Optional[_Iterable[_Union[_common_pb2.Rejection, _Mapping]]] = ..., crc32: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("status", "message")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    status: str
    message: str
    def __init__(self, status: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class SlotRequest(_message.Message):
    __slots__ = ("ticket", "arena_token")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ARENA_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    arena_token: bytes
    def __init__(self, ticket: _Optional[str] = ..., arena_token: _Optional[bytes] = ...) -> None: ...

class SlotReply(_message.Message):
    __slots__ = ("header", "offset", "generation", "refusal")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    header: PartHeader
    offset: int
    generation: int
    refusal: Refusal
    def __init__(self, header: _Optional[_Union[PartHeader, _Mapping]] = ..., offset: _Optional[int] = ..., generation: _Optional[int] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...
