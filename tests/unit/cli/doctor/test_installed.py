"""Packages and extras: what is missing, what does not fit, and what each would give."""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from headrace.cli.doctor.diagnosis import Diagnosis, State
from headrace.cli.doctor.installed import EXTRAS, extras, installed_version, interpreter, packages

PROJECT = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
FOR_DEVELOPERS = {"dev", "bench", "docs"}
ASKED = [
    *map(Requirement, PROJECT["dependencies"]),
    *(
        Requirement(f"{one}; extra == '{extra}'")
        for extra, needed in PROJECT["optional-dependencies"].items()
        if extra not in FOR_DEVELOPERS
        for one in needed
    ),
]
ALL: dict[str, str | None] = {
    one.name: str(next(iter(one.specifier)).version).removesuffix(".*") for one in ASKED if one.specifier
} | {"ucxx-cu13": "0.45"}


def found(diagnoses: Iterator[Diagnosis], check: str) -> Diagnosis:
    return {one.check: one for one in diagnoses}[check]


def test_every_extra_is_described() -> None:
    assert set(EXTRAS) == PROJECT["optional-dependencies"].keys() - FOR_DEVELOPERS


def test_a_whole_installation_is_well() -> None:
    assert [one.state for one in packages(ASKED, ALL.get)] == [State.OK]
    (whole,) = extras(ASKED, ALL.get)
    assert whole.found == f"whole: {', '.join(EXTRAS)}"


def test_what_is_asked_for_holds_here() -> None:
    assert [one.state for one in packages(ASKED, installed_version)] == [State.OK]
    assert {one.check for one in interpreter()} == {"Python", "release"}


@pytest.mark.parametrize(
    ("installed", "sentence", "remedy"),
    [
        ({"redis": None}, "redis is missing", "`pip install 'redis>=5.1'`"),
        ({"pydantic": "2.11.3"}, "pydantic is 2.11.3, and Headrace works with >=2.12", "`pip install 'pydantic>=2.12'`"),
    ],
)
def test_a_package_that_does_not_fit_is_a_fault(installed: dict[str, Any], sentence: str, remedy: str) -> None:
    (one,) = packages(ASKED, (ALL | installed).get)
    assert (one.state, one.found, one.remedy) == (State.FAULT, sentence, remedy)


def test_what_the_demo_alone_needs_is_no_fault_where_it_is_missing() -> None:
    """As in the image of the reorder service."""
    without = ALL | dict.fromkeys(("torch", "torchaudio", "pillow", "simplejpeg", "xxhash"))
    (one,) = packages(ASKED, without.get)
    assert one.state is State.OK


def test_an_extra_that_nobody_wanted_is_no_fault() -> None:
    """Of `preprocessor`, a trainer has what comes with torch and matplotlib."""
    of_trainer = {name: ALL[name] for name in ("torch", "xxhash", "pillow", "jinja2", "fsspec")}
    one = found(extras(ASKED, of_trainer.get), "extra preprocessor")
    assert one.state is State.OK
    assert one.found.startswith("not installed; it gives reading and decoding samples")
    assert one.remedy == "`pip install 'headrace[preprocessor]'`"
    assert found(extras(ASKED, of_trainer.get), "extras").found == "whole: trainer"


def test_an_extra_that_lacks_a_package_is_named_with_what_it_is_for() -> None:
    one = found(extras(ASKED, (ALL | {"tokenizers": None}).get), "extra preprocessor")
    assert one.state is State.WARNING
    assert one.found == f"for {EXTRAS['preprocessor']}; tokenizers is missing"
    assert one.remedy == "`pip install 'headrace[preprocessor]'`"


class Hiding(PathFinder):
    """Finds what is installed but for some packages."""

    hidden: tuple[str, ...] = ("av",)

    @classmethod
    def find_distributions(cls, context: Any = None, **_: Any) -> Iterator[Any]:  # type: ignore[override]
        if context.name not in cls.hidden:
            yield from PathFinder.find_distributions(context)


def test_a_package_that_is_not_installed_is_found_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert importlib.metadata.version("av")
    monkeypatch.setattr(sys, "meta_path", [Hiding if finder is PathFinder else finder for finder in sys.meta_path])
    one = found(extras(ASKED), "extra av")
    assert one.found == "not installed; it gives M4A, AAC and WebM recordings"
    assert one.remedy == "`pip install 'headrace[av]'`"


def test_sources_that_are_not_installed_ask_for_nothing() -> None:
    (one,) = packages(None)
    assert (one.state, one.remedy) == (State.WARNING, "install it with pip")
    assert list(extras(None)) == []
