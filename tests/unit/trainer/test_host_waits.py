"""The search for host waits finds what is there, in functions that are to run beside a step, and nothing in what is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.trainer.loading.collate import cumulative
from headrace.trainer.loading.device_copy import to_device
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.loss import Targets, token_loss
from headrace.trainer.models.multimodal import fill_placeholders
from headrace.trainer.models.noise import normal
from headrace.trainer.models.vision_encoder import patch_positions
from tests.host_waits import watched

LABELS, GRIDS = torch.tensor([3, -100, 5]), torch.tensor([[1, 2, 4]])
ROWS, IS_ROW = torch.tensor([0, 2]), torch.tensor([True, False, True])


def found_in(run: Callable[[], object]) -> list[str]:
    found: Counter[str] = Counter()
    with watched(found):
        run()
    return list(found)


@pytest.mark.parametrize(
    ("run", "places"),
    [
        (lambda: Targets.of(LABELS), ["models/loss.py:Targets.of nonzero"]),
        (lambda: Segments.of(LABELS), ["models/attention.py:Segments.of tolist"]),
        (lambda: cumulative(LABELS), ["loading/collate.py:cumulative numpy"]),
        (lambda: to_device(LABELS, torch.device("cpu")), ["loading/device_copy.py:to_device.<locals>.move to"]),
        (
            lambda: patch_positions(GRIDS, 2),
            [f"models/vision_encoder.py:patch_positions {name}" for name in ("repeat_interleave", "arange")],
        ),
        (lambda: float(LABELS[0]), ["elsewhere _local_scalar_dense"]),
        (lambda: bool(LABELS[0]), ["elsewhere _local_scalar_dense"]),
        (lambda: LABELS.cpu(), ["elsewhere cpu"]),
        (lambda: torch.equal(LABELS, LABELS), ["elsewhere equal"]),
        (lambda: LABELS[IS_ROW], ["elsewhere index"]),
    ],
    ids=lambda value: value[0].replace("/", ".") if isinstance(value, list) else "",
)
def test_what_would_wait_is_found_with_its_place(run: Callable[[], object], places: list[str]) -> None:
    assert found_in(run) == places


def function_of(module: str, file: str, code: str, **names: Any) -> Callable[..., object]:
    """The function `run` that this code defines, as if it stood in a module's file."""
    variables = {"__name__": module, **names}
    exec(compile(code, file, "exec"), variables)
    run: Callable[..., object] = variables["run"]
    return run


def test_a_folder_named_headrace_does_not_make_its_files_ours() -> None:
    """As in a clone that lies in a folder of that name, with an environment inside it."""
    run = function_of("library", "/home/me/headrace/.venv/library.py", "def run(x): return x.to('cpu'), x.cpu()")
    assert found_in(lambda: run(LABELS)) == ["elsewhere cpu"]


def test_packages_themselves_are_told_as_their_modules_are() -> None:
    """As functions of torch/__init__.py; and code of ours that stands in no file, as what `dataclasses` writes."""
    through = function_of("torch", "/lib/torch/__init__.py", "def run(x): return x.to('cpu')")
    run = function_of("headrace", "<string>", "def run(x): return through(x)", through=through)
    assert found_in(lambda: run(LABELS)) == ["<string>:run to"]


@pytest.mark.parametrize("package", ["torchvision", "headrace_plugin"])
def test_names_that_begin_alike_are_other_packages(package: str) -> None:
    run = function_of(package, "/lib/own.py", "def run(x): return x.to('cpu')")
    of_ours = function_of("headrace.own", "/lib/headrace/own.py", "def run(x): return through(x)", through=run)
    assert found_in(lambda: of_ours(LABELS)) == []


def test_it_is_found_in_a_backward_too() -> None:
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda gradient: gradient * float(gradient[0]))  # type: ignore[no-untyped-call]
    assert found_in(lambda: x.square().sum().backward()) == ["elsewhere _local_scalar_dense"]


def test_what_only_gives_the_device_work_is_not_found() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    targets = Targets.of(LABELS)

    def run() -> None:
        filled = fill_placeholders(x, ROWS, torch.ones(2, 4), "image")
        (token_loss(filled, targets, torch.ones(8, 4)) + x[ROWS].sum() + x.to(torch.bfloat16).sum()).backward()

    assert found_in(run) == []


def test_a_place_that_may_wait_is_left_out() -> None:
    found: Counter[str] = Counter()
    with watched(found, allowed={"models/loss.py:Targets.of"}):
        Segments.of(Targets.of(LABELS).rows)
    assert list(found) == ["models/attention.py:Segments.of tolist"]


def test_noise_is_drawn_without_waiting() -> None:
    assert found_in(lambda: normal(ROWS, 5)) == []
