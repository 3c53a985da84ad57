"""Files that a command writes besides what it prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from headrace.errors import UserError

_T = TypeVar("_T")


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Around whatever is written into the folder of --out: UserError says that it is this which cannot be written, and why."""
    try:
        yield
    except OSError as err:
        raise UserError(f"cannot write to {out}: {err.strerror or err}; name another folder with --out") from err


def make_folder(out: Path) -> None:
    """The one of --out. Raises UserError."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)


def attempted(out: Path, write: Callable[[], _T]) -> tuple[_T | None, UserError | None]:
    """What `write` returns, which writes into the folder; or why it could not, to be raised once the report is printed."""
    try:
        with writing(out):
            return write(), None
    except UserError as err:
        return None, err
