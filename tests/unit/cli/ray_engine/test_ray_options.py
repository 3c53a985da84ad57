"""What --engine ray takes from the command line, and what it leaves to each preprocessor."""

from __future__ import annotations

import argparse

import pytest

from headrace.cli.main import main
from headrace.cli.ray_engine.ray_options import RaySettings, free_port_of, ray_settings
from headrace.cli.run import preprocessor


def settings(*arguments: str) -> RaySettings | None:
    parser = argparse.ArgumentParser()
    preprocessor.add_arguments(parser)
    args = parser.parse_args(arguments)
    args.arguments = ["preprocessor", *arguments]
    return ray_settings(args)


def test_without_it_there_are_no_settings() -> None:
    assert settings("--threads", "2") is None


def test_the_options_of_a_preprocessor_are_passed_on_and_the_drivers_are_not() -> None:
    of_each = ["--reorder", "a:7070", "--data-root", "/data", "--budget-mib", "64", "--checksum"]
    own = ["--engine", "ray", "--address", "b:6379", "--min", "2", "--max=4", "--ray-cpus", "2", "--ray-resource", "cpu_node"]
    found = settings(*of_each[:4], *own, *of_each[4:], "--listen", "0.0.0.0:0")
    assert found is not None
    assert found.arguments == ("preprocessor", *of_each, "--threads", "2")
    assert (found.address, found.listen, found.resources) == ("b:6379", "0.0.0.0:0", {"cpu_node": 1.0})
    assert (found.limits.minimum, found.limits.maximum) == (2, 4)


@pytest.mark.parametrize(
    ("arguments", "cpus", "threads"),
    [
        ((), 1.0, "1"),
        (("--threads", "3"), 3.0, "3"),
        (("--ray-cpus", "2.5"), 2.5, "3"),
        (("--ray-cpus", "0"), 0.0, "1"),
        (("--ray-cpus", "1", "--threads", "4"), 1.0, "4"),
    ],
)
def test_a_preprocessor_has_as_many_threads_as_ray_sets_cpus_aside(arguments: tuple[str, ...], cpus: float, threads: str) -> None:
    found = settings("--engine", "ray", *arguments)
    assert found is not None
    assert (found.cpus, found.arguments[-2:]) == (cpus, ("--threads", threads))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--min", "2"], "--min is for --engine ray, which is not given: add it, or leave the option away"),
        (["--ray-cpus", "2"], "--ray-cpus is for --engine ray, which is not given: add it, or leave the option away"),
        (
            ["--engine", "ray", "--min", "3", "--max", "2"],
            "--min 3 and --max 2: take numbers from 0 on, the first no larger than",
        ),
        (["--engine", "ray", "--ray-cpus", "-1"], "--ray-cpus must be 0 or more, got -1"),
        (["--engine", "ray", "--ray-resource", "a=x"], "--ray-resource is NAME=N with a number above 0, got 'a=x'"),
        (
            ["--engine", "ray", "--advertise", "h:1"],
            "--advertise names one address, and --engine ray runs preprocessors on several",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    assert main(["preprocessor", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"headrace preprocessor: {sentence}")


def test_a_node_has_a_free_port_for_each() -> None:
    assert (free_port_of("10.0.0.7"), free_port_of("fd00::7")) == ("10.0.0.7:0", "[fd00::7]:0")
