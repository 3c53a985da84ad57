"""A rival that could not run is no figure: what is only our patience is never compared with."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from benchmarks.recovery import torchft
from benchmarks.recovery.torchft import DEFAULT, NUM_REPLICAS

HANGING = f"""#!/bin/sh
case "$3" in
lighthouse) echo http://127.0.0.1:1 ;;
replica) for step in 1 2 3 4 5 6 7 8; do echo "commit $(date +%s.%N) {NUM_REPLICAS}"; done ;;
esac
exec sleep 100
"""


@pytest.mark.slow
def test_replicas_that_commit_nothing_behind_a_loss_have_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchft, "_PATIENCE_S", 5.0)
    python = tmp_path / "python"
    python.write_text(HANGING)
    python.chmod(0o755)
    assert torchft._losses(python, tmp_path, DEFAULT, [signal.SIGKILL]) is None
    monkeypatch.setattr(torchft, "python_of", lambda _: python)
    assert torchft.rivals(tmp_path, quick=True) == {}
