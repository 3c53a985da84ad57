"""The relay: the one process of a host through which the host's ranks talk to the reorder service, over one stream.

A message costs the reorder service about the same whether it is for one rank or for the eight of a host; so a thousand ranks in
a hundred and thirty hosts cost it what a hundred and thirty do. The first rank of a host to connect becomes the relay: it takes
a lock in a folder that only its user can read, and serves the `Sessions` service there, on a Unix socket. The others are its
clients, as if it were the reorder service. If its process ends, the lock is free, and one of them takes its place.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import queue
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, TypeVar

import grpc

from headrace import rpc
from headrace.cluster_token import cluster_token
from headrace.errors import UserError
from headrace.identity import identity
from headrace.launcher_variables import local_num_ranks
from headrace.observability.logs import pairs
from headrace.trainer.loading.relay_stream import NotRelayedError, RefusedError, RelayStream
from headrace.v1 import sessions_pb2, sessions_pb2_grpc

log = logging.getLogger(__name__)

_T = TypeVar("_T")

MOST_PATH = 60  # characters: a socket's whole path may have 107
ANSWER_S = 2.0  # within which the relay accepts a connection, unless it hangs


def is_relayed() -> bool:
    """Return whether the ranks of this host share a relay: by default if a launcher has started several of them.

    HEADRACE_RELAY=1 in the environment says that they do, HEADRACE_RELAY=0 that each has a stream of its own. Raises UserError
    for another value, and, where neither is said, for a LOCAL_WORLD_SIZE that is no number of ranks; without one, none is shared.
    """
    asked = os.environ.get("HEADRACE_RELAY", "")
    if asked not in ("", "0", "1"):
        raise UserError(f"HEADRACE_RELAY is {asked!r}: 1 has the ranks of a host share a stream, 0 gives each its own")
    return asked == "1" if asked else local_num_ranks() > 1


def check_relay() -> None:
    """Raise UserError where the ranks of this host cannot be told whether to share a relay, or could not have one."""
    if is_relayed():
        _private_folder()


def num_callers(num_ranks: int) -> int:
    """Return how many streams the ranks of a job have to the reorder service: one each, or one for those of a host."""
    on_host = local_num_ranks() if is_relayed() else 1
    return -(-num_ranks // on_host)


class RelayPlace:
    """Where the relay of this host and user is, for one reorder service: a socket, and a lock, which the relay holds.

    The lock is one byte of a file that all places of the folder share, so that no file is left behind by a place. The socket of
    a process that was killed is left, until another one becomes a relay.
    """

    def __init__(self, endpoint: str, token: str | None, tls: str | Path | None = None) -> None:
        """`token`, `tls`: as in `headrace.rpc.channel`. Raises UserError where the relay's folder is somebody else's."""
        self._endpoint, self._token, self._tls = endpoint, token, tls
        said, own = cluster_token() if token is None else token, identity(tls)
        known = f"{endpoint} {said} {own.folder if own is not None else ''}"  # who says or shows another has another relay
        name = hashlib.sha256(known.encode()).hexdigest()[:_DIGITS]
        self._socket = _private_folder() / f"{name}.sock"
        self.channel = rpc.local_channel(self._socket)
        """A blocking channel to the relay, whichever process that is."""

    def is_answering(self) -> bool:
        """Return whether the host's relay answers, after becoming it where the host has none."""
        for _ in range(2):  # who held the lock at the first time may have ended since, or was only clearing away
            self._fill()
            try:
                grpc.channel_ready_future(self.channel).result(timeout=ANSWER_S / 2)
            except grpc.FutureTimeoutError:
                continue
            return True
        log.warning("the relay of this host does not answer: going without it %s", pairs(endpoint=self._endpoint))
        return False  # its process hangs, and still holds the lock

    def _fill(self) -> None:
        with _SERVING_LOCK:
            if self._socket in _SERVING or not _lock(self._socket):
                return
            _clear_away(besides=self._socket)
            relay = Relay(rpc.channel(self._endpoint, token=self._token, tls=self._tls))
            relay.serve(f"unix:{self._socket}")
            _SERVING[self._socket] = relay
            log.info("relaying for the ranks of this host %s", pairs(endpoint=self._endpoint, socket=self._socket))


_DIGITS = 15  # hexadecimal ones of a socket's name, which are the number of the byte that is its lock
_SERVING: dict[Path, Relay] = {}
"""The relays that this process serves, by socket."""
_SERVING_LOCK = threading.Lock()
os.register_at_fork(after_in_child=_SERVING.clear)


@functools.cache
def _lock_file(folder: Path) -> int:
    """Return a descriptor of the folder's file of locks. It stays open: a process loses all its locks of a file with any one."""
    return os.open(folder / "locks", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock(socket: Path) -> bool:
    """Take the lock of a socket, unless another process has it. It ends with this process; children do not inherit it."""
    try:
        fcntl.lockf(_lock_file(socket.parent), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(socket.stem, 16))
    except OSError:
        return False
    return True


def _clear_away(besides: Path) -> None:
    """Remove the sockets of relays that were killed from the folder of `besides`, whose lock this process holds.

    Each is removed while its lock is held, so that nobody serves there meanwhile.
    """
    for socket in besides.parent.glob("[0-9a-f]" * _DIGITS + ".sock"):
        if socket != besides and socket not in _SERVING and _lock(socket):
            socket.unlink(missing_ok=True)
            fcntl.lockf(_lock_file(socket.parent), fcntl.LOCK_UN, 1, int(socket.stem, 16))


def _private_folder() -> Path:
    """Return a folder that only this user can use. Raises UserError where something else stands in its place."""
    temporary = tempfile.gettempdir()
    folder = Path(temporary if len(temporary) <= MOST_PATH else "/tmp") / f"headrace-{os.getuid()}"
    with contextlib.suppress(FileExistsError):  # is it a folder?
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"{folder} is not a folder that only this user can use: remove it, or set HEADRACE_RELAY=0")
    return folder


class Relay(sessions_pb2_grpc.SessionsServicer):
    """Serves the `Sessions` service to the ranks of its host, by way of one stream to the reorder service. Thread-safe."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = sessions_pb2_grpc.SessionsStub(channel)
        self._lock = threading.Lock()
        self._stream: RelayStream | None = None

    def serve(self, target: str) -> None:
        """Serve at a gRPC target from now on, for as long as the process lives."""
        server = grpc.server(_DaemonThreads(), options=rpc.SERVER_OPTIONS)
        sessions_pb2_grpc.add_SessionsServicer_to_server(self, server)
        plans = grpc.unary_stream_rpc_method_handler(
            self.Plans, request_deserializer=sessions_pb2.PlansRequest.FromString, response_serializer=bytes
        )
        server.add_registered_method_handlers("headrace.v1.Sessions", {"Plans": plans})
        server.add_insecure_port(target)
        server.start()
        self._server = server  # it would stop with its last reference

    def Open(self, request: sessions_pb2.OpenRequest, context: grpc.ServicerContext) -> sessions_pb2.OpenReply:
        try:
            return _awaited(self._present().open(request), context)
        except NotRelayedError:
            reply: sessions_pb2.OpenReply = _forwarded(self._stub.Open, request, context)
            return reply

    def ReportLost(self, request: sessions_pb2.ReportLostRequest, context: grpc.ServicerContext) -> sessions_pb2.ReportLostReply:
        reply: sessions_pb2.ReportLostReply = _forwarded(self._stub.ReportLost, request, context)
        return reply

    def Close(self, request: sessions_pb2.CloseRequest, context: grpc.ServicerContext) -> sessions_pb2.CloseReply:
        reply: sessions_pb2.CloseReply = _forwarded(self._stub.Close, request, context)
        return reply

    def Plans(self, request: sessions_pb2.PlansRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        stream, events = self._present(), queue.SimpleQueue[bytes | RefusedError | None]()
        stream.listen(request.session, events.put)
        if not context.add_callback(lambda: stream.leave(request.session)):  # the rank has gone already, and none would come
            stream.leave(request.session)
        while (message := events.get()) is not None:
            if isinstance(message, RefusedError):
                context.abort(message.status, message.error)
            else:
                yield message

    def Commit(self, request: sessions_pb2.CommitRequest, context: grpc.ServicerContext) -> sessions_pb2.CommitReply:
        return _awaited(self._present().commit(request), context)

    def _present(self) -> RelayStream:
        """Return the stream to the reorder service, a new one where the former is over."""
        with self._lock:
            if self._stream is None or self._stream.is_over:
                self._stream = RelayStream(self._stub)
            return self._stream


class _DaemonThreads(Executor):
    """Runs each call in a thread of its own, which does not keep the process from ending, as those of a pool do."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done = Future[Any]()

        def run() -> None:
            try:
                done.set_result(call(*args, **options))
            except BaseException as err:
                done.set_exception(err)

        threading.Thread(target=run, name="relayed call", daemon=True).start()
        return done


def _awaited(answer: Future[_T], context: grpc.ServicerContext) -> _T:
    """Return the answer to what a rank has asked, or abort its call as the answer says."""
    try:
        return answer.result(context.time_remaining())
    except RefusedError as refused:
        context.abort(refused.status, refused.error)
    except TimeoutError:
        context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the reorder service has not answered")
    raise AssertionError("abort raises")


def _forwarded(method: Callable[..., Any], request: Any, context: grpc.ServicerContext) -> Any:
    """Make a call of a rank at the reorder service, and answer as that does."""
    try:
        return method(request, timeout=context.time_remaining())
    except grpc.RpcError as err:
        context.abort(err.code(), err.details())
        raise
