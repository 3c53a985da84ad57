"""Archives that differ, have too much, or are too large are refused with what is wrong in them."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from release import contents
from release.building import Archives, differing_member, members
from release.contents import check_contents
from release.errors import ReleaseError

INFO = "headrace-1.0.dist-info"
OF_INFO = [f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")]
WHEEL = ["headrace/cli/main.py", "headrace/cli/example_data/a.tar", *OF_INFO]
SDIST = [f"headrace-1.0/{name}" for name in ("cli/headrace/cli/main.py", "examples/data/a.tar", *contents.BESIDE)]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for name in (
        "cli/headrace/cli/main.py",
        "cli/headrace/cli/__pycache__/main.pyc",
        "examples/data/a.tar",
        "tests/test_main.py",
    ):
        (tmp_path / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sources" / name).write_text("x")
    return tmp_path / "sources"


def archives(folder: Path, wheel: Iterable[str] = WHEEL, sdist: Iterable[str] = SDIST, text: str = "x") -> Archives:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "headrace-1.0.whl", "w") as file:
        for name in wheel:
            file.writestr(name, text)
    (folder / "empty").touch()
    with tarfile.open(folder / "headrace-1.0.tar.gz", "w:gz") as file:
        for name in sdist:
            file.add(folder / "empty", name)
    return Archives(wheel=folder / "headrace-1.0.whl", sdist=folder / "headrace-1.0.tar.gz")


def test_archives_with_every_file_of_the_package_are_taken(sources: Path, tmp_path: Path) -> None:
    check_contents(archives(tmp_path / "a"), sources, "1.0")


@pytest.mark.parametrize(
    ("wheel", "sdist", "sentence"),
    [
        (WHEEL[1:], SDIST, r"^headrace-1.0.whl lacks headrace/cli/main.py: see"),
        ([*WHEEL, "tests/test_main.py", "z"], SDIST, r"whl has, for no reason, tests/test_main.py and 1 others: see"),
        (WHEEL, SDIST[1:], r"tar.gz lacks headrace-1.0/cli/headrace/cli/main.py: see"),
        (WHEEL, [*SDIST, "headrace-1.0/notes"], r"tar.gz has, for no reason, headrace-1.0/notes: see"),
    ],
)
def test_a_file_too_many_or_too_few_is_named(
    sources: Path, tmp_path: Path, wheel: list[str], sdist: list[str], sentence: str
) -> None:
    with pytest.raises(ReleaseError, match=sentence):
        check_contents(archives(tmp_path / "a", wheel, sdist), sources, "1.0")


def test_a_wheel_that_is_too_large_is_refused(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "MAX_WHEEL_BYTES", 100)
    with pytest.raises(ReleaseError, match=r"headrace-1.0.whl has .* MB, and .* MB are the most"):
        check_contents(archives(tmp_path / "a"), sources, "1.0")


def test_the_file_in_which_two_builds_differ_is_named(tmp_path: Path) -> None:
    first, second = archives(tmp_path / "a"), archives(tmp_path / "b", [*WHEEL, "more"])
    assert differing_member(first.wheel, second.wheel) == "more"
    assert differing_member(first.wheel, archives(tmp_path / "c", text="y").wheel) == WHEEL[0]
    assert differing_member(first.sdist, second.sdist) == "the times, permissions or order of its files"
    assert list(members(first.sdist)) == SDIST
