"""Learning rates by the step, and settings that are refused in a sentence."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import SpecError, UserError
from headrace.spec import parse
from headrace.trainer.optimizer_spec import PEAK_LEARNING_RATES, OptimizerSpec, load_optimizer_yaml
from headrace.trainer.pipeline.topology import PipelineTopology, load_topology_yaml
from headrace.trainer.recovery.nodes_spec import RecoverySpec, nodes_message
from headrace.v1.membership_pb2 import NodesSpec
from tests.verify.batches import AUDIO, IMAGE, SHAPE, VOCAB


def rates(steps: int, **fields: Any) -> list[float]:
    settings = OptimizerSpec(learning_rate=4.0, **fields)
    return [settings.rate(step) for step in range(steps)]


def test_the_rate_warms_up_and_stays() -> None:
    assert rates(6, warmup_steps=3) == pytest.approx([1.0, 2.0, 3.0, 4.0, 4.0, 4.0])
    assert rates(2, warmup_steps=0) == [4.0, 4.0]


def test_a_cosine_falls_to_its_floor_and_stays_there() -> None:
    cosine = rates(20, warmup_steps=2, decay="cosine", decay_steps=12, floor=0.25)
    assert max(cosine) == cosine[2] == 4.0
    assert cosine[7] == pytest.approx((4.0 + 1.0) / 2)
    assert cosine[12:] == pytest.approx([1.0] * 8)
    assert all(later <= earlier for earlier, later in pairwise(cosine[2:]))


def test_a_line_falls_to_its_floor_and_stays_there() -> None:
    assert rates(8, warmup_steps=1, decay="linear", decay_steps=5, floor=0.0) == pytest.approx([2, 4, 3, 2, 1, 0, 0, 0])


@pytest.mark.parametrize("name", PEAK_LEARNING_RATES)
def test_without_settings_a_named_model_has_its_rate(name: str) -> None:
    """What models of ours learnt with before there were settings: a peak by size, and three steps of warm-up."""
    settings, peak = OptimizerSpec().resolved(name), PEAK_LEARNING_RATES[name]
    assert [settings.rate(step) for step in range(5)] == [peak * (step + 1) / 4 for step in range(3)] + [peak] * 2
    assert settings.decay_embeddings


def test_pretrained_weights_need_a_rate() -> None:
    with pytest.raises(UserError, match=r"/models/llm are pretrained, .* rate 0.003 .* set optimizer.learning_rate"):
        OptimizerSpec().resolved("tiny", [Path("/models/llm")])
    settings = OptimizerSpec(learning_rate=1e-5).resolved("tiny", [Path("/models/llm")])
    assert settings.rate(100) == 1e-5
    assert settings.decay_embeddings is False


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"learning_rate": 0}, "learning_rate: must be greater than 0"),
        ({"learning_rate": float("nan")}, "learning_rate: must be a finite number"),
        ({"decay": "cosine"}, "decay 'cosine' needs it"),
        ({"decay_steps": 100}, "set decay to one of them"),
        ({"decay": "linear", "decay_steps": 3}, "decay_steps must be above warmup_steps 3, got 3"),
        ({"betas": [0.9, 1.0]}, "betas.1: must be less than 1"),
        ({"on_nan": "hope"}, "on_nan: must be 'stop' or 'skip'"),
        ({"rate": 1}, "rate: there is no such field"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse(OptimizerSpec, fields, "optimizer")
    assert sentence in str(refused.value)


def test_the_section_is_the_same_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "any.yaml"
    section = "optimizer: {learning_rate: 1e-5, decay: cosine, decay_steps: 100, max_grad_norm: .inf}\n"
    path.write_text(section)
    settings = load_optimizer_yaml(path)
    assert settings.learning_rate == 1e-5, "YAML takes 1e-5 for text"
    path.write_text(section + "units: {llm: {}}\n")
    assert load_topology_yaml(path).optimizer == settings
    nodes = parse(RecoverySpec, {"nodes": 2, "units": {"llm": {}}, "optimizer": settings.model_dump()}, "nodes")
    assert nodes.optimizer == settings
    assert PipelineTopology.model_validate({"units": {"llm": {}}}).optimizer == OptimizerSpec()


def test_nodes_with_another_optimizer_have_another_specification() -> None:
    """The reorder service compares what this makes of the files of all nodes."""

    def told(precision: str = "fp32", **optimizer: Any) -> NodesSpec:
        spec = RecoverySpec.model_validate({"nodes": 2, "units": {"llm": {}}, "optimizer": optimizer})
        return nodes_message(spec, SHAPE, num_microbatches=2, vocab_size=VOCAB, image=IMAGE, audio=AUDIO, precision=precision)

    assert told(learning_rate=1e-4) == told(learning_rate=1e-4)
    assert told(learning_rate=1e-4) != told(learning_rate=2e-4)
    assert told() != told("bf16")
