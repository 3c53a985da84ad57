"""On which rows the layers of a unit run under each form: what is computed is what is balanced, and what comes out is equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.errors import UserError
from headrace.sample import UNIT_COLUMNS
from headrace.trainer.orchestrated.padded_rows import PaddedAttention
from headrace.trainer.orchestrated.unit_roots import StageRoot
from headrace.trainer.pipeline.stage import Stage
from headrace.trainer.pipeline.stage_building import STAGES
from tests.verify.batches import SHAPE, packed_samples, whole_model

SAMPLES = (0, 1, 2, 3, 4, 5)


def stage_of(unit: str) -> Stage:
    stage = STAGES[unit](whole_model(), unit, 0, SHAPE.units[unit].layers)
    stage.to_empty(device="cpu")
    with torch.no_grad():
        for number, parameter in enumerate(stage.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) / 4)
    return stage


def rows_in_mlps(stage: Stage) -> list[int]:
    """Filled in a forward: how many rows the MLP of each layer computes."""
    seen: list[int] = []

    def note(_: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(len(args[0]))

    for layer in stage.layers:
        layer.get_submodule("mlp").register_forward_pre_hook(note)
    return seen


@pytest.mark.parametrize("unit", ["vision", "audio", "llm"])
def test_padded_layers_run_on_as_many_rows_as_the_longest_times_their_number(unit: str) -> None:
    data = packed_samples(SAMPLES, audio=True, columns=UNIT_COLUMNS[unit])
    lengths = {
        "vision": data.image_cu_seqlens.diff(),
        "audio": (data.mel_frames + 1) // 2,
        "llm": data.cu_seqlens.diff(),
    }[unit]
    packed, padded = int(lengths.sum()), len(lengths) * int(lengths.max())
    assert packed < padded
    expected = {"no_padding": packed, "third": packed, "fourth": packed, "padded": padded}
    arrived = {}
    if unit == "llm":
        tokens = {name: int((data.input_ids == token).sum()) for name, token in (("vision", 1), ("audio", 2))}
        arrived = {name: torch.ones(count, SHAPE.llm.width) for name, count in tokens.items()}
    outcomes = {}
    for form, rows in expected.items():
        stage = stage_of(unit)
        root, seen = StageRoot(stage, form), rows_in_mlps(stage)
        made = root(root.prepare(data), arrived)
        made.square().sum().backward()
        assert seen == [rows] * len(stage.layers), form
        outcomes[form] = [made.detach(), *(p.grad for p in stage.parameters() if p.grad is not None)]
    for form in ("third", "fourth", "padded"):
        for ours, theirs in zip(outcomes[form], outcomes["no_padding"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def test_empty_segments_have_no_row_of_the_batch() -> None:
    attend = PaddedAttention.of((2, 0, 3), causal=False, is_spread=False)
    assert attend.inside.tolist() == [[True, True, False], [True, True, True]]
    assert attend.cells.tolist() == [0, 1, 3, 4, 5]
    rows = torch.arange(5.0)[:, None]
    assert torch.equal(attend.collect(attend.spread(rows)), rows)


def test_layers_that_take_packed_rows_alone_are_refused_with_the_form_that_they_can_have() -> None:
    class Adapted(type(whole_model().vision)):  # type: ignore[misc]
        """As the encoders of `transformers` are: another kind of vision encoder."""

    stage = stage_of("vision")
    stage.model.vision.__class__ = Adapted
    with pytest.raises(UserError, match=r"forms says that vision is padded, but the layers of its Adapted take .*: set fourth"):
        StageRoot(stage, "padded")
    root = StageRoot(stage, "fourth")
    output: Tensor = root(root.prepare(packed_samples(SAMPLES, audio=True, columns=UNIT_COLUMNS["vision"])), {})
    assert output.isfinite().all()
