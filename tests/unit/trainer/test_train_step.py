"""A global step: the same whatever the division of its samples, and harmless where there is nothing to learn."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.multiprocessing as mp

from headrace.errors import HeadraceError
from headrace.spec import JobSpec
from headrace.trainer.loading.collate import collate
from headrace.trainer.loading.packs import Padding, in_packs
from headrace.trainer.models.multimodal import build_model
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.train_step import TrainStep, embedding_parameters, make_optimizer
from tests.unit.trainer import rank_worker

SPEC = {"name": "job", "sources": [{"path": "data"}], "image": {"patch": 2, "min_pixels": 16}, "audio": {"mel_bins": 4}}


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def one_step(model, microbatches, **options):
    step = TrainStep(model, make_optimizer(model.parameters()), **options)
    for microbatch in microbatches:
        step.accumulate(microbatch)
    return step.finish(1e-3)


def test_the_loss_is_the_mean_over_the_targets_of_the_whole_batch(make_row, make_batch, make_model):
    """Not the mean of the microbatches' means: the long sample weighs more."""
    short, long = (collate([make_batch([make_row(i, answer=answer)])]) for i, answer in ((1, 1), (2, 30)))
    model = make_model()
    with torch.no_grad():
        sums = [float(model(microbatch).loss_sum) for microbatch in (short, long)]
    result = one_step(model, [short, long])
    assert result.target_weight == 31
    assert result.loss == pytest.approx(sum(sums) / 31, rel=1e-6)
    assert result.loss != pytest.approx((sums[0] / 1 + sums[1] / 30) / 2, rel=1e-3)


def test_the_division_into_microbatches_changes_neither_loss_nor_norm_nor_weights(mixed_rows, make_batch, make_model):
    whole, divided = make_model(), make_model()
    one = one_step(whole, [collate([make_batch(mixed_rows)])])
    many = one_step(divided, [collate([make_batch([mixed_rows[i] for i in part])]) for part in ([5, 0], [3], [4, 2, 1])])
    assert one.target_weight == many.target_weight
    assert one.loss == pytest.approx(many.loss, rel=1e-5)
    assert one.grad_norm == pytest.approx(many.grad_norm, rel=1e-5)


@pytest.mark.parametrize("generator", [False, True])
def test_padding_of_packs_changes_neither_loss_nor_gradients(mixed_rows, make_batch, make_model, generator):
    """Sample 99 was planned into a pack and did not arrive; the last microbatch is empty."""
    padding = Padding(pack_tokens=64, segment_tokens=40, token=0)
    parts = [(mixed_rows[:3], [[10, 99, 11], [12]]), (mixed_rows[3:], [[13, 14], [15]]), ([], [])]
    plain = [collate([make_batch(rows)]) for rows, _ in parts]
    padded = [in_packs(collate([make_batch(rows)]), packs, padding) for rows, packs in parts]
    assert [len(data.input_ids) for data in padded] == [128, 128, 0]
    models = make_model(generator=generator), make_model(generator=generator)
    results = [one_step(model, data, settings=OptimizerSpec()) for model, data in zip(models, (plain, padded), strict=True)]
    assert results[0].target_weight == results[1].target_weight > 0
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-5)
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-5)
    for model, data in zip(models, (plain, padded), strict=True):
        model.load_state_dict(make_model(generator=generator).state_dict())
        model.zero_grad()
        for microbatch in data[:2]:
            model(microbatch).loss_sum.backward()
    expected = {name: parameter.grad for name, parameter in models[0].named_parameters()}
    for name, parameter in models[1].named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-5 * float(expected[name].abs().max()))


def test_bfloat16_rounds_what_is_computed_and_not_what_is_kept(mixed_rows, make_batch, make_model):
    batch, exact, rounded = collate([make_batch(mixed_rows)]), make_model(), make_model()
    one, other = one_step(exact, [batch]), one_step(rounded, [batch], dtype=torch.bfloat16)
    assert one.loss != other.loss
    assert one.loss == pytest.approx(other.loss, rel=0.02)
    assert {weight.dtype for weight in weights_of(rounded).values()} == {torch.float32}


def test_gradients_are_divided_before_they_are_clipped(mixed_rows, make_batch, make_model):
    """With plain descent at rate 1, the step's length is the clipped norm of the mean gradient."""
    model = make_model()
    before = weights_of(model)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), settings=OptimizerSpec(max_grad_norm=0.25))
    step.accumulate(collate([make_batch(mixed_rows)]))
    result = step.finish()
    moved = math.sqrt(sum(float((before[name] - now).square().sum()) for name, now in weights_of(model).items()))
    assert result.grad_norm > 0.25
    assert moved == pytest.approx(0.25, rel=1e-3)


def test_the_norm_does_not_grow_with_the_batch(make_row, make_batch, make_model):
    row = make_row(1, answer=5)
    once = one_step(make_model(), [collate([make_batch([row])])])
    four_times = one_step(make_model(), [collate([make_batch([row] * 4)])])
    assert four_times.target_weight == 4 * once.target_weight
    assert four_times.grad_norm == pytest.approx(once.grad_norm, rel=1e-4)


@pytest.mark.parametrize("accumulated", [[], ["no targets"]])
def test_a_step_without_targets_changes_nothing(accumulated, make_row, make_batch, make_model):
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    step = TrainStep(model, optimizer)
    step.accumulate(collate([make_batch([make_row(1)])]))
    step.finish()
    before, moments = weights_of(model), json.dumps(optimizer.state_dict(), default=lambda x: x.tolist())
    for _ in accumulated:
        step.accumulate(collate([make_batch([make_row(2, answer=0)])]))
    result = step.finish()
    assert math.isnan(result.loss)
    assert (result.target_weight, result.grad_norm) == (0, 0.0)
    assert all(torch.equal(before[name], now) for name, now in weights_of(model).items())
    assert moments == json.dumps(optimizer.state_dict(), default=lambda x: x.tolist())


def test_a_step_that_is_not_finite_raises_and_leaves_the_weights(make_row, make_batch, make_model):
    model = make_model()
    step = TrainStep(model, make_optimizer(model.parameters()))
    row = make_row(1, frames=[8])
    broken = row | {"mel": np.full_like(row["mel"], np.nan)}
    before = weights_of(model)
    step.accumulate(collate([make_batch([broken])]))
    with pytest.raises(HeadraceError, match="not finite"):
        step.finish()
    assert all(torch.equal(before[name], now) for name, now in weights_of(model).items())
    step.accumulate(collate([make_batch([row])]))
    assert math.isfinite(step.finish().loss)


def test_a_step_that_is_not_finite_is_skipped_where_that_is_asked_for(make_row, make_batch, make_model):
    """It counts, but neither weights nor moments see it; the next one learns as if it had not been."""
    model, undisturbed = make_model(), make_model()
    row = make_row(1, frames=[8])
    good, broken = (collate([make_batch([one])]) for one in (row, row | {"mel": np.full_like(row["mel"], np.nan)}))
    settings = OptimizerSpec(on_nan="skip")
    step, expected = (TrainStep(one, make_optimizer(one.parameters()), settings=settings) for one in (model, undisturbed))
    skipped = []
    for microbatch in (good, broken, broken, good):
        step.accumulate(microbatch)
        skipped.append(step.finish(1e-3).skipped)
    assert skipped == [0, 1, 2, 0]
    for _ in range(2):
        expected.accumulate(good)
        expected.finish(1e-3)
    assert all(torch.equal(weight, weights_of(undisturbed)[name]) for name, weight in weights_of(model).items())


@pytest.mark.parametrize(
    ("limits", "broken", "sentence"),
    [
        ({"max_skips_in_row": 2}, "BGBBGBBB", r"the 2 before it were skipped as well \(optimizer.max_skips_in_row\)"),
        ({"max_skips": 3}, "BGBGBGB", r"3 were skipped before \(optimizer.max_skips\)"),
    ],
)
def test_too_many_skipped_steps_end_training(limits, broken, sentence, make_row, make_batch, make_model):
    model = make_model()
    row = make_row(1, frames=[8])
    microbatches = {
        "G": collate([make_batch([row])]),
        "B": collate([make_batch([row | {"mel": np.full_like(row["mel"], np.nan)}])]),
    }
    step = TrainStep(model, make_optimizer(model.parameters()), settings=OptimizerSpec(on_nan="skip", **limits))
    for kind in broken[:-1]:
        step.accumulate(microbatches[kind])
        step.finish(1e-3)
    before = weights_of(model)
    step.accumulate(microbatches[broken[-1]])
    with pytest.raises(HeadraceError, match=sentence):
        step.finish(1e-3)
    assert all(torch.equal(before[name], now) for name, now in weights_of(model).items())


def test_a_discarded_step_leaves_no_trace(make_row, make_batch, make_model):
    replayed, fresh = make_model(), make_model()
    step = TrainStep(replayed, make_optimizer(replayed.parameters()))
    step.accumulate(collate([make_batch([make_row(1)])]))
    step.discard()
    step.accumulate(collate([make_batch([make_row(2)])]))
    assert step.finish(1e-3) == one_step(fresh, [collate([make_batch([make_row(2)])])])
    assert all(torch.equal(weight, weights_of(fresh)[name]) for name, weight in weights_of(replayed).items())


def test_frozen_parameters_stay(mixed_rows, make_batch, make_model):
    model = make_model()
    model.vision.requires_grad_(False)
    before = weights_of(model)
    one_step(model, [collate([make_batch(mixed_rows)])])
    changed = {name for name, now in weights_of(model).items() if not torch.equal(before[name], now)}
    assert not any(name.startswith("vision.") for name in changed)
    assert any(name.startswith("vision_projector.") for name in changed)


def test_tiny_overfits_a_fixed_batch_in_forty_steps(mixed_rows, make_batch):
    model = build_model("tiny", JobSpec.model_validate(SPEC), 64, 1, 2, 0)
    step = TrainStep(model, make_optimizer(model.parameters()))
    packed, settings = collate([make_batch(mixed_rows)]), OptimizerSpec().resolved("tiny")
    losses = []
    for number in range(40):
        step.accumulate(packed)
        losses.append(step.finish(settings.rate(number)).loss)
    assert losses[0] == pytest.approx(math.log(64), abs=0.5)
    assert losses[14] < 0.7 * losses[0]
    assert losses[-1] < 0.1


# Samples of either rank. `text` leaves the encoders of one rank without gradient, `no media` those of both.
DIVISIONS = {
    "halves": ([0, 1, 2], [3, 4, 5]),
    "text": ([4], [0, 1, 2, 3, 5]),
    "idle": ([], [5, 4, 3, 2, 1, 0]),
    "no media": ([0], [4]),
}


@pytest.mark.timeout(60)
def test_two_ranks_take_the_same_step_as_one_process(mixed_rows, make_batch, tmp_path):
    """With plain descent at rate 1 the weights show the gradients, and the decay which parameters had none at all."""
    paths = [write_part(tmp_path / f"{index}.arrow", make_batch([row])) for index, row in enumerate(mixed_rows)]
    settings = {"spec": SPEC, "vocab_size": 64, "seed": 3, "max_grad_norm": 0.5}
    settings["divisions"] = {name: [[paths[i] for i in rank] for rank in ranks] for name, ranks in DIVISIONS.items()}
    ranks = run_ranks(2, settings, tmp_path)
    for name, members in DIVISIONS.items():
        model = build_model("tiny", JobSpec.model_validate(SPEC), 64, 1, 2, seed=3)
        start = weights_of(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.01)
        step = TrainStep(model, optimizer, settings=OptimizerSpec(max_grad_norm=0.5))
        step.accumulate(collate([make_batch([mixed_rows[i] for rank in members for i in rank])]))
        expected = step.finish()
        totals = [expected.loss, expected.target_weight, expected.grad_norm]
        np.testing.assert_allclose(ranks[0][f"{name}/totals"], totals, rtol=1e-5, err_msg=name)
        for key, weight in weights_of(model).items():
            np.testing.assert_array_equal(ranks[0][f"{name}/{key}"], ranks[1][f"{name}/{key}"], err_msg=f"{name} {key}")
            np.testing.assert_allclose(ranks[0][f"{name}/{key}"], weight.numpy(), atol=1e-6, rtol=1e-5, err_msg=f"{name} {key}")
            moves = name != "no media" or key.startswith("decoder.")
            assert torch.equal(weight, start[key]) != moves, f"{name} {key}"


def write_part(path, batch):
    with pa.ipc.new_stream(path, batch.schema) as writer:
        writer.write_batch(batch)
    return str(path)


def run_ranks(world_size, settings, folder):
    """What every rank wrote. The rendezvous is a file, so no port is needed."""
    (folder / "settings.json").write_text(json.dumps(settings))
    mp.start_processes(rank_worker.main, args=(world_size, folder), nprocs=world_size, start_method="forkserver")
    return [np.load(folder / f"{rank}.npz") for rank in range(world_size)]


def test_embeddings_are_spared_where_the_settings_say_so(make_model):
    model = make_model()
    table = model.decoder.embed.weight
    for spared in (False, True):
        settings = OptimizerSpec(decay_embeddings=not spared)
        decayed, kept = make_optimizer(model.parameters(), settings, embeddings=embedding_parameters(model)).param_groups
        assert (table in set(kept["params"])) == spared
        assert (table in set(decayed["params"])) != spared


def test_the_optimizer_is_as_its_settings_say(make_model):
    settings = OptimizerSpec(learning_rate=0.5, betas=(0.8, 0.85), eps=1e-6, weight_decay=0.03)
    options = make_optimizer(make_model().parameters(), settings).param_groups[0]
    assert {key: options[key] for key in ("lr", "betas", "eps", "weight_decay")} == {
        "lr": 0.5,
        "betas": (0.8, 0.85),
        "eps": 1e-6,
        "weight_decay": 0.03,
    }


def test_matrices_decay_and_vectors_do_not(make_model):
    model = make_model()
    decayed, kept = make_optimizer(model.parameters(), OptimizerSpec(weight_decay=0.2)).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.2, 0.0)
    assert {parameter.ndim for parameter in decayed["params"]} == {2}
    assert {parameter.ndim for parameter in kept["params"]} == {1}
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))
