"""Whether torch can use the GPUs of this machine: the driver, the devices, and what torch was built for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.cli.doctor.diagnosis import Diagnosis, fault, ok, warning


def gpu(torch: Mapping[str, Any] | None, root: Path = Path("/")) -> Iterator[Diagnosis]:
    """Tell of NVIDIA devices, their driver and torch's build.

    `torch`: facts of headrace.cli.doctor.library_loader; None: it is not installed. `root`: where /proc and /dev are.
    """
    devices, driver = _devices(root), _driver(root)
    here = f"{_count(devices)}, driver {driver or 'unknown'}"
    if torch is None or "error" in torch:
        yield ok("GPU", f"{here}; torch is not there to use it" if devices else "none, and no torch to use one")
    elif torch["devices"]:
        yield ok(
            "GPU", f"{here}; torch {torch['version']} uses {torch['devices']}" if devices else f"torch uses {torch['devices']}"
        )
    elif not devices:
        if torch["cuda"] is None:
            yield ok("GPU", "none; torch is built for processors")
        else:
            yield warning(
                "GPU",
                f"torch is built for CUDA {torch['cuda']}, and there is no NVIDIA device here",
                "where there should be one, pass it into the container (--gpus all) or load the driver; preprocessors need none, "
                "and torch's CPU build is smaller",
            )
    elif torch["cuda"] is None:
        yield warning(
            "GPU",
            f"{here}, and torch {torch['version']} is built for processors: trainers here compute on these",
            "for trainers, install torch's CUDA build: `pip install --force-reinstall torch` from the package index",
        )
    elif torch["driver_cuda"] and _number(torch["driver_cuda"]) < _number(torch["cuda"])[:1]:
        yield fault(
            "GPU",
            f"{here}, which knows CUDA up to {torch['driver_cuda']}, and torch is built for {torch['cuda']}",
            "update the driver, or install a torch that is built for its CUDA",
        )
    else:
        yield fault(
            "GPU",
            f"{here}, which torch {torch['version']}, built for CUDA {torch['cuda']}, cannot use",
            "see whether `nvidia-smi` runs as this user, and whether CUDA_VISIBLE_DEVICES hides them",
        )


def _devices(root: Path) -> list[str]:
    """Return the models of the NVIDIA devices that this process sees, or the names of their files."""
    files = [path.name for path in sorted((root / "dev").glob("nvidia[0-9]*"))]
    told = [_read(path) for path in sorted((root / "proc" / "driver" / "nvidia" / "gpus").glob("*/information"))]
    models = [match[1].strip() for text in told if (match := re.search(r"^Model:(.*)$", text, re.MULTILINE))]
    return models if len(models) == len(files) else files


def _driver(root: Path) -> str:
    match = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", _read(root / "proc" / "driver" / "nvidia" / "version"))
    return match[1] if match else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _count(devices: list[str]) -> str:
    return f"{len(devices)} x {devices[0]}" if devices and len(set(devices)) == 1 else ", ".join(devices)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
