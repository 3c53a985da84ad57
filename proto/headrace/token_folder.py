"""A folder of tokens: files named by role, each with one token a line (`--tokens DIR`).

A file has several tokens while one takes the place of another. Blank lines and lines that begin with # are passed over, and so
are hidden files: a Secret that Kubernetes mounts has links such as ..data beside its files.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.cluster_token import make_token_file, token_lines, validated_token
from headrace.errors import UserError
from headrace.known_tokens import KnownTokens
from headrace.observability.logs import pairs
from headrace.roles import FILE_ROLES, Role

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at the folder

_State = tuple[object, ...]


class TokenFolder:
    """The tokens of a folder, which are read anew after a change of it.

    What is wrong with the folder then is logged once, and the tokens that were read last stay in force.
    """

    def __init__(self, path: Path, now_s: Callable[[], float] = time.monotonic) -> None:
        """Read it. Raises UserError, which names the file, where a file is unreadable, has no token or an invalid one, or where
        its name is no role, and where there is no file at all."""
        self.path = path
        self._now_s = now_s
        self._looked_s = now_s()
        self._state = _state(path)
        self._tokens = read_tokens(path)

    @property
    def tokens(self) -> KnownTokens:
        """The tokens. The folder is looked at once in LOOK_S at most."""
        now_s = self._now_s()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._look()
        return self._tokens

    def _look(self) -> None:
        state = _state(self.path)
        if state == self._state:
            return
        self._state = state
        try:
            self._tokens = read_tokens(self.path)
        except UserError as err:
            log.error("tokens not read anew, the former ones stay %s", pairs(folder=self.path, reason=err))
        else:
            log.info("tokens read anew %s", pairs(folder=self.path))


def read_tokens(folder: Path) -> KnownTokens:
    """Return the tokens of a folder. Raises UserError as `TokenFolder` does."""
    return KnownTokens.of((token, role) for role, file in _files(folder) for token in _tokens_in(file))


def make_tokens(folder: Path) -> list[Path]:
    """Make a file with a random token, readable by its owner only, for each role that has none yet; return all four paths.

    Raises UserError where the folder cannot be written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as err:
        raise UserError(f"cannot make the folder of tokens {folder}: {err.strerror}; name another one") from err
    paths = [folder / role for role in FILE_ROLES]
    for path in paths:
        make_token_file(path)
    return paths


def _files(folder: Path) -> Iterator[tuple[Role, Path]]:
    roles, expected = {str(role): role for role in FILE_ROLES}, ", ".join(FILE_ROLES)
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as err:
        raise UserError(f"--tokens {folder} cannot be read ({err.strerror}): make it with `headrace tokens {folder}`") from err
    if not names:
        raise UserError(
            f"--tokens {folder} holds no file named {expected}: make them with `headrace tokens {folder}`, or copy those "
            "that this process needs"
        )
    for name in names:
        if name not in roles:
            raise UserError(f"{folder / name} is named like no role: files of --tokens are named {expected}; move it away")
        yield roles[name], folder / name


def _tokens_in(file: Path) -> Iterator[str]:
    try:
        lines = list(token_lines(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as err:
        raise UserError(f"cannot read the tokens of {file}: {err}; let this process read it, or remove it") from err
    if not lines:
        raise UserError(f"{file} holds no token: write one into it, or remove the file, with which nobody has its role")
    for number, line in lines:
        yield validated_token(line, f"{file}, line {number}")


def _state(folder: Path) -> _State:
    """Return what changes with every change of the folder's files, through links too."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as err:
        return (err.errno,)
    return tuple((name, *_file_state(folder / name)) for name in names)


def _file_state(file: Path) -> _State:
    try:
        found = file.stat()
    except OSError as err:
        return (err.errno,)
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
