"""Loads libraries one after the other in a process of its own, as one that is broken may end it: one line of JSON for each.

`python -m headrace.cli.doctor.library_loader NAME...`. The facts of a library that is not installed are null. One that ends the
process has no line: it is the first of those named that lacks one (headrace.cli.doctor.native_libraries).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from typing import Any

Facts = dict[str, Any]


def _torch() -> Facts:
    import torch

    facts: Facts = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    facts["devices"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return facts | {"driver_cuda": _driver_cuda()}


def _driver_cuda() -> str:
    """Return the latest CUDA that this machine's driver has, such as 12.8; empty without a driver."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return ""
    return "" if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"


def _torchaudio() -> Facts:
    from headrace.torchaudio_import import torchaudio

    return {"version": torchaudio.__version__, "native": hasattr(sys.modules["torchaudio._extension"], "__file__")}


def _simplejpeg() -> Facts:
    return {"version": importlib.import_module("simplejpeg").__version__}


def _soundfile() -> Facts:
    import soundfile

    return {"version": soundfile.__version__, "detail": f"libsndfile {soundfile.__libsndfile_version__}"}


def _flight() -> Facts:
    import pyarrow
    import pyarrow.flight

    return {"version": pyarrow.__version__}


def _ucx() -> Facts:
    from headrace.transport.ucx_library import load

    library = load()
    library.open_worker()
    return {"version": importlib.import_module("ucxx").__version__}


LOADERS: dict[str, tuple[str, Callable[[], Facts]]] = {
    "torch": ("torch", _torch),
    "torchaudio": ("torchaudio", _torchaudio),
    "simplejpeg": ("simplejpeg", _simplejpeg),
    "soundfile": ("soundfile", _soundfile),
    "Arrow Flight": ("pyarrow", _flight),
    "UCX": ("ucxx", _ucx),
}
"""Library -> the module that it has where it is installed, and a function that loads it and returns facts."""


def load(name: str) -> Facts | None:
    """Load a library and return facts about it, an `error` if it does not load; None if it is not installed."""
    module, loader = LOADERS[name]
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except ModuleNotFoundError:
        return None
    try:
        return loader()
    except Exception as err:  # a broken library raises whatever it does
        return {"error": " ".join(str(err).split()) or type(err).__name__}


def main(names: list[str]) -> None:
    """Load libraries and print a line for each: its name and its facts; null if it is not installed."""
    gc.disable()  # a tenth of the time that torch takes
    for name in names:
        print(json.dumps({"name": name, "facts": load(name)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
