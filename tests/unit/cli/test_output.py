"""Files beside the report: what cannot be written is named, and the report is printed all the same."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.main import main

SMALL = """
import resource, sys
from headrace.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
sys.exit(main(sys.argv[1:]))
"""
"""A disk on which no file grows beyond 4 KiB; standard output is a pipe, which it does not concern."""


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["compare", "COSTS", "--global-batch", "40", "--replicas", "1", "--num-stages", "2"], "100 GPU hours become"),
        pytest.param(
            ["simulate", "COSTS", "--replicas", "1", "--num-stages", "2"], "SIMULATED: 64 samples", marks=pytest.mark.slow
        ),
        pytest.param(["inspect", "TEXTS"], "64 samples", marks=pytest.mark.slow),
    ],
)
def test_a_picture_that_cannot_be_written_costs_no_report(command: list[str], found: str, tmp_path: Path) -> None:
    costs, texts, out = tmp_path / "costs.jsonl", tmp_path / "texts.jsonl", tmp_path / "out"
    costs.write_text(
        "".join(json.dumps({"sample_id": i, "cost_encoder": i % 3, "cost_llm": 1 + i % 5}) + "\n" for i in range(64))
    )
    texts.write_text("".join(json.dumps({"id": i, "text": f"number {i}"}) + "\n" for i in range(64)))
    paths = {"COSTS": str(costs), "TEXTS": str(texts)}
    arguments = [*(paths.get(word, word) for word in command), "--out", str(out)]
    environment = os.environ | {"COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-c", SMALL, *arguments], capture_output=True, text=True, timeout=100, check=False, env=environment
    )
    assert done.returncode == 2, done.stderr
    assert found in done.stdout
    assert done.stderr.strip().endswith(f"cannot write to {out}: File too large; name another folder with --out")


def test_a_second_demo_does_not_write_over_the_first_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        assert main(["demo", "--out", str(tmp_path)]) == 2
    finally:
        os.close(folder)
    assert f"another demo is running in {tmp_path}: wait for its end" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
