"""`python -m tests.layouts.storing [MODULE...]`: write all layouts with their libraries, read them with the libraries' readers.

Each library runs in a process of its own environment (`benchmarks.peers.environment`). What it has written is packed into
tests/data/layouts/MODULE.tar.xz, and what its reader gives is put beside it, in MODULE.json.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import Peer
from benchmarks.peers.environment import python_of
from tests.layouts.catalogue import LAYOUTS, WRITERS
from tests.layouts.judging import STORED
from tests.layouts.layout import Layout
from tests.layouts.plain import as_lines

_TIMEOUT_S = 900.0


def main() -> None:
    """Store the layouts of all libraries, or of those whose module is named; exit with 1 where any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", help="of benchmarks.peers.Peer; all by default")
    parser.add_argument("--here", action="store_true", help="in this process, which has the library")
    options = parser.parse_args()
    chosen = [writer for writer in WRITERS if not options.modules or writer.module in options.modules]
    failed = [_store(writer) if options.here else _in_environment(writer) for writer in chosen]
    sys.exit(any(failed))


def _in_environment(writer: Peer) -> bool:
    command = [str(python_of(writer)), "-m", "tests.layouts.storing", writer.module, "--here"]
    quiet = {**os.environ, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, env=quiet, timeout=_TIMEOUT_S, check=False).returncode != 0


def _store(writer: Peer) -> bool:
    """Store the layouts of one library; return whether any failed. Those that did are left out."""
    expected: dict[str, list[Any]] = {}
    failed = False
    STORED.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, tarfile.open(STORED / f"{writer.module}.tar.xz", "w:xz") as packed:
        for layout in LAYOUTS:
            if layout.writer is not writer:
                continue
            try:
                expected[layout.name] = _written_and_read(layout, Path(temporary))
            except Exception:  # of any library
                failed = True
                print(f"{layout.name}: {traceback.format_exc(limit=-3)}", file=sys.stderr)
                continue
            packed.add(Path(temporary, "written", layout.name), layout.name, filter=_anonymous)
    document = {"library": _version(writer.requirements), "layouts": expected}
    (STORED / f"{writer.module}.json").write_text(_json(document), encoding="utf-8")
    return failed


def _written_and_read(layout: Layout, temporary: Path) -> list[Any]:
    """Write a layout into `temporary`/written; return the samples of its reader, which works on a copy: it leaves files."""
    written, copy = temporary / "written" / layout.name, temporary / "read" / layout.name
    written.mkdir(parents=True)
    layout.write(written)
    shutil.copytree(written, copy, symlinks=True)
    samples = [json.loads(line) for line in as_lines(layout.read(copy))]
    if not samples:
        raise ValueError("its own reader reads nothing")
    return samples


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    return member


def _version(requirements: Sequence[str]) -> str:
    name = re.split(r"[=<>\[]", requirements[0])[0]
    return f"{name} {importlib.metadata.version(name)}"


def _json(document: dict[str, Any]) -> str:
    """One line a sample."""
    layouts = ",\n".join(
        f"{json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(sample, ensure_ascii=False)}" for sample in samples) + "]"
        for name, samples in document["layouts"].items()
    )
    return f'{{"library": {json.dumps(document["library"])}, "layouts": {{\n{layouts}\n}}}}\n'


if __name__ == "__main__":
    main()
