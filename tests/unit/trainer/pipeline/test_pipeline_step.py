"""A step that is not finite, or has no targets, changes nothing; samples that make it not finite are named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headrace.errors import HeadraceError
from headrace.plan import Microbatch, StepPlan, Topology
from headrace.sample import LABEL_IGNORED, UNIT_COLUMNS
from headrace.spec import parse
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.pipeline.checkpoint import CheckpointWriter, load
from headrace.trainer.pipeline.checkpoint_files import Checkpoint, TensorKey
from headrace.trainer.pipeline.layer_partition import bounds, with_cuts
from headrace.trainer.pipeline.pipeline_step import PipelineStep
from headrace.trainer.pipeline.process_groups import ProcessGroups
from headrace.trainer.pipeline.routes import Portion, Routes
from headrace.trainer.pipeline.stage_building import build_stages
from headrace.trainer.pipeline.topology import PipelineTopology
from headrace.trainer.train_step import StepResult
from tests.verify import processes
from tests.verify.batches import AUDIO, IMAGE, SHAPE, VOCAB, make_row, packed, whole_model
from tests.verify.processes import Order, Processes

SAMPLES = (3, 5, 8, 9)
TEXTS = [row for sample in range(200) if not (row := make_row(sample, audio=False))["image_grids"]]


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def step(request: pytest.FixtureRequest, group: None) -> PipelineStep:
    """An LLM alone, in this process. A parameter, where there is one: its optimizer's settings."""
    return make_step(getattr(request, "param", OptimizerSpec()))


def make_step(settings: OptimizerSpec, *, shard_weights: bool = False, compile: bool = False, **schedule: Any) -> PipelineStep:
    """shard_weights: as one of several replicas would, though there is one, whose shard is everything."""
    of_unit = {"shard_weights": shard_weights, "compile": compile}
    topology = parse(PipelineTopology, {**schedule, "units": {"llm": of_unit}}, "topology")
    topology = with_cuts(topology, SHAPE, vocab_size=VOCAB, image=IMAGE, audio=AUDIO)
    cuts = bounds(topology, SHAPE, vocab_size=VOCAB, image=IMAGE, audio=AUDIO)["llm"]
    groups = ProcessGroups.make(topology, torch.device("cpu"), tied=True)
    place = topology.place(0)
    if shard_weights:
        groups = replace(groups, of_place={place: replace(groups.of_place[place], replicas=groups.everybody)})
    stages = build_stages(whole_model, topology, place, cuts, seed=1, device=torch.device("cpu"), slices=None)
    return PipelineStep(topology, {place: stages}, groups, settings=settings)


def routes() -> Routes:
    microbatches = [Microbatch(units={"llm": SAMPLES[:2]}), Microbatch(units={"llm": SAMPLES[2:]})]
    topology = Topology(replicas=1, microbatches=2, stages={"llm": 1})
    plan = StepPlan(strategy="by hand", seed=0, topology=topology, replicas=[microbatches])
    return Routes(plan, {"llm": 1})


def run(step: PipelineStep, learning_rate: float) -> StepResult:
    return step.run(routes(), [step.places[0].prepare.feed(routes(), text_of)], learning_rate)


def text_of(portion: Portion) -> PackedMicrobatch:
    rows = [make_row(sample, audio=False) for sample in portion.samples]
    for row in rows:
        row["input_ids"] = row["input_ids"].clip(3)  # no placeholders: nothing stands in front of the LLM here
    return packed(rows, UNIT_COLUMNS["llm"])


def test_a_step_learns(step: PipelineStep) -> None:
    losses = [run(step, 1e-3).loss for _ in range(4)]
    assert losses[-1] < losses[0]


def test_a_checkpoint_has_fused_matrices_one_by_one_and_is_loaded_into_them(step: PipelineStep, tmp_path: Path) -> None:
    """As checkpoints had them before they were fused, so that these and those are read alike."""
    run(step, 1e-2)
    with CheckpointWriter(tmp_path, step) as writer:
        writer.save(1, {})
    checkpoint = Checkpoint.newest(tmp_path)
    mlp = step.places[0].stages[0].layers[3].mlp
    for name, rows in {"gate": slice(48), "up": slice(48, 96)}.items():
        key = TensorKey(name=f"decoder.layers.3.mlp.{name}.weight", kind="weight")
        assert torch.equal(checkpoint.read(key, (48, 32)), mlp.gate_up.weight[rows])
        moment, fused = (replace(key, name=whole, kind="exp_avg") for whole in (key.name, "decoder.layers.3.mlp.gate_up.weight"))
        assert checkpoint.read(moment, (48, 32)).any()
        assert fused not in checkpoint
    again = make_step(OptimizerSpec())
    load(checkpoint, again)
    found, expected = (run(one, 1e-2) for one in (again, step))
    assert found == expected
    assert all(torch.equal(*both) for both in zip(again.places[0].parameters, step.places[0].parameters, strict=True))


def test_two_chunks_in_one_process_that_share_a_matrix_learn_as_one_stage(step: PipelineStep) -> None:
    chunks = make_step(OptimizerSpec(), schedule="interleaved", chunks=2)
    first, last = chunks.places[0].stages
    assert first.model.decoder.embed.weight is last.model.decoder.embed.weight
    found, expected = ([run(one, 1e-3) for _ in range(3)] for one in (chunks, step))
    for result, right in zip(found, expected, strict=True):
        assert (result.loss, result.grad_norm) == pytest.approx((right.loss, right.grad_norm), rel=1e-5)


@pytest.mark.parametrize("schedule", [{}, {"schedule": "interleaved", "chunks": 2}], ids=["a stage", "two chunks"])
def test_a_stage_that_gathers_its_weights_learns_the_same_and_forecasts_what_it_keeps(
    step: PipelineStep, schedule: dict[str, Any]
) -> None:
    sharded = make_step(OptimizerSpec(), shard_weights=True, **schedule)
    memory = sharded.places[0].forecast_memory(IMAGE, AUDIO)
    for found, right in zip(*([run(one, 1e-3) for _ in range(3)] for one in (sharded, step)), strict=True):
        assert (found.loss, found.grad_norm) == pytest.approx((right.loss, right.grad_norm), rel=1e-5)
    assert sum(parameter.untyped_storage().nbytes() for parameter in sharded.places[0].parameters) == 0
    assert memory.forecast is not None
    whole = sum(4 * parameter.numel() for parameter in step.places[0].parameters)
    largest = max(stage.sharded.gathered_bytes for stage in sharded.places[0].stages if stage.sharded is not None)
    assert memory.forecast.state.weights == whole + largest
    assert 0 < largest < whole
    loss_sum, num_targets = sharded.evaluate(routes(), [sharded.places[0].prepare.feed(routes(), text_of)])
    expected, _ = step.evaluate(routes(), [step.places[0].prepare.feed(routes(), text_of)])
    assert loss_sum == pytest.approx(expected, rel=1e-5)
    assert num_targets > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which torch's tracer looks at
def test_a_compiled_stage_learns_the_same(step: PipelineStep, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:  # runs what it is given, where a compiler would make kernels of it
        traced.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    compiled = make_step(OptimizerSpec(), compile=True)
    for found, right in zip(*([run(one, 1e-3) for _ in range(3)] for one in (compiled, step)), strict=True):
        assert (found.loss, found.grad_norm) == pytest.approx((right.loss, right.grad_norm), rel=1e-5)
    assert 0 < len(traced) < 2 * len(compiled.places[0].stages[0].layers), "once for all lengths and all layers that are alike"


@pytest.fixture
def spoilt(step: PipelineStep) -> torch.utils.hooks.RemovableHandle:
    """The second microbatch has a loss that is no number, until this is removed."""
    length = len(text_of(Portion("llm", 0, 1, 1, SAMPLES[2:])).input_ids)
    assert length != len(text_of(Portion("llm", 0, 0, 0, SAMPLES[:2])).input_ids)
    entry = step.places[0].stages[0].layers[0].mlp.entry
    return entry.register_forward_hook(lambda _, inputs, output: output * float("nan") if len(inputs[0]) == length else output)


def test_a_loss_that_is_no_number_changes_nothing_and_names_the_samples(step: PipelineStep, spoilt: Any) -> None:
    before = [parameter.detach().clone() for parameter in step.places[0].parameters]
    with pytest.raises(HeadraceError, match=r"\(loss nan, .* in a microbatch of the samples 8, 9; it is not committed"):
        run(step, 1e-2)
    spoilt.remove()
    assert all(torch.equal(one, other) for one, other in zip(before, step.places[0].parameters, strict=True))
    assert all(parameter.grad is None for parameter in step.places[0].parameters)
    assert run(step, 1e-2).target_weight > 0


@pytest.mark.parametrize("step", [OptimizerSpec(on_nan="skip", max_skips_in_row=2)], indirect=True)
def test_a_skipped_step_changes_nothing_and_its_samples_are_known(step: PipelineStep, spoilt: Any) -> None:
    before = [parameter.detach().clone() for parameter in step.places[0].parameters]
    assert [run(step, 1e-2).skipped for _ in range(2)] == [1, 2]
    assert step.non_finite_samples == [8, 9]
    assert all(torch.equal(one, other) for one, other in zip(before, step.places[0].parameters, strict=True))
    assert not list(step.places[0].optimizer.state())
    with pytest.raises(HeadraceError, match="the 2 before it were skipped as well"):
        run(step, 1e-2)
    spoilt.remove()
    assert run(step, 1e-2).skipped == 0


@pytest.mark.slow
def test_a_step_without_targets_ends_also_where_a_replica_has_no_part_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica that has one begins to sum its gradients before anybody knows that there are no targets."""
    monkeypatch.setattr(processes, "TIMEOUT_S", 60.0)
    without = next(row["sample_id"] for row in TEXTS if all(row["labels"] == LABEL_IGNORED))
    replicas = [[Microbatch(units={"llm": (without,)})], [Microbatch(units={"llm": ()})]]
    topology = Topology(replicas=2, microbatches=1, stages={"llm": 1})
    plan = StepPlan(strategy="by hand", seed=0, topology=topology, replicas=replicas).to_json()
    order = Order({"units": {"llm": {"dp": 2}}}, [plan, plan], audio=False, learning_rate=1e-3)
    with Processes(2) as both:
        answers = both.run(order)
    assert [[result.target_weight for result in answer.results] for answer in answers] == [[0, 0, 0]] * 2
    assert not any(answer.moments for answer in answers)
