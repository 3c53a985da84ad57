"""Import of torchaudio for its functional part, even if its native extension does not load.

torchaudio's compiled library links CUDA and fails to load beside a CPU build of torch, although resampling and spectrograms are
plain Python on torch. In that case a stub without native functions replaces the extension.
"""

from __future__ import annotations

import sys
from types import ModuleType


def _without_extension() -> ModuleType:
    stub = ModuleType("torchaudio._extension")
    stub.__dict__.update(
        _IS_TORCHAUDIO_EXT_AVAILABLE=False,
        _IS_ALIGN_AVAILABLE=False,
        _check_cuda_version=lambda: None,
        fail_if_no_align=lambda function: function,
    )
    return stub


try:
    import torchaudio
except OSError:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchaudio"]:
        del sys.modules[name]
    sys.modules["torchaudio._extension"] = _without_extension()
    import torchaudio

__all__ = ["torchaudio"]
