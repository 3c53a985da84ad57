"""`python -m website.outer_links`: ask every address that pages link to whether it is there. `make links` runs it.

It takes a network, and depends on other hosts: so neither the tests nor the build of the site do it.
"""

from __future__ import annotations

import http.client
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urldefrag
from urllib.request import Request, urlopen

from website.headings import CODE

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 20.0
AT_A_TIME = 8
_LINK = re.compile(r"\]\((https?://[^)\s]+)\)")
_NOT_FOR_PROGRAMS = (401, 403, 405, 429)
"""Answers of hosts that turn programs away: the address may well be there for a browser."""


def collect(root: Path = ROOT) -> dict[str, list[str]]:
    """Return the addresses of other hosts that Markdown links to, without their anchors, each with the lines that do so."""
    found = defaultdict[str, list[str]](list)
    for page in sorted({*root.glob("*.md"), *root.glob("*/README.md"), *(root / "docs").rglob("*.md")}):
        prose = CODE.sub(lambda code: "\n" * code[0].count("\n"), page.read_text(encoding="utf-8"))
        for number, line in enumerate(prose.splitlines(), 1):
            for address in _LINK.findall(line):
                found[urldefrag(address).url].append(f"{page.relative_to(root)}:{number}")
    return dict(found)


def trouble(address: str) -> str:
    """Return why an address cannot be had, in few words; empty where it can."""
    try:
        with urlopen(Request(address, headers={"User-Agent": "headrace-links"}), timeout=TIMEOUT_S):
            return ""
    except HTTPError as err:
        err.close()
        return "" if err.code in _NOT_FOR_PROGRAMS else f"{err.code} {err.reason}"
    except (OSError, http.client.HTTPException) as err:
        return str(getattr(err, "reason", "") or err or type(err).__name__)


def check(addresses: Mapping[str, list[str]]) -> list[str]:
    """Ask all addresses, some at a time; return a line for each that cannot be had."""
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        said = zip(addresses, threads.map(trouble, addresses), strict=True)
        return [f"{', '.join(addresses[address])}: {address}: {why}" for address, why in said if why]


if __name__ == "__main__":
    found = collect()
    faults = check(found)
    print("\n".join([*faults, f"{len(found)} addresses of other hosts, {len(faults)} cannot be had"]))
    sys.exit(1 if faults else 0)
