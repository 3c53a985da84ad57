"""Sends what one process has to the other processes of a group: protobuf, and microbatches as tensors.

On one host without GPUs, the payload of microbatches is in memory that all processes of the group read, and only where it lies is
sent. Else it is broadcast: from GPU to GPU by NCCL, if the group has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from headrace import errors
from headrace.trainer.loading.buffers import BufferPool, aligned
from headrace.trainer.loading.collate import PAYLOAD, PackedMicrobatch, collate
from headrace.trainer.loading.device_copy import to_device
from headrace.trainer.loading.group_memory import GroupMemory, GroupMemoryView

_T = TypeVar("_T")

BEAT_S = 5.0
"""Seconds after which the sender says that it is still waiting itself: far less than the timeout of any group, so that a group's
timeout is never about how long data, or commits of other ranks, take."""

_MEDIA = ("patches", "mel")
_TOKENS = tuple(name for name in PAYLOAD if name not in _MEDIA)
_EMPTY = collate([])
_DTYPES = {f.name: value.dtype for f in fields(_EMPTY) if isinstance(value := getattr(_EMPTY, f.name), Tensor)}
_LAYOUT = tuple(name for name in _DTYPES if name not in PAYLOAD)
_SAYS, _WAITS, _FAILS = range(3)
_MOST_IDLE_BYTES = 256 << 20  # of blocks of the memory that the processes share
_NOWHERE = -1  # in place of an offset in that memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What the sender has for the others."""

    text: bytes = b""
    numbers: Sequence[int] = ()
    data: PackedMicrobatch | None = None
    step: int = 0
    """Of `data`."""


class GroupChannel:
    """Messages from one process of a group to all others. Every process of the group makes the same calls in the same order.

    Numbers and layouts are sent between hosts' memory where the group can do that. Payload may be read until `forget` is called
    for its step, as it may lie in memory that all processes read.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """`group`: None: this process is alone, and sends to nobody. `sender`, the group rank of the sender, is 0 at first."""
        backends = dist.get_backend_config(group) if group is not None else "cpu:none"
        host = torch.device("cpu")
        gpu = torch.device("cuda", torch.cuda.current_device()) if "cuda:nccl" in backends else host
        self.device = gpu
        """Where received payload lies, and payload to be sent has to lie."""
        self._numbers_device = host if "cpu:" in backends else gpu
        self._group = self._media_group = group
        self._takes_media = True
        self.rank = dist.get_rank(group) if group is not None else 0
        self.sender = 0
        self.buffers: BufferPool | None = None
        """In the sender, where all processes share memory: the pool whose tensors the others can read in place."""
        self._memory: GroupMemory | GroupMemoryView | None = None
        self._sent: dict[int, list[PackedMicrobatch]] = {}  # by step: what the others may be reading
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="group")

    @property
    def is_sender(self) -> bool:
        return self.rank == self.sender

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every process, as many from each, by group rank."""
        mine = torch.tensor(list(numbers), dtype=torch.float64, device=self._numbers_device)
        if self._group is None:
            return [mine.tolist()]
        all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(all_of_them, mine, group=self._group)
        return [theirs.tolist() for theirs in all_of_them]

    def send_media_to(self, ranks: Sequence[int]) -> None:
        """Have patches and mel go to these group ranks only, the sender's among them. Others get them empty."""
        assert self._group is not None
        if len(ranks) == dist.get_world_size(self._group) or self._media_group is not self._group:  # or it was called before
            return
        self._takes_media = self.rank in ranks
        if len(ranks) == 1:
            self._media_group = None
        elif self._takes_media:
            members = [dist.get_global_rank(self._group, rank) for rank in ranks]
            self._media_group = dist.new_group(members, use_local_synchronization=True, group_desc="headrace media")

    def share_memory(self) -> None:
        """Have payload lie in memory that all processes read, where they are all on one host.

        With GPUs it stays in page-locked memory, for copies to them. Comes behind the choice of the sender.
        """
        if self._group is None or self.device.type != "cpu" or self._memory is not None:
            return
        memory: GroupMemory | None = None

        def offer() -> Message:
            nonlocal memory
            with contextlib.suppress(OSError):
                memory = GroupMemory() if not torch.cuda.is_available() else None
            return Message(text=str(memory.path).encode() if memory is not None else b"")

        path, seen = self.share(offer).text.decode(), None
        if path and not self.is_sender:
            with contextlib.suppress(OSError, ValueError):
                seen = GroupMemoryView(Path(path))
        all_see = all(one[0] for one in self.gather([(memory or seen) is not None]))
        if memory is not None:
            memory.remove_name()
            self.buffers = BufferPool(_MOST_IDLE_BYTES, allocate=memory.allocate) if all_see else None
        self._memory = (memory or seen) if all_see else None

    def forget(self, step: int) -> None:
        """Reuse the memory of a step's payload, which no process reads any more."""
        self._sent.pop(step, None)

    def share(self, produce: Callable[[], Message]) -> Message:
        """Return what `produce` returns in the sender, in every process. Raises in every process what it raises there."""
        if self._group is None:
            return produce()
        return self._send(produce) if self.is_sender else self._receive()

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    def _send(self, produce: Callable[[], Message]) -> Message:
        try:
            message = self._with_beats(produce)
        except Exception as err:
            self._say(_FAILS, Message(text=f"{type(err).__name__}\n{err}".encode()))
            raise
        if message.data is None:
            self._say(_SAYS, message)
            return message
        data = self._in_memory(message.data)
        places = self._places(data)
        self._say(_SAYS, replace(message, data=data), places)
        if _NOWHERE in places:
            data = self._send_payload(data)
        else:
            self._sent.setdefault(message.step, []).append(data)
        return replace(message, data=data)

    def _with_beats(self, produce: Callable[[], _T]) -> _T:
        """Return what `produce` returns, and tell the others now and then that it takes longer."""
        future: Future[_T] = self._pool.submit(produce)
        while True:
            try:
                return future.result(timeout=BEAT_S)
            except TimeoutError:
                if future.done():
                    raise
                self._say(_WAITS, Message())

    def _in_memory(self, data: PackedMicrobatch) -> PackedMicrobatch:
        """Return a microbatch with its payload in the memory that all processes read, if there is any, and room in it."""
        if self.buffers is None:
            return data
        assert isinstance(self._memory, GroupMemory)
        payload = {name: getattr(data, name) for name in PAYLOAD}
        outside = {name: tensor for name, tensor in payload.items() if tensor.numel() and self._memory.place(tensor) is None}
        if not outside:
            return data
        copies = self.buffers.take(sum(aligned(tensor.nbytes) for tensor in outside.values()))
        start = 0
        for name, tensor in outside.items():
            copy = copies[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copy.numpy()[...] = tensor.numpy()
            payload[name] = copy
            start += aligned(tensor.nbytes)
        return replace(data, **payload)

    def _places(self, data: PackedMicrobatch) -> list[int]:
        """Return where in that memory each tensor of the payload lies; _NOWHERE where it does not."""
        if not isinstance(self._memory, GroupMemory):
            return [_NOWHERE] * len(PAYLOAD)
        tensors = (getattr(data, name) for name in PAYLOAD)
        places = [self._memory.place(tensor) if tensor.numel() else 0 for tensor in tensors]
        return [_NOWHERE if place is None else place for place in places]

    def _say(self, kind: int, message: Message, places: Sequence[int] = (_NOWHERE,) * len(PAYLOAD)) -> None:
        """Send all of a message but its payload: a header of fixed size, then a body of the length that the header says."""
        data = message.data
        layout = [getattr(data, name).flatten().long() for name in _LAYOUT] if data is not None else []
        padded = np.frombuffer(message.text + bytes(-len(message.text) % 8), np.int64).copy()
        body = torch.cat((torch.tensor(message.numbers, dtype=torch.int64), torch.from_numpy(padded), *layout))
        sizes = [n for name in _DTYPES for n in _size(getattr(data, name))] if data is not None else [0] * (2 * len(_DTYPES))
        lengths = [len(message.numbers), len(message.text), len(body), data.num_targets if data is not None else -1]
        self._broadcast(torch.tensor([kind, *lengths, *places, *sizes]).to(self._numbers_device), self._group)
        if len(body):
            self._broadcast(body.to(self._numbers_device), self._group)

    def _send_payload(self, data: PackedMicrobatch) -> PackedMicrobatch:
        """Send the payload of a microbatch, and return it with its payload where the others have it."""
        sent = {name: to_device(getattr(data, name), self.device) for name in PAYLOAD}
        self._broadcast(torch.cat([_as_numbers(sent[name]) for name in _TOKENS]), self._group)
        for name in _MEDIA:
            self._broadcast(sent[name].view(torch.uint8), self._media_group)
        return replace(data, **sent)

    def _receive(self) -> Message:
        """Return the sender's next message. Raises the error that it says it has."""
        while True:
            header = torch.empty(5 + len(PAYLOAD) + 2 * len(_DTYPES), dtype=torch.int64, device=self._numbers_device)
            self._broadcast(header, self._group)
            kind, num_numbers, num_bytes, num_words, num_targets, *rest = header.tolist()
            places, flat_sizes = rest[: len(PAYLOAD)], rest[len(PAYLOAD) :]
            if kind == _WAITS:
                continue
            body = torch.empty(num_words, dtype=torch.int64, device=self._numbers_device)
            if num_words:
                self._broadcast(body, self._group)
            body = body.cpu()
            layout_at = num_numbers + -(-num_bytes // 8)
            text = body[num_numbers:layout_at].numpy().tobytes()[:num_bytes]
            if kind == _FAILS:
                raise _error(text.decode())
            sizes = dict(zip(_DTYPES, zip(flat_sizes[::2], flat_sizes[1::2], strict=True), strict=True))
            data = None
            if num_targets >= 0:
                layout = _split(body[layout_at:], {name: sizes[name] for name in _LAYOUT})
                payload = self._receive_payload(sizes) if _NOWHERE in places else self._read_payload(sizes, places)
                data = PackedMicrobatch(**layout, **payload, num_targets=num_targets)
            return Message(text=text, numbers=body[:num_numbers].tolist(), data=data)

    def _read_payload(self, sizes: Mapping[str, tuple[int, int]], places: Sequence[int]) -> dict[str, Tensor]:
        """Return the payload that lies in the memory of the group."""
        memory = self._memory
        assert isinstance(memory, GroupMemoryView)
        payload = {}
        for name, place in zip(PAYLOAD, places, strict=True):
            rows, width = sizes[name]
            size = (rows,) if width < 0 else (rows if self._takes_media or name not in _MEDIA else 0, width)
            payload[name] = memory.tensor(place, size, _DTYPES[name])
        return payload

    def _receive_payload(self, sizes: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
        of_tokens = {name: sizes[name] for name in _TOKENS}
        tokens = torch.empty(sum(map(_count, of_tokens.values())), dtype=torch.int64, device=self.device)
        self._broadcast(tokens, self._group)
        payload = _split(tokens, of_tokens)
        for name in _MEDIA:
            rows, width = sizes[name]
            payload[name] = torch.empty(rows if self._takes_media else 0, width, dtype=_DTYPES[name], device=self.device)
            if self._takes_media:
                self._broadcast(payload[name].view(torch.uint8), self._media_group)
        return payload

    def _broadcast(self, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
        if group is not None and tensor.numel():
            assert self._group is not None
            dist.broadcast(tensor, dist.get_global_rank(self._group, self.sender), group=group)


def _size(tensor: Tensor) -> tuple[int, int]:
    """Return the shape of a tensor as two numbers; the second one is -1 where it has one dimension."""
    return (tensor.shape[0], -1) if tensor.ndim == 1 else (tensor.shape[0], tensor.shape[1])


def _count(size: tuple[int, int]) -> int:
    return size[0] * (size[1] if size[1] >= 0 else 1)


def _split(flat: Tensor, sizes: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Return the tensors of these sizes that lie one behind the other in a flat one, each in its own dtype."""
    pieces = torch.split(flat, [_count(size) for size in sizes.values()])
    return {
        name: _of_numbers(piece, _DTYPES[name]).view(size if size[1] >= 0 else size[:1])
        for (name, size), piece in zip(sizes.items(), pieces, strict=True)
    }


def _as_numbers(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as flat int64, float32 by their bits."""
    return (tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor).flatten().long()


def _of_numbers(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of which `_as_numbers` has made numbers."""
    return numbers.int().view(dtype) if dtype == torch.float32 else numbers.to(dtype)


def _error(text: str) -> errors.HeadraceError:
    """Return the error that the sender had, by its class's name; of another class than those of `headrace.errors`: the base's."""
    name, _, words = text.partition("\n")
    known = getattr(errors, name, None)
    if isinstance(known, type) and issubclass(known, errors.HeadraceError):
        return known(words)
    return errors.HeadraceError(f"{name} in the process that fetches for this one: {words}")
