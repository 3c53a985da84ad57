"""Write the files of a command into its --out folder, with errors that say what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from headrace.errors import UserError

_T = TypeVar("_T")


@contextmanager
def writing(out: Path, option: str = "--out") -> Iterator[None]:
    """Turn an OSError in a `with` block that writes into the folder of an option into a UserError that says so, and why."""
    try:
        yield
    except OSError as err:
        raise UserError(f"cannot write to {out}: {err.strerror or err}; name another folder with {option}") from err


def make_folder(out: Path) -> None:
    """Create the folder of --out. Raises UserError if that fails."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)


def attempted(out: Path, write: Callable[[], _T]) -> tuple[_T | None, UserError | None]:
    """Call `write`, which writes into the folder of --out; return its result, or the error to raise after the report."""
    try:
        with writing(out):
            return write(), None
    except UserError as err:
        return None, err
