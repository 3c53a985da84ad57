"""Published models, Qwen2-VL's positions in time, height and width among them, over three context-parallel ranks."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from headrace.trainer.context.context_model import ContextModel
from headrace.trainer.gradients import sum_gradients
from tests.unit.trainer.models.huggingface_world import assert_close

pytestmark = pytest.mark.slow

RANKS, SAMPLES = 3, 7
TIMEOUT_S = 100.0  # of a wait for each other
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "llava", "internvl", "qwen2_audio")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank computed, by family, and the first what one rank computes alone."""
    folder = tmp_path_factory.mktemp("published")
    from tests.unit.trainer.models.published_models import family

    for name in FAMILIES:
        family(name).original(folder / name)
    mp.start_processes(compute, args=(folder,), nprocs=RANKS, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_one_process(answers: list[dict[str, Any]], name: str) -> None:
    expected = answers[0][f"{name} alone"]
    for answer in answers:
        assert answer[name]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert answer[name]["gradients"].keys() == expected["gradients"].keys()
        for parameter, gradient in answer[name]["gradients"].items():
            assert_close(gradient, expected["gradients"][parameter])


def compute(rank: int, folder: Path) -> None:
    from tests.unit.trainer.models.published_models import family

    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT_S))
    found: dict[str, Any] = {}
    for name in FAMILIES:
        of = family(name)
        batch = of.batch(SAMPLES)
        if rank == 0:
            alone = of.model(folder / name)
            found[f"{name} alone"] = outcome(alone, alone, batch)
        model = of.model(folder / name)
        shared = ContextModel(model, dist.group.WORLD, image=of.spec.image, audio=of.spec.audio, block=8)
        answer = outcome(shared, model, batch)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        [loss] = sum_gradients(parameters, None, [answer["loss"]])
        found[name] = {"loss": loss, "gradients": gradients_of(model)}
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def outcome(called: Any, model: Any, batch: Any) -> dict[str, Any]:
    loss = called(batch)
    loss.loss_sum.backward()
    return {"loss": float(loss.loss_sum.detach()), "gradients": gradients_of(model)}


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
