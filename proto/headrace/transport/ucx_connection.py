"""One UCX endpoint, and messages over it, each under a tag.

A message is looked for, and received when it is there and its length known: only then is memory given for it. A large one goes
by rendezvous: what has come is its description, and the receiver's adapter reads the bytes out of the sender's memory straight
into the receiver's, where there is such an adapter. Nothing is ever posted for what may not come: the binding cannot call such a
request back, and leaks its endpoint with it. So all that is under way ends with the connection at the latest.

Tags are matched by the whole worker, so they are drawn from 62 random bits, and the two others tell what a message is.

Memory is registered with the adapter at its first use, by UCX's registration cache (the binding has no call for it), and stays so
as long as it is mapped: buffers that are used again cost nothing more.
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
    """What a message is: the upper two bits of its tag. The others are a connection's number, or a question's."""

    QUESTION = 0
    """From a rank, to the number that it was told in HELLO: QUESTION_HEAD, then a FetchRequest if it is an ASK."""
    REPLY = 1
    """To the number of the question: REPLY_HEAD, then a PartHeader or a Refusal."""
    PAYLOAD = 2
    """After a reply that says PART, to the same number."""


class Kind(enum.IntEnum):
    """What a question or a reply says."""

    ASK = 1
    GIVE_UP = 2
    """The rank does not wait for that number any more. Still it takes the reply, and what follows that."""
    PART = 3
    REFUSED = 4


HELLO = struct.Struct("<I16sQ")
"""The first that a producer sends, on UCX's stream: version, the token that it told by gRPC, the connection's number."""
QUESTION_HEAD = struct.Struct("<BQ")  # kind, number
REPLY_HEAD = struct.Struct("<B")  # kind

Done = Callable[[UcxError | None], None]
"""Called on the thread, once, when UCX has done with the memory; with an error where it was not sent or received."""


def numbers() -> Iterator[int]:
    """For tags, from a random start."""
    return (number % (1 << NUMBER_BITS) for number in itertools.count(secrets.randbits(NUMBER_BITS)))


class Connection:
    """See the module's text. For use on the loop's thread only."""

    def __init__(self, loop: UcxLoop, endpoint: Any, on_lost: Callable[[Connection], None]) -> None:
        """`on_lost` is called once, whoever ends the connection; what is under way ends a little later."""
        self._loop = loop
        self._endpoint = endpoint
        self._on_lost = on_lost
        self.lost: str | None = None
        """Why the connection is lost; None: it is not."""
        loop.at_close.add(self._end_with_loop)
        loop.until(self._is_dead)

    @property
    def lanes(self) -> tuple[str, ...]:
        """As `ucx_library.lanes`, once a message has come and as long as the connection is not lost."""
        return () if self._endpoint is None else ucx_library.lanes(self._endpoint)

    def greet(self, hello: bytes) -> None:
        """Send the HELLO."""
        if self._endpoint is not None:
            self._watch(self._endpoint.stream_send(self._loop.library.array(hello)), hello, self._ignore)

    def await_greeting(self, done: Callable[[bytes | UcxError], None]) -> None:
        """Receive it."""
        hello = bytearray(HELLO.size)
        request = self._endpoint.stream_recv(self._loop.library.array(hello))
        self._watch(request, hello, lambda error: done(error or bytes(hello)))

    def send(self, role: Role, number: int, data: bytes | memoryview, done: Done | None = None) -> None:
        """The caller leaves `data` as it is until `done` is called."""
        done = done or self._ignore
        if self._endpoint is None:
            done(UcxError(f"the connection is lost ({self.lost})"))
        else:
            self._watch(self._endpoint.tag_send(self._loop.library.array(data), self._tag(role, number)), data, done)

    def receive(self, role: Role, number: int, room: Callable[[int], bytearray | memoryview], done: Done) -> None:
        """The next message, when it comes. `room(num_bytes)` gives memory of exactly that size for it.

        Where it raises UcxError the message is left alone and the connection ended.
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
        """End it by force: the peer sees a reset."""
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
        """What is not sent is so because the connection is lost, which is noticed anyhow."""

    def _watch(self, request: Any, memory: object, done: Done) -> None:
        """Until UCX has done with `memory`, which is kept for so long."""

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
