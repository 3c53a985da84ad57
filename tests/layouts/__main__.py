"""`python -m tests.layouts`: rewrite docs/layouts.md from what Headrace makes of the stored layouts now."""

from __future__ import annotations

import sys

from tests.layouts.judging import judged
from tests.layouts.table import DOCUMENT, render
from tests.layouts.verdict import Outcome


def main() -> None:
    """Write the table; refuse, with what is wrong, if a layout is read otherwise than by its own reader."""
    verdicts, libraries = judged()
    wrong = [f"{layout.name}: {v.detail}" for layout, *both in verdicts for v in both if v.outcome is Outcome.WRONG]
    if wrong:
        sys.exit("\n".join(wrong))
    DOCUMENT.write_text(render(verdicts, libraries), encoding="utf-8")


if __name__ == "__main__":
    main()
