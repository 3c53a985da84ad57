"""Draw the pictures of the page, docs/pictures/page-*.png, from the recorded states: `make page-pictures`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from PIL import Image

from tests.page.browser import Browser, Look, running_browser
from tests.page.canned_service import ROOT, canned_service

PICTURES = ROOT / "docs" / "pictures"
COLOURS = 128
JOB = "#/job/web-and-charts"
SHOTS = {
    "jobs": ("running", "#/", "web-and-charts", Look(height=588)),
    "running": ("running", f"{JOB}/steps", "Mean of", Look(height=1310)),
    "timeline": ("running", f"{JOB}/timeline", "as run", Look(height=1130)),
    "dark": ("running", f"{JOB}/timeline", "as run", Look(height=1130, dark=True)),
    "phone": ("running", f"{JOB}/steps", "Mean of", Look(width=360, height=1240, density=1.5)),
    "failed": ("failed", "#/job/large-run", "mend that", Look(height=860)),
    "quarantine": ("running", f"{JOB}/quarantine", "137 samples not used", Look(height=1100)),
    "finished": ("finished", "#/job/warm-up/mixture", "delivered", Look(height=760)),
    "empty": ("empty", "#/", "headrace job submit", Look(height=560)),
}
"""By name: the state, the address, what is waited for, and how it is looked at."""


def draw(browser: Browser, name: str, folder: Path) -> Path:
    """Write one picture and return where."""
    state, address, words, look = SHOTS[name]
    path = folder / f"page-{name}.png"
    with canned_service(state) as service, browser.page(look) as page:
        page.open(f"{service.url}/{address}")
        page.until(f"document.body.innerText.includes({words!r})")
        page.picture(path)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def main() -> None:
    """Write all pictures, and say how large they are."""
    with tempfile.TemporaryDirectory() as profile, running_browser(Path(profile)) as browser:
        for name in SHOTS:
            path = draw(browser, name, PICTURES)
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
