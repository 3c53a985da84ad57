"""A connection over one UCX endpoint, which carries tagged messages.

The receiver probes for a message, and gives memory for it only once it has arrived and its length is known. Large messages use
rendezvous: only a description arrives, and the receiver's adapter, if it can, reads the bytes out of the sender's memory straight
into the receiver's. A receive is never posted for a message that may not come, because the binding cannot cancel such a request
and would leak its endpoint with it. So every operation ends with the connection at the latest.

Tags are matched across the whole worker, so 62 bits of each are a number from a random start, and the other two are its Role.

UCX's registration cache registers memory with the adapter at its first use (the binding has no call for it), and keeps it
registered as long as it is mapped: reused buffers cost nothing more.
"""

from __future__ import annotations

import enum
import itertools
import secrets
import struct
from collections.abc import Callable, Iterator
from typing import Any

from headrace.transport import ucx_library
from headrace.transport.ucx_library import UcxError
from headrace.transport.ucx_loop import UcxLoop

NUMBER_BITS = 62


class Role(enum.IntEnum):
    """The role of a message, in the upper two bits of its tag. The lower 62 bits are a connection's or a question's number."""

    QUESTION = 0
    """A rank's message to a preprocessor, tagged with the connection's number from HELLO: QUESTION_HEAD, then a FetchRequest if
    its kind is ASK."""
    REPLY = 1
    """The answer to a question, tagged with the question's number: REPLY_HEAD, then a PartHeader or a Refusal."""
    PAYLOAD = 2
    """The bytes of a part, which follow a reply of kind PART under the same number."""


class Kind(enum.IntEnum):
    """The kind of a question (ASK, GIVE_UP) or of a reply (PART, REFUSED)."""

    ASK = 1
    GIVE_UP = 2
    """The rank no longer waits for the part of that number, but still receives the reply and any payload after it."""
    PART = 3
    REFUSED = 4


HELLO = struct.Struct("<I16sQ")
"""The first message of a producer, on UCX's stream: version, the token that it announced by gRPC, and the connection's number."""
QUESTION_HEAD = struct.Struct("<BQ")  # kind, number
REPLY_HEAD = struct.Struct("<B")  # kind

Done = Callable[[UcxError | None], None]
"""A callback, called once, on the UCX thread, when UCX no longer uses an operation's memory; with the error if the operation
failed."""


def numbers() -> Iterator[int]:
    """Return an endless iterator over consecutive 62-bit numbers for tags, from a random start."""
    return (number % (1 << NUMBER_BITS) for number in itertools.count(secrets.randbits(NUMBER_BITS)))


class Connection:
    """A connection over one UCX endpoint, which sends and receives tagged messages. For use on the loop's thread only."""

    def __init__(self, loop: UcxLoop, endpoint: Any, on_lost: Callable[[Connection], None]) -> None:
        """`on_lost` is called once when the connection ends, for whatever reason. Operations under way end shortly afterwards."""
        self._loop = loop
        self._endpoint = endpoint
        self._on_lost = on_lost
        self.lost: str | None = None
        """The reason why the connection is lost; None while it is not."""
        loop.at_close.add(self._end_with_loop)
        loop.until(self._is_dead)

    @property
    def lanes(self) -> tuple[str, ...]:
        """The UCX lanes of the connection, each as TRANSPORT/DEVICE (`ucx_library.lanes`). They are known once a message has
        arrived; empty after the connection is lost."""
        return () if self._endpoint is None else ucx_library.lanes(self._endpoint)

    def greet(self, hello: bytes) -> None:
        """Send a packed HELLO, as the producer does first."""
        if self._endpoint is not None:
            self._watch(self._endpoint.stream_send(self._loop.library.array(hello)), hello, self._ignore)

    def await_greeting(self, done: Callable[[bytes | UcxError], None]) -> None:
        """Receive the producer's HELLO, and call `done` with its bytes, or with the error if the connection was lost."""
        hello = bytearray(HELLO.size)
        request = self._endpoint.stream_recv(self._loop.library.array(hello))
        self._watch(request, hello, lambda error: done(error or bytes(hello)))

    def send(self, role: Role, number: int, data: bytes | memoryview, done: Done | None = None) -> None:
        """Send a message tagged with `role` and `number`. The caller must not change `data` until `done` is called.

        A lost connection is reported through `done`, too.
        """
        done = done or self._ignore
        if self._endpoint is None:
            done(UcxError(f"the connection is lost ({self.lost})"))
        else:
            self._watch(self._endpoint.tag_send(self._loop.library.array(data), self._tag(role, number)), data, done)

    def receive(self, role: Role, number: int, room: Callable[[int], bytearray | memoryview], done: Done) -> None:
        """Receive the next message tagged with `role` and `number` once it arrives, and then call `done`.

        `room(num_bytes)` must return memory of exactly that size for it. If it raises UcxError, the message is left unread, the
        connection is closed, and `done` gets the error. `done` also gets an error if the connection is lost first.
        """
        library, worker, tag = self._loop.library, self._loop.worker, self._tag(role, number)

        def has_come() -> bool:
            found = worker.tag_probe(tag)
            if not found.matched:
                if self.lost is not None:
                    done(UcxError(f"the connection is lost ({self.lost})"))
                return self.lost is not None
            try:
                buffer = room(found.length)
            except UcxError as err:
                self.close(str(err))
                done(err)
                return True
            message = worker.tag_probe(tag, remove=True)
            self._watch(worker.tag_recv_with_handle(library.array(buffer), message), buffer, done)
            return True

        self._loop.until(has_come)

    def close(self, reason: str) -> None:
        """End the connection by force: the peer sees a reset. `reason` becomes `lost`."""
        if self._endpoint is None:
            return
        endpoint, self._endpoint, self.lost = self._endpoint, None, reason
        self._loop.at_close.discard(self._end_with_loop)
        endpoint.close_blocking()
        self._on_lost(self)

    def _end_with_loop(self) -> None:
        self.close("UCX is closed")

    def _is_dead(self) -> bool:
        if self._endpoint is not None and not self._endpoint.alive:
            try:
                self._endpoint.raise_on_error()
            except self._loop.library.error as err:
                self.close(str(err).rpartition("error: ")[2].lower())
        return self._endpoint is None

    def _tag(self, role: Role, number: int) -> Any:
        return self._loop.library.api.UCXXTag(role << NUMBER_BITS | number)

    def _ignore(self, _error: UcxError | None) -> None:
        """Ignore the outcome of a send: it fails only if the connection is lost, which is noticed anyway."""

    def _watch(self, request: Any, memory: object, done: Done) -> None:
        """Call `done` once a request has completed, and keep `memory` alive until then."""

        def is_done(_kept: object = memory) -> bool:
            if not request.completed:
                return False
            try:
                request.check_error()
            except self._loop.library.error as err:
                self._is_dead()
                done(UcxError(f"the connection is lost ({self.lost or str(err).lower()})"))
            else:
                done(None)
            return True

        self._loop.until(is_done)
