"""`python -m tests.golden`: run the golden scripts, write what they print anew, or tell what the verbs mean."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from pathlib import Path

from tests.golden.script import executed, scripts, store, verbs


def main(arguments: list[str] | None = None) -> int:
    """0: every script prints what it says; 1: one does not."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("scripts", nargs="*", type=Path, metavar="SCRIPT.txt", help="(default: all)")
    parser.add_argument("--rewrite", action="store_true", help="write what the scripts print into them: look at the difference")
    parser.add_argument("--verbs", action="store_true", help="tell what the verbs mean, and run nothing")
    args = parser.parse_args(arguments)
    if args.verbs:
        for name in verbs():
            print(importlib.import_module(f"tests.golden.verbs.{name}").__doc__)
        return 0
    differ = 0
    with store() as url:
        for path in args.scripts or scripts():
            text, now = path.read_text(encoding="utf-8"), executed(path, url)
            if text != now:
                differ += 1
                name = f"{path.parent.name}/{path.name}"
                sys.stdout.writelines(difflib.unified_diff(text.splitlines(True), now.splitlines(True), name, f"{name}, now"))
                if args.rewrite:
                    path.write_text(now, encoding="utf-8")
    return int(differ > 0 and not args.rewrite)


if __name__ == "__main__":
    sys.exit(main())
