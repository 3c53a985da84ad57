"""Fetch a headless Chromium for the tests of the page into the virtual environment: from npm, as one file with its libraries.

What another browser on the PATH makes needless is not fetched. Where npm is missing or does not answer, the tests of the page are
skipped, and say so; this is not an error.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

from tests.page.browser import FETCHED, HOW, on_the_path

PACKAGE = "@sparticuz/chromium@153.0.0"
NEEDED = ("chromium", "al2023.tar", "fonts.tar")  # and no drawing on a graphics card, which it has as well
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{fonts}</dir><dir>{others}</dir><cachedir>{cache}</cachedir>
<alias><family>sans-serif</family><prefer><family>Open Sans</family><family>DejaVu Sans</family></prefer></alias>
<alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias></fontconfig>
"""
UNPACK = """
const fs = require("fs"), zlib = require("zlib");
const [from, to] = process.argv.slice(1);
const ended = (error) => { if (error) throw error; };
require("stream").pipeline(fs.createReadStream(from), zlib.createBrotliDecompress(), fs.createWriteStream(to), ended);
"""


def fetch(to: Path) -> None:
    """Download and unpack; CalledProcessError or OSError if that fails, and then nothing is left at `to`."""
    with tempfile.TemporaryDirectory(dir=to.parent) as scratch:
        folder = Path(scratch)
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=300)
        [packed] = folder.glob("*.tgz")
        with tarfile.open(packed) as archive:
            archive.extractall(folder, filter="data")
        made = folder / "browser"
        made.mkdir()
        for compressed in (folder / "package" / "bin" / f"{name}.br" for name in NEEDED):
            plain = folder / compressed.stem
            subprocess.run(["node", "-e", UNPACK, str(compressed), str(plain)], check=True, timeout=300)
            if plain.suffix == ".tar":
                with tarfile.open(plain) as archive:
                    archive.extractall(made, filter="data")
            else:
                plain.rename(made / plain.name)
        (made / "chromium").chmod(0o755)
        others = sysconfig.get_path("purelib") + "/matplotlib/mpl-data/fonts/ttf"
        fonts = FONTS.format(fonts=to / "fonts", others=others, cache=to / "cache")
        (made / "fonts.conf").write_text(fonts, encoding="utf-8")
        shutil.rmtree(to, ignore_errors=True)
        made.rename(to)


def main() -> int:
    """Fetch a browser unless another is at hand; one line and exit code 1 where that fails."""
    if on_the_path() is not None:
        return 0
    try:
        fetch(FETCHED)
    except (OSError, subprocess.SubprocessError, ValueError, tarfile.TarError) as err:
        print(f"no browser for the tests of the page, which are skipped: {err}; {HOW}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
