"""The notes of a version: its section of a changelog in the form of Keep a Changelog."""

from __future__ import annotations

import re

from release.errors import ReleaseError

UNRELEASED = "Unreleased"
_HEADING = re.compile(r"^## \[([^\]]+)\].*$", re.MULTILINE)


def notes(changelog: str, version: str) -> str:
    """Return what the changelog says of its newest version, which must be `version`, without the heading.

    Raises ReleaseError where the version is not there, is past, or nothing is said of it.
    """
    headings = list(_HEADING.finditer(changelog))
    starts = [*(heading.start() for heading in headings), len(changelog)]
    said = {heading.group(1): changelog[heading.end() : end].strip() for heading, end in zip(headings, starts[1:], strict=True)}
    if version not in said:
        raise ReleaseError(
            f"CHANGELOG.md has no section [{version}]: name the section [{UNRELEASED}] after it, with the day, and begin "
            "another one"
        )
    if said.get(UNRELEASED):
        raise ReleaseError(
            f"CHANGELOG.md has notes in [{UNRELEASED}], above [{version}], which is past: raise `version` in pyproject.toml, and "
            "name that section after it"
        )
    newest = next(name for name in said if name != UNRELEASED)
    if newest != version:
        raise ReleaseError(f"{version} is past, as CHANGELOG.md has [{newest}] above it: raise `version` in pyproject.toml")
    if not said[version]:
        raise ReleaseError(f"CHANGELOG.md says nothing in [{version}]: say there what users notice")
    return said[version] + "\n"
