"""One process that imports for all processes of a suite, and forks nurseries for them: `python -m tests.nursery.mother`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from tempfile import TemporaryDirectory

from headrace.child_process import with_parent_death_signal
from tests.nursery.forking import die_with_parent, serve

ADDRESS = "TESTS_NURSERY"
"""The variable of the environment with the path of the socket at which a suite's mother is asked."""


@contextmanager
def standing(module: str) -> Iterator[str]:
    """A context with one, whose socket's path it gives, and which ends with this process. It imports nothing until it is asked.

    module: has `prepare`, which is called once, and `run`, as a nursery calls it.
    """
    with TemporaryDirectory(prefix="headrace-tests-") as folder, socket.socket(socket.AF_UNIX) as listening:
        path = f"{folder}/nursery"
        listening.bind(path)
        listening.listen()
        command = with_parent_death_signal([sys.executable, "-m", __name__, module], signal.SIGKILL)
        process = subprocess.Popen(command, stdin=listening, stdout=subprocess.DEVNULL, start_new_session=True)
        listening.close()
        try:
            yield path
        finally:
            process.kill()
            process.wait()


def main(module: str) -> None:
    """Accept, for ever, at the socket that is stdin."""
    listening = socket.socket(fileno=0)
    connection, _ = listening.accept()
    forked = import_module(module)
    forked.prepare()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a nursery
    while os.fork():
        connection.close()
        connection, _ = listening.accept()
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for standard in (0, 1):
        os.dup2(connection.fileno(), standard)
    connection.close()
    os._exit(serve(forked.run))


if __name__ == "__main__":
    main(sys.argv[1])
