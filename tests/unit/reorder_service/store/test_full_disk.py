"""The embedded store on a disk that is full: said so, when it starts and while it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import asyncio, sys
from pathlib import Path
from headrace.errors import HeadraceError
from headrace.reorder_service.store.redis_database import Database

async def main(folder, fill_at):
    filler = (folder / "filler").open("wb", buffering=0)

    def fill():
        try:
            while filler.write(bytes(64)):
                pass
        except OSError:
            pass

    (folder / "store").mkdir()
    try:
        if fill_at == "start":
            fill()
        database = await Database.open(f"embedded:{folder / 'store'}")
        assert await database.lead("x")
        fill()
        try:
            while True:
                await database.write(("SET", "headrace:x", "x" * 100))
        finally:
            database.check(5.0)
    except HeadraceError as err:
        print(type(err).__name__, err)

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


@pytest.mark.parametrize("fill_at", ["start", "run"])
def test_it_says_that_the_disk_is_full(tmp_path: Path, fill_at: str) -> None:
    small = ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size=64k none "$0" && exec "$@"', str(tmp_path)]
    if subprocess.run([*small, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no small file system can be mounted here")
    said = subprocess.run(
        [*small, sys.executable, "-c", SCRIPT, str(tmp_path), fill_at], capture_output=True, text=True, check=True
    )
    assert "UnavailableError the embedded store" in said.stdout, said
    assert f"the disk of {tmp_path / 'store'} is full, make room; start" in said.stdout
    assert said.stdout.count("\n") == 1
