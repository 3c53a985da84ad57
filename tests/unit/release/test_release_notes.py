"""The notes of a version are its section of the changelog, and a version without one, or that is past, is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from release.errors import ReleaseError
from release.notes import notes

ROOT = Path(__file__).parents[3]
HEAD = "# Changelog\n\nThe format follows [Keep a Changelog](https://keepachangelog.com/).\n\n"
TODAY = "## [0.2.0] - 2026-12-01\n\n### Added\n\n- A thing, [described](docs/thing.md).\n\n"
PAST = "## [0.1.0]\n\n### Added\n\n- The first thing.\n"


@pytest.mark.parametrize("unreleased", ["", "## [Unreleased]\n\n"])
def test_they_are_the_section_without_its_heading(unreleased: str) -> None:
    assert notes(HEAD + unreleased + TODAY + PAST, "0.2.0") == "### Added\n\n- A thing, [described](docs/thing.md).\n"


def test_those_of_the_first_version_end_with_the_changelog() -> None:
    assert notes(HEAD + PAST, "0.1.0") == "### Added\n\n- The first thing.\n"


@pytest.mark.parametrize(
    ("changelog", "version", "sentence"),
    [
        (TODAY + PAST, "0.3.0", r"no section \[0.3.0\]: name the section \[Unreleased\] after it"),
        (TODAY + PAST, "0.1.0", r"^0.1.0 is past, as CHANGELOG.md has \[0.2.0\] above it: raise `version` in pyproject.toml$"),
        ("## [Unreleased]\n\n- New.\n\n" + PAST, "0.1.0", r"notes in \[Unreleased\], above \[0.1.0\], which is past: raise"),
        ("## [0.2.0] - 2026-12-01\n\n" + PAST, "0.2.0", r"says nothing in \[0.2.0\]"),
        ("", "0.2.0", "no section"),
    ],
)
def test_a_version_without_notes_or_that_is_past_is_refused(changelog: str, version: str, sentence: str) -> None:
    with pytest.raises(ReleaseError, match=sentence):
        notes(HEAD + changelog, version)


def test_the_changelog_of_this_repository_has_sections_of_that_form() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    with pytest.raises(ReleaseError, match="no section"):
        notes(changelog, "0.0.0")
    _, _, since = changelog.partition("## [0.1.0]")
    assert notes(f"## [0.1.0]{since}", "0.1.0").startswith("### ")
