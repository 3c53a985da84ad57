"""`python -m tests.tutorials.empty_environment FOLDER`: an environment in which there is nothing but the wheel of these sources.

pip has the settings that it always has here, and takes from its index what the wheel asks for. An environment that has this wheel
already stays as it is; else a new one is made, so that what another wheel asked for is not found in it.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from release.building import build, digest
from release.trial import install
from tests.tutorials.tutorial_page import ROOT

ANY_TIME_S = 1_700_000_000
"""Of all files of the wheel, in seconds since 1970, so that the same sources make the same wheel."""


def prepare(folder: Path) -> None:
    """Have such an environment in `folder`. Raises ReleaseError where the wheel cannot be built or installed."""
    with tempfile.TemporaryDirectory(prefix="headrace-wheel-") as temporary:
        wheel = build(ROOT, Path(temporary), ANY_TIME_S).wheel
        installed = folder / "wheel.sha256"
        if installed.is_file() and installed.read_text() == digest(wheel):
            print(f"{folder} has {wheel.name} of these sources already", flush=True)
            return
        print(f"installing {wheel.name} in an empty environment in {folder} (some minutes)", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        install(wheel, folder)
        installed.write_text(digest(wheel))


if __name__ == "__main__":
    prepare(Path(sys.argv[1]).absolute())
