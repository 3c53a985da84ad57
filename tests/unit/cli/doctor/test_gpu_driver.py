"""GPUs, their driver and torch's build: what does not go together is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.cli.doctor.diagnosis import State
from headrace.cli.doctor.gpu_driver import gpu

CPU = {"version": "2.11.0+cpu", "cuda": None, "hip": None, "devices": 0, "driver_cuda": ""}
CUDA = {"version": "2.11.0", "cuda": "12.8", "hip": None, "devices": 0, "driver_cuda": ""}
VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version:  gcc version 13.3.0\n"


@pytest.fixture
def with_gpus(tmp_path: Path) -> Path:
    """Files as the driver makes them for two GPUs."""
    driver = tmp_path / "proc" / "driver" / "nvidia"
    (tmp_path / "dev").mkdir()
    for number in range(2):
        (tmp_path / "dev" / f"nvidia{number}").touch()
        (driver / "gpus" / f"0000:0{number}:00.0").mkdir(parents=True)
        (driver / "gpus" / f"0000:0{number}:00.0" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 1\n")
    (tmp_path / "dev" / "nvidiactl").touch()
    (driver / "version").write_text(VERSION)
    return tmp_path


@pytest.mark.parametrize(
    ("torch", "state", "found"),
    [
        (CUDA | {"devices": 2, "driver_cuda": "12.8"}, State.OK, "2 x NVIDIA H200, driver 570.86.15; torch 2.11.0 uses 2"),
        (None, State.OK, "torch is not there to use it"),
        (CPU, State.WARNING, "torch 2.11.0+cpu is built for processors: trainers here compute on these"),
        (CUDA | {"driver_cuda": "11.8"}, State.FAULT, "which knows CUDA up to 11.8, and torch is built for 12.8"),
        (CUDA | {"driver_cuda": "12.4"}, State.FAULT, "built for CUDA 12.8, cannot use"),
    ],
)
def test_beside_gpus(with_gpus: Path, torch: dict[str, Any] | None, state: State, found: str) -> None:
    (one,) = gpu(torch, with_gpus)
    assert one.state is state
    assert found in one.found
    assert bool(one.remedy) == (state is not State.OK)


@pytest.mark.parametrize(
    ("torch", "state", "found"),
    [
        (CPU, State.OK, "none; torch is built for processors"),
        (CUDA, State.WARNING, "torch is built for CUDA 12.8, and there is no NVIDIA device here"),
        (None, State.OK, "none, and no torch to use one"),
        ({"error": "libc10.so: cannot open shared object file"}, State.OK, "none, and no torch to use one"),
    ],
)
def test_without_a_gpu(tmp_path: Path, torch: dict[str, Any] | None, state: State, found: str) -> None:
    (one,) = gpu(torch, tmp_path)
    assert (one.state, one.found) == (state, found)
