"""Which processes of a topology exchange messages, and over what."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.schedule import Kind
from headrace.spec import parse
from headrace.trainer.pipeline.channels import Channel, channels_between, channels_within, pairs_of_lanes
from headrace.trainer.pipeline.topology import PipelineTopology

F, B = Kind.FORWARD, Kind.BACKWARD


def topology_of(units: dict[str, dict[str, Any]], **schedule: Any) -> PipelineTopology:
    return parse(PipelineTopology, {**schedule, "units": units}, "topology")


def between(topology: PipelineTopology) -> list[Channel]:
    return sorted(channel for pair in pairs_of_lanes(topology) for channel in channels_between(topology, *pair))


def test_activations_and_gradients_of_adjacent_stages_go_apart() -> None:
    topology = topology_of({"llm": {"pp": 3}})
    assert sorted(channels_within(topology)) == [(F, 0, 1), (F, 1, 2), (B, 1, 0), (B, 2, 1)]


def test_chunks_come_back_from_the_last_stage_to_the_first() -> None:
    topology = topology_of({"llm": {"pp": 2}}, schedule="interleaved", chunks=2)
    assert sorted(channels_within(topology)) == [(F, 0, 1), (F, 1, 0), (B, 0, 1), (B, 1, 0)]


def test_a_process_needs_no_channel_to_itself() -> None:
    assert not list(channels_within(topology_of({"llm": {}}, schedule="interleaved", chunks=2)))


def test_nobody_takes_gradients_where_nothing_learns() -> None:
    frozen = {"pp": 2, "frozen": True, "frozen_projector": True}
    topology = topology_of({"vision": frozen, "llm": {}})
    assert [*channels_within(topology), *between(topology)] == [(F, 0, 1), (F, 1, 2)]


@pytest.mark.parametrize(
    ("encoder", "llm", "receivers"),
    [
        (2, 2, {0: [2], 1: [3]}),
        (4, 2, {0: [4], 1: [4], 2: [5], 3: [5]}),
        (2, 3, {0: [2, 3, 4], 1: [2, 3, 4]}),
    ],
)
def test_replicas_are_connected_within_their_lane(encoder: int, llm: int, receivers: dict[int, list[int]]) -> None:
    channels = between(topology_of({"vision": {"dp": encoder}, "llm": {"dp": llm}}))
    assert {(c.sender, c.receiver) for c in channels if c.kind == F} == {(s, r) for s, rs in receivers.items() for r in rs}
    assert {(c.receiver, c.sender) for c in channels if c.kind == B} == {(s, r) for s, rs in receivers.items() for r in rs}


@pytest.mark.parametrize(
    ("encoder", "llm", "pairs"),
    [
        (2, 4, [(0, 2), (0, 4), (1, 3), (1, 5)]),
        (4, 2, [(0, 4), (1, 5), (2, 4), (3, 5)]),
        (2, 2, [(0, 2), (1, 3)]),
        (2, 3, [(0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 4)]),
    ],
)
def test_slices_of_two_units_are_connected_in_pairs_and_as_evenly_as_can_be(
    encoder: int, llm: int, pairs: list[tuple[int, int]]
) -> None:
    channels = between(topology_of({"vision": {"tp": encoder}, "llm": {"tp": llm}}))
    assert [(c.sender, c.receiver) for c in channels if c.kind == F] == pairs
    assert sorted((c.receiver, c.sender) for c in channels if c.kind == B) == pairs


def test_the_number_of_a_rank_s_channels_does_not_grow_with_the_replicas() -> None:
    topology = topology_of({"vision": {"dp": 64}, "llm": {"dp": 64, "pp": 4, "tp": 4}})
    ends = [rank for channel in [*channels_within(topology), *between(topology)] for rank in channel[1:]]
    assert max(map(ends.count, set(ends))) == 8  # of an encoder: one to each slice of its LLM, and one back from each
