"""`headrace doctor` as a user runs it: a poor installation, and a stack of real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main

pytestmark = pytest.mark.integration

HIDING = """
import importlib.metadata, sys
from importlib.machinery import PathFinder

LACKING = ("torch", "torchaudio", "tokenizers", "ucxx")

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in LACKING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return PathFinder.find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, context=importlib.metadata.DistributionFinder.Context()):
        return () if context.name in LACKING else PathFinder.find_distributions(context)

sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
"""
FEW_FILES = 'ulimit -n 256; exec "$@"'


def checks(text: str) -> dict[str, dict[str, Any]]:
    return {one["check"]: one for one in json.loads(text)["checks"]}


def test_a_poor_installation(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    (tmp_path / "simplejpeg.py").write_text("raise OSError('libjpeg.so.8: cannot open shared object file')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = ["bash", "-c", FEW_FILES, "-", sys.executable, "-m", "headrace.cli", "doctor", "--format", "json"]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "4096", "HEADRACE_ENDPOINT": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert (done.returncode, done.stderr) == (1, "")
    found = checks(done.stdout)
    assert {one["part"] for one in found.values()} == {"installation"}
    for check, state, words, remedy in (
        ("open files", "fault", "256 at a time", "LimitNOFILE="),
        ("simplejpeg", "fault", "libjpeg.so.8", "pip install --force-reinstall simplejpeg"),
        (
            "extra preprocessor",
            "warning",
            "torch is missing; torchaudio is missing; tokenizers is missing",
            "headrace[preprocessor]",
        ),
        ("processors", "warning", "OMP_NUM_THREADS=4096", "unset OMP_NUM_THREADS"),
    ):
        assert found[check]["state"] == state
        assert all(word in found[check]["found"] for word in words.split("; "))
        assert remedy in found[check]["remedy"]
    assert "torch" not in found, "what is not installed is told of as an extra"
    assert found["redis-server"]["state"] == found["packages"]["state"] == "ok"


def test_a_stack_that_is_well(calm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    calm.wait_for_preprocessors()
    capsys.readouterr()
    code = main(["doctor", "--only", "stack", "--endpoint", calm.endpoint, "--format", "json"])
    read = json.loads(capsys.readouterr().out)
    found = {one["check"]: one for one in read["checks"]}
    assert code == 0, read
    for check in ("service", "token", "release", "clocks", "store", "preprocessors"):
        assert found[check]["state"] == "ok", found[check]
    assert found["preprocessors"]["found"].startswith("2 connected")
    assert "release of preprocessors" not in found
    assert found["store"]["found"].startswith("embedded")


@pytest.mark.slow
def test_all_of_it_in_a_table(calm: Any, headrace: Any) -> None:
    calm.wait_for_preprocessors()
    done = headrace("doctor", "--endpoint", calm.endpoint)
    assert done.returncode == 0, done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    for words in ("installation", "torch ", "Arrow Flight", "GPU", "stack", "preprocessors"):
        assert words in done.stdout


def test_an_endpoint_that_is_none_is_the_users_to_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--only", "stack", "--endpoint", "nowhere"]) == 2
    assert "is not HOST:PORT" in capsys.readouterr().err
