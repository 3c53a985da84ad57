from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class SampleRef(_message.Message):
    __slots__ = ("sample_id", "shard", "row")
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    sample_id: int
    shard: int
    row: int
    def __init__(self, sample_id: _Optional[int] = ..., shard: _Optional[int] = ..., row: _Optional[int] = ...) -> None: ...

class Occupancy(_message.Message):
    __slots__ = ("ordered", "read", "decoding", "stored")
    ORDERED_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    ordered: int
    read: int
    decoding: int
    stored: int
    def __init__(self, ordered: _Optional[int] = ..., read: _Optional[int] = ..., decoding: _Optional[int] = ..., stored: _Optional[int] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("sample_id", "name", "num_tokens", "num_targets", "image_patches", "mel_frames", "is_truncated", "target_weight")
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGETS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_PATCHES_FIELD_NUMBER: _ClassVar[int]
    MEL_FRAMES_FIELD_NUMBER: _ClassVar[int]
    IS_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    TARGET_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    sample_id: int
    name: str
    num_tokens: int
    num_targets: int
    image_patches: _containers.RepeatedScalarFieldContainer[int]
    mel_frames: _containers.RepeatedScalarFieldContainer[int]
    is_truncated: bool
    target_weight: float
    def __init__(self, sample_id: _Optional[int] = ..., name: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_targets: _Optional[int] = ..., image_patches: _Optional[_Iterable[int]] = ..., mel_frames: _Optional[_Iterable[int]] = ..., is_truncated: _Optional[bool] = ..., target_weight: _Optional[float] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("sample_id", "name", "reason", "detail", "row", "modality", "thumbnail")
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    THUMBNAIL_FIELD_NUMBER: _ClassVar[int]
    sample_id: int
    name: str
    reason: str
    detail: str
    row: int
    modality: str
    thumbnail: bytes
    def __init__(self, sample_id: _Optional[int] = ..., name: _Optional[str] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ..., row: _Optional[int] = ..., modality: _Optional[str] = ..., thumbnail: _Optional[bytes] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("source", "url", "name", "number")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    source: int
    url: str
    name: str
    number: int
    def __init__(self, source: _Optional[int] = ..., url: _Optional[str] = ..., name: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class Vocabulary(_message.Message):
    __slots__ = ("size", "image_token", "audio_token")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    AUDIO_TOKEN_FIELD_NUMBER: _ClassVar[int]
    size: int
    image_token: int
    audio_token: int
    def __init__(self, size: _Optional[int] = ..., image_token: _Optional[int] = ..., audio_token: _Optional[int] = ...) -> None: ...
