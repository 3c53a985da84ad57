"""`make gpu-check`: what becomes of a check that raises, dies or hangs, and what is counted and how."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from multiprocessing import forkserver

import pytest

from benchmarks.gpu.__main__ import CHECKS, TOTAL_S
from benchmarks.gpu.host_waits_of_step import LISTED, place_of
from benchmarks.gpu.idle_share import idle_share
from benchmarks.gpu.isolated_check import Check, CheckProcesses
from benchmarks.gpu.stage_speed import model_flops
from benchmarks.gpu.target import EMULATED, Target, peak_flops_per_s
from benchmarks.report import Section
from headrace.model_shape import TransformerShape
from headrace.trainer.loading.collate import cumulative
from tests.unit.benchmarks import misbehaving_checks
from tests.unit.benchmarks.misbehaving_checks import BEFORE

CPU = Target(device_type="cpu", num_gpus=0)
GPUS = Target(device_type="cuda", num_gpus=2)


@pytest.fixture(scope="module")
def processes() -> CheckProcesses:
    forkserver.ensure_running()  # with what other tests take of it, too
    return CheckProcesses()


def run(processes: CheckProcesses, measure: Callable[..., object], budget_s: float = 100) -> Section:
    return processes.run(Check(measure=measure, title="a title", budget_s=budget_s), CPU)  # type: ignore[arg-type]


def test_a_check_that_does_well_yields_its_rows(processes: CheckProcesses) -> None:
    assert list(run(processes, misbehaving_checks.well).rows) == [BEFORE]


@pytest.mark.parametrize(
    ("measure", "reason"),
    [
        (misbehaving_checks.raises, "failed: MemoryError: CUDA out of memory tried to allocate 1111"),
        (misbehaving_checks.dies, "failed: its process ended with signal SIGSEGV"),
    ],
)
def test_a_check_that_fails_becomes_a_row_behind_those_it_has_measured(processes, measure, reason: str) -> None:
    before, failure = run(processes, measure).rows
    assert before == BEFORE
    assert failure.detail.startswith(reason)
    assert len(failure.detail) < 350, "a message of CUDA goes on for a page"
    assert (failure.unit, failure.ok) == ("failure", False)


@pytest.mark.parametrize("budget_s", [0, 2])
def test_a_check_that_hangs_is_ended_after_its_time_also_where_it_has_hardly_begun(processes, budget_s: float) -> None:
    *before, failure = run(processes, misbehaving_checks.hangs, budget_s=budget_s).rows
    assert before in ([BEFORE], [])  # a busy machine may take as long to start it
    assert failure.detail == f"failed: not done within {budget_s} s"


def test_without_a_gpu_every_title_says_so_and_no_speed_has_a_goal() -> None:
    assert CPU.title("Speed") == f"{EMULATED} Speed"
    assert GPUS.title("Speed") == "Speed"
    assert CPU.goal(object()) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("a device of tomorrow", None),
    ],
)
def test_the_peak_is_that_of_the_longest_name_that_fits(name: str, peak: float | None) -> None:
    assert peak_flops_per_s(name) == peak


@pytest.mark.parametrize(
    ("intervals", "share"),
    [
        ([(0, 10)], 0.0),
        ([(0, 4), (6, 10)], 0.2),
        ([(6, 10), (0, 4)], 0.2),
        ([(0, 8), (1, 2), (7, 9), (9, 10)], 0.0),
        ([(3, 3)], 0.0),
    ],
)
def test_idle_is_what_no_kernel_covers(intervals: list[tuple[float, float]], share: float) -> None:
    assert idle_share(intervals) == pytest.approx(share)


def test_a_device_of_which_nothing_is_seen_is_no_idle_one() -> None:
    with pytest.raises(ValueError, match="profiler saw nothing"):
        idle_share([])


def test_operations_of_a_model_are_six_a_weight_and_half_an_attention_matrix() -> None:
    """One layer of width 2, forward: scores and their product with the values are 2 * 2 * 2 operations for each of the pairs of
    tokens, of which causal attention needs half; the backward is twice the forward.
    """
    shape = TransformerShape(layers=1, width=2, heads=1, kv_heads=1, mlp=4, gated=False)
    forward_of_attention = (3**2 + 1**2) * 2 * 2 * 2 / 2
    assert model_flops(5, [3, 1], shape) == 6 * 5 * 4 + 3 * forward_of_attention


def test_a_wait_is_at_the_innermost_function_of_the_trainer() -> None:
    assert place_of(sys._getframe()) == "outside of the trainer"
    places = []

    class Lengths:
        def numpy(self) -> object:
            places.append(place_of(sys._getframe()))
            raise InterruptedError

    with pytest.raises(InterruptedError):
        cumulative(Lengths())  # type: ignore[arg-type]
    assert places == ["loading/collate.py:cumulative"]


@pytest.mark.parametrize("place", LISTED)
def test_the_places_that_may_wait_exist(place: str) -> None:
    path, name = place.split(":")
    found: object = importlib.import_module(f"headrace.trainer.{path.removesuffix('.py').replace('/', '.')}")
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)


def test_a_run_has_an_end_within_eight_minutes() -> None:
    assert TOTAL_S <= 8 * 60
    assert all(check.budget_s <= TOTAL_S / 2 for check in CHECKS)
