"""Layers of `transformers` cut into slices of two processes, beside the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers

from headrace.errors import UserError
from headrace.spec import parse
from headrace.trainer.gradients import sum_gradients
from headrace.trainer.models.adapted_units import HuggingFaceUnits
from headrace.trainer.models.loss import StepLoss
from headrace.trainer.models.multimodal import MultimodalModel
from headrace.trainer.pipeline.checkpoint_files import WEIGHT, Checkpoint, TensorKey, write
from headrace.trainer.pipeline.layer_partition import bounds
from headrace.trainer.pipeline.stage_building import build_stages
from headrace.trainer.pipeline.tensor_parallel import cut_dimension
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from tests.unit.trainer.models.huggingface_world import assert_close, skeleton, whole
from tests.verify.batches import AUDIO, IMAGE, SHAPE, VOCAB, make_row, packed

SLICES = 2
TIMEOUT_S = 60.0  # of a wait for each other
DROPOUT = 0.2  # of values in the LLM's layers
TOPOLOGY = {"units": {unit: {"tp": SLICES} for unit in ("vision", "audio", "llm")}, "dropout": DROPOUT}
RANGE = 0.1  # of weights
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLM = {**SIZES, "num_key_value_heads": 2, "vocab_size": VOCAB, "initializer_range": RANGE}
TOWER = {**SIZES, "patch_size": IMAGE.patch, "image_size": 8, "initializer_range": RANGE}
QWEN_TOWER = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "initializer_range": RANGE},
    **{"patch_size": IMAGE.patch, "window_size": 8, "fullatt_block_indexes": [1], "out_hidden_size": 32},
}
QWEN2_TOWER = {
    **{"depth": 2, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 4, "initializer_range": RANGE},
    **{"patch_size": IMAGE.patch},
}
WHISPER = {
    **{"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "init_std": RANGE},
    **{"num_mel_bins": AUDIO.mel_bins},
}
LLMS: dict[str, dict[str, Any]] = {
    "LlamaConfig": LLM,
    "Qwen2Config": {**LLM, "tie_word_embeddings": True},
    "Qwen3Config": {**LLM, "head_dim": 16},
    "MistralConfig": LLM,
}
TOWERS = {
    "SiglipVisionConfig": TOWER,
    "CLIPVisionConfig": TOWER,
    "Qwen2_5_VLVisionConfig": QWEN_TOWER,
    "Qwen2VLVisionConfig": QWEN2_TOWER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One backward of the whole model, and of its slices."""

    model: MultimodalModel
    loss: StepLoss
    answers: list[dict[str, Any]]
    """Of every slice."""
    checkpoint: Checkpoint
    """Which the slices saved."""


PAIRS = [
    pytest.param(pair, marks=[] if pair[0] == "Qwen3Config" else [pytest.mark.slow], id=" ".join(pair))
    for pair in zip(LLMS, TOWERS, strict=True)
]


@pytest.fixture(scope="module", params=PAIRS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Of models that start from the seed."""
    folder = tmp_path_factory.mktemp("slices")
    units = configurations(*request.param, folder)
    model = whole(units, dropout=DROPOUT)
    loss = model(batch())
    loss.loss_sum.backward()
    mp.start_processes(compute, args=(units, folder), nprocs=SLICES, start_method="forkserver")
    answers = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(SLICES)]
    return Run(model=model, loss=loss, answers=answers, checkpoint=Checkpoint.newest(folder))


@pytest.mark.slow
def test_slices_compute_the_whole_models_loss_and_gradients(run: Run) -> None:
    gradients = {name: parameter.grad for name, parameter in run.model.named_parameters() if parameter.grad is not None}
    assert {name.split(".")[0] for name in gradients if cut_dimension(name) is not None} == {"vision", "audio", "decoder"}
    for rank, answer in enumerate(run.answers):
        assert_close(answer["loss"], run.loss.loss_sum)
        for name, gradient in answer["gradients"].items():
            dimension = cut_dimension(name)
            mine = gradients[name] if dimension is None else np.array_split(gradients[name], SLICES, dimension)[rank]
            assert_close(gradient, mine)
    assert run.answers[0]["gradients"].keys() == gradients.keys()


def test_what_slices_save_is_read_whole_or_cut_anew(run: Run) -> None:
    weights = {name: p.detach() for name, p in run.model.named_parameters() if name in run.answers[0]["gradients"]}
    for name, weight in weights.items():
        assert torch.equal(run.checkpoint.read(TensorKey(name=name, kind=WEIGHT), weight.shape), weight)
        dimension = cut_dimension(name)
        if dimension is not None:
            parts = weight.tensor_split(2 * SLICES, dimension)
            for index, part in enumerate(parts):
                key = TensorKey(name=name, kind=WEIGHT, dim=dimension, index=index, count=len(parts))
                assert torch.equal(run.checkpoint.read(key, part.shape), part)


@pytest.mark.parametrize("unit", ["vision", "audio"])
def test_heads_that_slices_cannot_share_equally_are_refused(unit: str, tmp_path: Path) -> None:
    from headrace.trainer.models.huggingface.model import adapted_shape

    shape = adapted_shape(configurations("LlamaConfig", "Qwen2_5_VLVisionConfig", tmp_path), SHAPE)
    topology = parse(PipelineTopology, {"units": {unit: {"tp": 3}, "llm": {}}}, "topology")
    with pytest.raises(UserError, match=f"tp 3 of unit '{unit}' does not divide its heads 4: set its tp to a divisor of 4"):
        topology.check(topology.world_size, shape)


def configurations(llm: str, vision: str, folder: Path) -> HuggingFaceUnits:
    units = HuggingFaceUnits(vision=folder / "vision", audio=folder / "audio", llm=folder / "llm")
    getattr(transformers, llm)(**LLMS[llm]).save_pretrained(units.llm)
    getattr(transformers, vision)(**TOWERS[vision]).save_pretrained(units.vision)
    transformers.WhisperConfig(**WHISPER).save_pretrained(units.audio)
    return units


def batch() -> Any:
    return packed([make_row(number, audio=True) for number in range(6)])


def compute(rank: int, units: HuggingFaceUnits, folder: Path) -> None:
    """One slice of each unit, and what came of it."""
    from headrace.trainer.models.huggingface.model import adapted_shape, initialise

    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=SLICES, timeout=timedelta(seconds=TIMEOUT_S))
    topology = parse(PipelineTopology, TOPOLOGY, "topology")
    cuts = bounds(topology, adapted_shape(units, SHAPE), vocab_size=VOCAB, image=IMAGE, audio=AUDIO)
    stages = {}
    for unit in topology.units:
        (stages[unit],) = build_stages(
            lambda: skeleton(units, dropout=DROPOUT),
            topology,
            Place(unit, 0, 0, rank),
            cuts[unit],
            seed=0,
            device=torch.device("cpu"),
            slices=dist.group.WORLD,
            initialise=initialise,
        )
    inputs = {unit: stage.prepare(batch()) for unit, stage in stages.items()}
    arrived = {unit: stages[unit](inputs[unit], None, {}).rows for unit in ("vision", "audio")}
    result = stages["llm"](inputs["llm"], None, arrived)
    result.loss.loss_sum.backward()
    for stage in stages.values():
        sum_gradients(stage.slices.partial, dist.group.WORLD)
    parameters = {name: p for stage in stages.values() for name, p in stage.model.named_parameters()}
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    torch.save({"loss": result.loss.loss_sum.detach(), "gradients": gradients}, folder / f"{rank}.pt")
    weights = {
        key(name, rank): p.detach().contiguous() for name, p in parameters.items() if rank == 0 or cut_dimension(name) is not None
    }
    write(folder, 1, rank, SLICES, {}, weights)
    dist.destroy_process_group()


def key(name: str, rank: int) -> TensorKey:
    """Of a slice's weight in a checkpoint."""
    dimension = cut_dimension(name)
    if dimension is None:
        return TensorKey(name=name, kind=WEIGHT)
    return TensorKey(name=name, kind=WEIGHT, dim=dimension, index=rank, count=SLICES)
