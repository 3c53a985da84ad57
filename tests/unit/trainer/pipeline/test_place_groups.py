"""Which places of a pipeline sum and exchange what together."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.pipeline.place_groups import context_groups, data_groups, tensor_groups, tied_groups
from headrace.trainer.pipeline.topology import PipelineTopology, Place, UnitTopology
from tests.examples import with_examples

exactly = with_examples(60)
few = st.integers(1, 3)
encoders = st.dictionaries(st.sampled_from(["vision", "audio"]), st.builds(UnitTopology, dp=few, tp=few, pp=few))
llms = st.builds(UnitTopology, dp=few, tp=few, cp=few, pp=few)
topologies = st.builds(lambda others, llm: PipelineTopology(units={"llm": llm, **others}), encoders, llms)


def topology_of(units: dict[str, Any], **fields: Any) -> PipelineTopology:
    return PipelineTopology.model_validate({"units": units, **fields})


def test_slices_of_layers() -> None:
    topology = topology_of({"vision": {"dp": 2}, "llm": {"dp": 2, "tp": 2, "pp": 2}})
    assert data_groups(topology) == ((0, 1), (2, 6), (3, 7), (4, 8), (5, 9))
    assert tensor_groups(topology) == ((0,), (1,), (2, 3), (4, 5), (6, 7), (8, 9))
    assert context_groups(topology) == tuple((number,) for number in range(10))
    assert tied_groups(topology) == ((2, 4), (3, 5), (6, 8), (7, 9))


def test_places_that_share_sequences_have_the_same_weights() -> None:
    topology = topology_of({"vision": {"dp": 2}, "llm": {"dp": 2, "cp": 2, "pp": 2}})
    assert data_groups(topology) == ((0, 1), (2, 3, 6, 7), (4, 5, 8, 9))
    assert tensor_groups(topology) == tuple((number,) for number in range(10))
    assert context_groups(topology) == ((0,), (1,), (2, 3), (4, 5), (6, 7), (8, 9))
    assert tied_groups(topology) == ((2, 4), (3, 5), (6, 8), (7, 9))


def test_slices_of_layers_are_neighbours_among_places_that_share_sequences() -> None:
    topology = topology_of({"llm": {"dp": 2, "cp": 2, "tp": 2}})
    assert data_groups(topology) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert tensor_groups(topology) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert context_groups(topology) == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_ends_on_one_rank_need_no_group() -> None:
    assert tied_groups(topology_of({"llm": {"dp": 3}})) == ()
    assert tied_groups(topology_of({"llm": {}}, schedule="interleaved", chunks=2)) == ()


@exactly
@given(topologies)
def test_each_place_is_in_one_group_of_each_kind(topology: PipelineTopology) -> None:
    for groups in (data_groups(topology), tensor_groups(topology), context_groups(topology)):
        assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
        assert all(list(group) == sorted(group) for group in groups), "replica by replica, slice by slice"


@exactly
@given(topologies)
def test_what_the_places_of_a_group_have_in_common(topology: PipelineTopology) -> None:
    def common(groups: tuple[tuple[int, ...], ...], *names: str) -> None:
        for group in groups:
            places = [topology.place(rank) for rank in group]
            parts = {topology.units[place.unit].tensor_slice(place) for place in places}
            assert len({(place.unit, place.stage, *(getattr(place, name) for name in names)) for place in places}) == 1
            assert len(parts) == (len(group) if groups == tensor_groups(topology) else 1)

    common(data_groups(topology))
    common(tensor_groups(topology), "replica")
    common(context_groups(topology), "replica")
    llm = topology.units["llm"]
    assert {len(group) for group in context_groups(topology)} <= {1, llm.cp}
    assert all(len(group) in {size.dp * size.cp for size in topology.units.values()} for group in data_groups(topology))


@exactly
@given(topologies)
def test_tied_groups_join_the_ends_of_the_llm(topology: PipelineTopology) -> None:
    llm = topology.units["llm"]
    groups = tied_groups(topology)
    assert len(groups) == (llm.dp * llm.num_slices if llm.pp > 1 else 0)
    for first, last in groups:
        place = topology.place(first)
        assert topology.place(last) == Place("llm", place.replica, llm.pp - 1, place.slice)
        assert place.stage == 0
