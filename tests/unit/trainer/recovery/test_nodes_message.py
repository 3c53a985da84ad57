"""What the nodes of a job tell the reorder service of their model and of themselves, before they join."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.errors import UserError
from headrace.model_shape import MODEL_SHAPES
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.recovery.nodes_spec import RecoverySpec, nodes_message
from headrace.v1.membership_pb2 import NodesSpec

UNITS = {"encoder": {}, "llm": {}}
SHAPE = MODEL_SHAPES["tiny"]
VOCABULARY = 1_000


def message(**fields: Any) -> NodesSpec:
    spec = RecoverySpec.model_validate({"nodes": 3, "units": UNITS} | fields)
    return nodes_message(spec, SHAPE, num_microbatches=4, vocab_size=VOCABULARY, image=ImageSpec(), audio=AudioSpec())


def test_a_node_has_one_process_unless_its_spec_says_more() -> None:
    assert message().gpus_per_node == 1
    assert message(gpus_per_node=2).gpus_per_node == 2


def test_memory_is_that_of_a_process() -> None:
    assert message(gpus_per_node=2, memory_gib=3).profile.memory_bytes == 3 << 30


def test_more_processes_than_layers_are_refused_as_no_stage_is_shared() -> None:
    most = 1 + SHAPE.llm.layers  # the encoder is not cut
    assert message(gpus_per_node=most).gpus_per_node == most
    words = f"nodes of {most + 1} processes have a stage each, but the model has {most} layers that can be one"
    with pytest.raises(UserError, match=f"{words}: give gpus_per_node {most} or less, as a stage is not shared"):
        message(gpus_per_node=most + 1)


@pytest.mark.parametrize("number", [0, 65])
def test_a_number_of_processes_that_no_node_has_is_refused(number: int) -> None:
    with pytest.raises(ValidationError, match="gpus_per_node"):
        message(gpus_per_node=number)


def test_a_model_of_transformers_brings_its_own_vocabulary_and_no_path_is_compared(tmp_path: Path) -> None:
    """Its weights take what its own embedding has, however few tokens the job's tokenizer knows; hosts may have it elsewhere."""
    compact, adapted = message(), message(model={"llm": str(tmp_path)})
    fewer = 16 * VOCABULARY * SHAPE.llm.width  # float32 with gradient and moments; the shape here has no vocabulary
    assert compact.profile.layer_bytes[-1] - adapted.profile.layer_bytes[-1] == fewer
    assert adapted.training == compact.training
