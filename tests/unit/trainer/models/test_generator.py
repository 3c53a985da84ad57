"""The generator: what it draws, what it is told, and that its loss is the same however samples are packed."""

from __future__ import annotations

import pytest
import torch

from headrace.spec import JobSpec
from headrace.trainer.loading.collate import PackedMicrobatch, collate
from headrace.trainer.models.generator import Flow, Generator
from headrace.trainer.models.multimodal import MultimodalModel, build_model

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture
def model(make_model) -> MultimodalModel:
    return make_model(generator=True)


@pytest.fixture
def generator(model: MultimodalModel) -> Generator:
    assert model.generator is not None
    return model.generator


def of(rows, make_batch):
    return collate([make_batch(rows)], patch_values=12, mel_bins=4)


def drawn(generator: Generator, batch: PackedMicrobatch) -> Flow:
    return generator.flow(batch.patches, generator.layout(batch))


def test_every_image_token_is_a_target_beside_those_of_the_text(model, mixed_rows, make_batch):
    text_only = of(mixed_rows[:1], make_batch)
    batch = of(mixed_rows, make_batch)
    assert model(text_only).target_weight == text_only.num_targets
    assert model(batch).target_weight == batch.num_targets + (6 + 1 + 1 + 6 + 4)


def test_the_loss_and_its_gradient_do_not_depend_on_how_samples_are_packed(model, mixed_rows, make_batch):
    found = []
    for division in ([[0, 1, 2, 3, 4, 5]], [[5], [3, 0], [], [4, 1, 2]]):
        model.zero_grad(set_to_none=True)
        losses = [model(of([mixed_rows[i] for i in part], make_batch)) for part in division]
        sum(loss.loss_sum for loss in losses if loss.target_weight).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append((sum(loss.loss_sum.detach() for loss in losses), gradients))
    (whole, gradients), (parts, others) = found
    torch.testing.assert_close(whole, parts, **CLOSE)
    assert all(gradient is not None for gradient in gradients.values()), "every module takes part"
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], **CLOSE)


def test_time_and_noise_are_of_the_sample(generator, mixed_rows, make_batch):
    """Whatever stands beside it; those of two samples, and the times of two images, differ."""
    together = drawn(generator, of(mixed_rows, make_batch))
    alone = drawn(generator, of([mixed_rows[3]], make_batch))
    rows = slice(6, 6 + 8)
    assert torch.equal(together.noisy[rows], alone.noisy)
    assert torch.equal(together.time[rows], alone.time)
    assert torch.equal(together.velocity[rows], alone.velocity)
    assert len(together.time.unique()) == 5  # images
    assert (together.time >= 0).all()
    assert (together.time < 1).all()


def test_jobs_of_another_seed_draw_other_times_and_noise(mixed_rows, make_batch):
    spec = JobSpec.model_validate({"name": "job", "sources": [{"path": "data"}], "image": {"patch": 2, "min_pixels": 16}})
    batch = of(mixed_rows, make_batch)
    models = [build_model("tiny-generator", spec, 64, 1, 2, seed, device="meta") for seed in (0, 1, 1)]
    first, second, again = (drawn(model.generator, batch) for model in models)
    assert not set(first.time.tolist()) & set(second.time.tolist())
    assert not torch.equal(first.velocity, second.velocity)
    assert torch.equal(second.time, again.time)
    assert torch.equal(second.velocity, again.velocity)


def test_the_way_is_straight_and_ends_in_the_image(generator, make_row, make_batch):
    batch = of([make_row(4, grids=[(1, 4, 4), (1, 2, 6)])], make_batch)
    flow = drawn(generator, batch)
    image = flow.noisy - flow.time[:, None] * flow.velocity
    torch.testing.assert_close(image, (batch.patches.float() / 127.5 - 1).view(7, 4 * 12), **CLOSE)
    noise = flow.noisy + (1 - flow.time[:, None]) * flow.velocity
    assert noise.mean().abs() < 0.2
    assert noise.std() == pytest.approx(1, abs=0.2)


def test_a_token_sees_its_own_image_and_its_own_condition(generator, make_row, make_batch):
    batch = of([make_row(4, grids=[(1, 4, 4), (1, 2, 6)]), make_row(5, grids=[(1, 2, 2)])], make_batch)
    conditions = torch.zeros(8, generator.width)

    def hidden(told: torch.Tensor) -> torch.Tensor:
        x = generator.embed_inputs(drawn(generator, batch), told)
        for layer in generator.layers:
            x = layer(x, *generator.layer_args(generator.layout(batch)))
        return x

    with torch.no_grad():
        before = hidden(conditions)
        conditions[5] = torch.linspace(-1, 1, generator.width)  # of the second image's tokens 4, 5 and 6
        differs = (hidden(conditions) - before).abs().amax(dim=1) > 1e-6
    assert differs.tolist() == [False] * 4 + [True] * 3 + [False]


def test_the_velocity_itself_has_no_loss_and_a_step_aside_its_square(generator):
    generator.norm = torch.nn.Identity()
    generator.head = torch.nn.Identity()
    velocity = torch.randn(3, generator.values)
    flow = Flow(noisy=velocity, time=torch.zeros(3), velocity=velocity)
    assert generator.loss(velocity, flow) == 0
    torch.testing.assert_close(generator.loss(velocity + 2, flow), torch.tensor(3 * 4.0))


def test_a_microbatch_without_images_leaves_the_generator_alone(model, mixed_rows, make_batch):
    model(of(mixed_rows[:1], make_batch)).loss_sum.backward()
    for module in (model.generator, model.generator_projector):
        assert all(parameter.grad is None for parameter in module.parameters())


def test_a_microbatch_without_text_targets_still_learns_images(model, make_row, make_batch):
    loss = model(of([make_row(7, answer=0, grids=[(1, 2, 4)])], make_batch))
    assert loss.target_weight == 2
    loss.loss_sum.backward()
    assert model.decoder.embed.weight.grad.abs().sum() > 0, "through the conditions"
