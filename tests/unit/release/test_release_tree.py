"""Only a commit is released: nothing changed, nothing new, its version that of its tag, and its history recorded."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from release.__main__ import main
from release.errors import ReleaseError
from release.tree import check_history, check_tags, check_version, checked_out, export

AUTHOR = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *AUTHOR, *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    root = tmp_path / "clone"
    root.mkdir()
    (root / "pyproject.toml").write_text('[project]\nname = "headrace"\nversion = "0.2.0"\n')
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## [0.2.0] - 2026-12-01\n\n- New.\n")
    (root / "tests" / "histories" / "0.2").mkdir(parents=True)
    (root / "tests" / "histories" / "0.2" / "ends.json").write_text("{}")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "All", "--date", "2026-12-01T00:00:00Z")
    return root


def test_a_commit_is_told_with_its_version_and_time(clone: Path) -> None:
    commit = checked_out(clone)
    assert (commit.version, commit.name) == ("0.2.0", git(clone, "rev-parse", "HEAD"))
    assert commit.epoch_s == int(git(clone, "log", "-1", "--format=%ct"))
    check_tags(clone, commit)
    check_history(clone, commit.version)


@pytest.mark.parametrize("file", ["CHANGELOG.md", "new.py"])
def test_what_differs_from_the_commit_is_named(clone: Path, file: str) -> None:
    (clone / file).write_text("changed")
    with pytest.raises(ReleaseError, match=rf"no commit, because of {file}: commit or remove"):
        checked_out(clone)
    (clone / "z").touch()
    with pytest.raises(ReleaseError, match=rf"because of {file} and 1 others: commit or remove"):
        checked_out(clone)


def test_what_is_developed_is_no_release(clone: Path) -> None:
    check_version(checked_out(clone).version)
    with pytest.raises(
        ReleaseError, match=r"^0\.2\.0\.dev0 is what is developed: raise `version` in pyproject\.toml to 0\.2\.0,"
    ):
        check_version("0.2.0.dev0")


def test_what_is_exported_is_the_commit(clone: Path, tmp_path: Path) -> None:
    export(clone, checked_out(clone), tmp_path / "a" / "exported")
    assert sorted(path.name for path in (tmp_path / "a" / "exported").rglob("*") if path.is_file()) == [
        "CHANGELOG.md",
        "ends.json",
        "pyproject.toml",
    ]


def test_a_folder_that_is_no_clone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="is no clone"):
        checked_out(tmp_path)


def test_its_own_tag_is_welcome(clone: Path) -> None:
    git(clone, "tag", "v0.2.0")
    check_tags(clone, checked_out(clone))


def test_a_version_that_is_tagged_elsewhere_is_refused(clone: Path) -> None:
    git(clone, "tag", "v0.2.0")
    git(clone, "commit", "--quiet", "--allow-empty", "--message", "Later")
    with pytest.raises(ReleaseError, match=r"v0\.2\.0 is the tag of .*: raise the version"):
        check_tags(clone, checked_out(clone))


def test_the_tag_of_another_version_is_refused(clone: Path) -> None:
    git(clone, "tag", "v0.3.0")
    with pytest.raises(ReleaseError, match=r"has the tag v0\.3\.0, and pyproject\.toml says 0\.2\.0"):
        check_tags(clone, checked_out(clone))


def test_a_version_whose_history_is_not_recorded_is_refused(clone: Path) -> None:
    with pytest.raises(ReleaseError, match=r"`python -m tests\.histories\.record 0\.3`"):
        check_history(clone, "0.3.0")


def test_without_a_key_nothing_is_built_unless_that_is_meant(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(clone)]) == 2
    assert capsys.readouterr().err == (
        "release: nothing would be signed: name a key by RELEASE_KEY=KEY, or say UNSIGNED=1 to try it without\n"
    )


def test_what_cannot_be_built_is_told_in_a_line_and_leaves_nothing(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(clone), "--unsigned"]) == 2
    assert capsys.readouterr().err.startswith("release: hatchling cannot build the wheel: ")
    assert not (clone / "build").exists()
