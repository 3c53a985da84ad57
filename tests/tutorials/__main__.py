"""`python -m tests.tutorials PAGE.md`: run a page in a temporary folder, and print what comes of each block. What differs from
the page is told, and the next block is run all the same; the exit code is 1 then."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.tutorials.tutorial_page import blocks
from tests.tutorials.tutorial_session import Session


def main(page: Path) -> int:
    """Run the page; return the exit code."""
    code = 0
    with tempfile.TemporaryDirectory(prefix="headrace-tutorial-") as folder, Session(Path(folder)) as session:
        for block in blocks(page):
            if not block.is_carried_out:
                continue
            began_s = time.monotonic()
            try:
                said = session.run(block)
            except AssertionError as err:
                code, said = 1, f"DIFFERS: {err}"
            took_s = time.monotonic() - began_s
            print(f"\n=== {block.place()}, {took_s:.1f} s\n{block.file or block.text}---\n{said}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
