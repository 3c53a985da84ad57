"""Which worker of a suite gets which tests: those of a file go together, and so do all files that fork processes for torch.

The server that forks these has imported what takes it seconds, and each worker would have one.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

FORKING = ("forkserver", "verify.processes", "verify import processes", "fsdp_processes", "context_ranks", "context_processes")
"""Words of the files that do it."""


class FilesTogether(LoadFileScheduling):
    """As `--dist loadfile`, but for those."""

    def _split_scope(self, nodeid: str) -> str:
        path = super()._split_scope(nodeid)
        return "files that fork" if _forks(self.config.rootpath / path) else path


@cache
def _forks(path: Path) -> bool:
    text = path.read_text(encoding="utf-8") if path.suffix == ".py" else ""
    return any(word in text for word in FORKING)
