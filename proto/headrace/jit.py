"""Compilation of hot loops with numba, and the on-disk cache of their machine code."""

from __future__ import annotations

import functools
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

log = logging.getLogger(__name__)

_config: Any = numba.config  # untyped, because numba sets its attributes at run time
_unliteral: Any = numba.types.unliteral

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """Compile `function` on its first call and keep the machine code on disk.

    `nogil`: other threads run meanwhile, so that planning does not stop the server. `fastmath` stays off: sums are added in the
    written order, so results are equal on every machine. A kernel may use only kernels and constants of its own file, because
    numba's cache does not notice changes in other files.
    """
    try:
        return _compiled(function, cache=True)
    except RuntimeError:  # numba found no cache folder that it can write to: the installation is read-only
        _config.CACHE_DIR = _temporary_folder()
        return _compiled(function, cache=bool(_config.CACHE_DIR))


def _compiled(function: Function, *, cache: bool) -> Function:
    compiled = numba.njit(cache=cache, nogil=True, fastmath=False)(function)
    if hasattr(compiled, "get_call_template"):  # not where NUMBA_DISABLE_JIT is set
        _take_constants_as_variables(compiled)
    return cast(Function, compiled)


def _take_constants_as_variables(dispatcher: Any) -> None:
    """Have other kernels call this one with the type `int64`, where numba takes a constant to be of a type of its own.

    It would compile a variant for the constant 0 that a loop's variable begins with, and never call it: a tenth of all.
    """
    resolve = dispatcher.get_call_template

    def resolve_unliteral(args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        return resolve(tuple(map(_unliteral, args)), {name: _unliteral(kind) for name, kind in kws.items()})

    dispatcher.get_call_template = resolve_unliteral


@functools.cache
def _temporary_folder() -> str:
    """Return a temporary cache folder of this process, filled with a copy of NUMBA_CACHE_DIR; empty if none can be written."""
    filled = Path(_config.CACHE_DIR or "/nonexistent")
    remedy = "name a folder that can be written to in NUMBA_CACHE_DIR"
    try:
        folder = tempfile.TemporaryDirectory(prefix="headrace-kernels-", ignore_cleanup_errors=True)
        files = [path for path in filled.rglob("*") if path.is_file()]
        for path in files:
            copy = Path(folder.name, path.relative_to(filled))
            copy.parent.mkdir(parents=True, exist_ok=True)  # shutil.copytree would copy the read-only permissions too
            shutil.copyfile(path, copy)
        if not files:
            log.warning("machine code is compiled at every start: the installation is read-only; %s", remedy)
    except OSError as err:
        log.warning("machine code is compiled at every start (%s); %s", err, remedy)
        return ""
    _folders.append(folder)
    return folder.name


_folders: list[tempfile.TemporaryDirectory[str]] = []
"""Temporary cache folders of this process, kept referenced so that they are removed only when it ends."""
