"""Layers of `transformers` cut into slices of two processes, beside the whole model."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from headrace.spec import parse
from tests.unit.trainer.huggingface_world import assert_close, skeleton, whole
from tests.verify.batches import AUDIO, IMAGE, SHAPE, VOCAB, make_row, packed
from trainer.models.huggingface.units import HuggingFaceUnits
from trainer.pipeline.partition import bounds
from trainer.pipeline.stages import build_stages
from trainer.pipeline.tensor import cut_dimension
from trainer.pipeline.topology import PipelineTopology, Place

transformers = pytest.importorskip("transformers", reason="adapters of transformers need it: pip install 'transformers>=5'")

SLICES = 2
TIMEOUT_S = 60.0  # of a wait for each other
TOPOLOGY = {"units": {"vision": {"tp": SLICES}, "llm": {"tp": SLICES}}}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLM = {**SIZES, "num_key_value_heads": 2, "vocab_size": VOCAB, "initializer_range": 0.1}
TOWER = {**SIZES, "patch_size": IMAGE.patch, "image_size": 8, "initializer_range": 0.1}


@pytest.mark.parametrize(
    ("llm", "options", "vision"),
    [
        ("LlamaConfig", {}, "SiglipVisionConfig"),
        ("Qwen2Config", {"tie_word_embeddings": True}, "CLIPVisionConfig"),
        ("Qwen3Config", {"head_dim": 16}, "SiglipVisionConfig"),
    ],
)
def test_slices_compute_the_whole_models_loss_and_gradients(
    llm: str, options: dict[str, Any], vision: str, tmp_path: Path
) -> None:
    units = HuggingFaceUnits(vision=tmp_path / "vision", llm=tmp_path / "llm")
    getattr(transformers, llm)(**LLM, **options).save_pretrained(units.llm)
    getattr(transformers, vision)(**TOWER).save_pretrained(units.vision)
    model = whole(units)
    expected = model(batch())
    expected.loss_sum.backward()
    mp.spawn(compute, args=(units, tmp_path), nprocs=SLICES)

    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    answers = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(SLICES)]
    assert any(cut_dimension(name) is not None for name in answers[0]["gradients"])
    for rank, answer in enumerate(answers):
        assert_close(answer["loss"], expected.loss_sum)
        for name, gradient in answer["gradients"].items():
            dimension = cut_dimension(name)
            mine = gradients[name] if dimension is None else np.split(gradients[name], SLICES, dimension)[rank]
            assert_close(gradient, mine)
    assert answers[0]["gradients"].keys() == gradients.keys()


def batch() -> Any:
    return packed([make_row(number, audio=False) for number in range(6)])


def compute(rank: int, units: HuggingFaceUnits, folder: Path) -> None:
    """One slice of each unit, and what came of it."""
    from trainer.models.huggingface.model import adapted_shape, initialise

    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=SLICES, timeout=timedelta(seconds=TIMEOUT_S))
    topology = parse(PipelineTopology, TOPOLOGY, "topology")
    cuts = bounds(topology, adapted_shape(units, SHAPE), vocab_size=VOCAB, image=IMAGE, audio=AUDIO)
    stages = {}
    for unit in topology.units:
        (stages[unit],) = build_stages(
            lambda: skeleton(units),
            topology,
            Place(unit, 0, 0, rank),
            cuts[unit],
            seed=0,
            device=torch.device("cpu"),
            slices=dist.group.WORLD,
            initialise=initialise,
        )
    result = stages["llm"](batch(), None, {"vision": stages["vision"](batch(), None, {}).rows})
    result.loss.loss_sum.backward()
    parameters = {name: p for stage in stages.values() for name, p in stage.model.named_parameters()}
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    torch.save({"loss": result.loss.loss_sum.detach(), "gradients": gradients}, folder / f"{rank}.pt")
    dist.destroy_process_group()
