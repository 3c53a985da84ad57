"""Dropout by sample: what is dropped does not depend on who computes it, beside what, or how often."""

from __future__ import annotations

import pytest
import torch

from headrace.plan import LLM
from headrace.spec import parse
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.models.dropout import ResidualDropout, kept_values
from headrace.trainer.models.multimodal import MultimodalModel, initialise
from headrace.trainer.pipeline.layer_partition import bounds
from headrace.trainer.pipeline.stage_building import build_stages
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from tests.unit.trainer.models.huggingface_world import assert_close
from tests.verify.batches import AUDIO, IMAGE, SHAPE, VOCAB, enlarge, make_row, packed, whole_model

RATE = 0.3


def dropping(seed: int = 7, rate: float = RATE) -> MultimodalModel:
    """On the meta device."""
    model = whole_model()
    model.decoder.dropout = ResidualDropout(model.decoder.layers, rate, seed)
    return model


def model(seed: int = 7, rate: float = RATE) -> MultimodalModel:
    made = dropping(seed, rate)
    made.to_empty(device="cpu")
    initialise(made, 0)
    enlarge(made)
    return made


def gradients(of: MultimodalModel, batches: list[PackedMicrobatch]) -> dict[str, torch.Tensor]:
    for batch in batches:
        if batch.num_targets:
            of(batch).loss_sum.backward()
    return {name: parameter.grad for name, parameter in of.named_parameters() if parameter.grad is not None}


ROWS = [make_row(number, audio=True) for number in range(6)]


def test_a_step_has_the_same_gradients_in_other_microbatches_and_when_it_is_repeated() -> None:
    together = gradients(model(), [packed(ROWS)])
    for division in ([ROWS[4:], ROWS[:1], ROWS[1:4]], [[row] for row in reversed(ROWS)]):
        apart = gradients(model(), [packed(rows) for rows in division])
        for name, gradient in together.items():
            assert_close(apart[name], gradient)
    repeated = gradients(model(), [packed(ROWS)])
    assert all(torch.equal(repeated[name], gradient) for name, gradient in together.items())


def test_another_seed_or_sample_drops_other_values() -> None:
    row = {**ROWS[2], "sample_id": 99}
    losses = [model(7)(packed([ROWS[2]])), model(8)(packed([ROWS[2]])), model(7)(packed([row])), model(7, 0)(packed([ROWS[2]]))]
    values = [loss.loss_sum.item() for loss in losses]
    assert len(set(values)) == 4


def test_an_evaluation_drops_nothing() -> None:
    with torch.no_grad():
        dropped, whole = model()(packed(ROWS)), model(rate=0)(packed(ROWS))
    assert torch.equal(dropped.loss_sum, whole.loss_sum)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_stages_that_run_again_in_the_backward_drop_the_same(schedule: str) -> None:
    """Two microbatches are in flight, and the later one runs forward before the earlier one's backward."""
    topology = parse(
        PipelineTopology, {"schedule": schedule, "units": {LLM: {"pp": 2, "checkpointing": True}}, "dropout": RATE}, "topology"
    )
    cuts = bounds(topology, SHAPE, vocab_size=VOCAB, image=IMAGE, audio=AUDIO)[LLM]
    options = {"seed": 0, "device": torch.device("cpu"), "slices": None}
    stages = [build_stages(dropping, topology, Place(LLM, 0, number, 0), cuts, **options)[0] for number in range(2)]
    texts = [{**row, "patches": [], "image_grids": [], "mel": [], "mel_frames": []} for row in ROWS]
    for row in texts:
        row["input_ids"] = row["input_ids"].clip(min=3)
    batches = [packed(texts[:3]), packed(texts[3:])]
    expected = dropping()
    expected.to_empty(device="cpu")
    initialise(expected, 0)
    wanted = gradients(expected, batches)

    losses = []
    for batch in batches:
        hidden = None
        for stage in stages:
            output = stage(stage.prepare(batch), hidden, {})
            hidden = output.rows
        losses.append(output.loss.loss_sum)
    for loss in losses:
        loss.backward()
        if schedule == "zero-bubble":
            for stage in stages:
                stage.take_weight_gradients()()

    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            if name != "decoder.embed.weight":  # being tied, each stage has a part of its gradient
                assert_close(parameter.grad, wanted[name])


def test_the_rate_is_that_of_single_values() -> None:
    keys = torch.arange(500) * 2**40
    kept = kept_values(keys, 202, RATE)
    assert kept.float().mean().item() == pytest.approx(1 - RATE, abs=0.005)
    assert kept.float().mean(dim=0).std().item() == pytest.approx((RATE * (1 - RATE) / 500) ** 0.5, rel=0.2)
    assert kept_values(keys, 202, 0.0).all()
    assert torch.equal(kept_values(keys[3:5], 202, RATE), kept[3:5])
