"""Where the ranks of a disaggregated pipeline stand, and what is said of a topology that cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SpecError, UserError
from headrace.execution_spec import ExecutionSpec, UnitExecution
from headrace.model_shape import MODEL_SHAPES
from headrace.spec import JobSpec, parse_spec
from headrace.topology_spec import TopologySpec
from headrace.trainer.pipeline.topology import PipelineTopology, Place, UnitTopology, load_topology_yaml
from headrace.trainer.recovery.nodes_spec import RecoverySpec
from tests.examples import with_examples

TINY = MODEL_SHAPES["tiny"]  # vision and audio: 2 layers, 2 heads; llm: 4 layers, 4 heads, 2 kv_heads, mlp 352

exactly = with_examples(60)
few = st.integers(1, 3)
encoders = st.dictionaries(st.sampled_from(["vision", "audio"]), st.builds(UnitTopology, dp=few, tp=few, pp=few))
llms = st.builds(UnitTopology, dp=few, tp=few, cp=few, pp=few)
topologies = st.builds(lambda others, llm: PipelineTopology(units={"llm": llm, **others}), encoders, llms)


def topology_of(units: dict[str, Any], **fields: Any) -> PipelineTopology:
    return PipelineTopology.model_validate({"units": units, **fields})


def load(tmp_path: Path, document: Any) -> PipelineTopology:
    path = tmp_path / "topology.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document, sort_keys=False))
    return load_topology_yaml(path)


def test_a_document_is_read_with_defaults_and_in_pipeline_order(tmp_path: Path) -> None:
    text = """
schedule: interleaved
chunks: 2
units:
  generator: {}
  llm: {tp: 2, pp: 2, checkpointing: true, cuts: [1, 2, 3]}
  audio: {frozen: true, frozen_projector: true}
  vision: {dp: 2}
"""
    topology = load(tmp_path, text)
    assert list(topology.units) == ["audio", "vision", "llm", "generator"]
    assert topology.stages == {"audio": 1, "vision": 1, "llm": 2, "generator": 1}
    assert topology.units["llm"] == UnitTopology(dp=1, tp=2, pp=2, checkpointing=True, cuts=(1, 2, 3))
    assert topology.units["audio"] == UnitTopology(frozen=True, frozen_projector=True)
    assert (topology.schedule, topology.chunks, topology.in_flight) == ("interleaved", 2, None)
    assert (topology.num_parts("llm"), topology.units["llm"].num_places, topology.world_size) == (4, 4, 8)


def test_the_default_is_1f1b_in_one_process_a_unit() -> None:
    topology = topology_of({"vision": {}, "llm": {}})
    assert (topology.schedule, topology.chunks, topology.in_flight, topology.world_size) == ("1f1b", 1, None, 2)


def test_ranks_go_unit_by_unit_then_by_replica_stage_and_slice() -> None:
    topology = topology_of({"vision": {"dp": 2}, "llm": {"dp": 2, "tp": 2, "pp": 2}})
    assert [topology.place(rank) for rank in (0, 1)] == [Place("vision", 0, 0, 0), Place("vision", 1, 0, 0)]
    assert [topology.place(rank) for rank in range(2, 10)] == [
        Place("llm", replica, stage, tensor_slice) for replica in (0, 1) for stage in (0, 1) for tensor_slice in (0, 1)
    ]
    assert topology.ranks("llm") == range(2, 10)


@exactly
@given(topologies)
def test_place_and_rank_are_inverse(topology: PipelineTopology) -> None:
    places = [topology.place(rank) for rank in range(topology.world_size)]
    assert [topology.rank(place) for place in places] == list(range(topology.world_size))
    assert {unit: sum(place.unit == unit for place in places) for unit in topology.units} == {
        unit: size.dp * size.tp * size.cp * size.pp for unit, size in topology.units.items()
    }


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_outside_has_no_place(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank must be from 0 to 2, got {rank}"):
        topology_of({"vision": {}, "llm": {"pp": 2}}).place(rank)


@pytest.mark.parametrize("place", [Place("audio", 0, 0, 0), Place("llm", 1, 0, 0), Place("llm", 0, 2, 0), Place("llm", 0, 0, -1)])
def test_a_place_outside_has_no_rank(place: Place) -> None:
    with pytest.raises(ValueError, match=r"there is no .* in units of dp x tp x pp vision 1 x 1 x 1, llm 1 x 1 x 2"):
        topology_of({"vision": {}, "llm": {"pp": 2}}).rank(place)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "a topology is a mapping of fields, lines such as `field: value`; got a list"),
        ({}, "units: is required"),
        ({"units": {}}, "units: must name 'llm', got none: add it"),
        ({"units": {"vision": {}}}, "units: must name 'llm', got vision: add it"),
        ({"units": {"llm": {"tp": 0}}}, "units.llm.tp: must be greater than or equal to 1, got 0"),
        ({"units": {"llm": {"ep": 2}}}, "units.llm.ep: there is no such field, got 2"),
        (
            {"units": {"llm": {"cp": 2, "compile": True}, "generator": {}}},
            "topology: unit 'llm' has cp 2 and compile true and a generator behind it, but layers that share sequences are not "
            "compiled, and a generator takes no part of one: leave out one or the other",
        ),
        (
            {"units": {"llm": {"cp": "auto"}}},
            "topology: unit 'llm' has cp auto, which chooses a number of FSDP ranks for each sequence, but in a pipeline all "
            "share one: give a number, or take FSDP ranks",
        ),
        (
            {"units": {"vision": {"cp": 2}, "llm": {}}},
            "topology: unit 'vision' has cp 2, which shares sequences of the llm, and media are not cut: take it away, or set it "
            "of 'llm'",
        ),
        (
            {"units": {"llm": {"frozen_projector": True}}},
            "topology: 'llm' is the last unit and has no projector behind it: take away its frozen_projector",
        ),
        (
            {"units": {"llm": {"frozen": True, "frozen_layers": 2}}},
            "topology: unit 'llm' is frozen as a whole, and so are more than its first 2 layers: "
            "take away its frozen or its frozen_layers",
        ),
        (
            {"units": {"llm": {"compile": True, "tp": 2}}},
            "topology: unit 'llm' has compile true, tp 2 and schedule '1f1b', but layers in slices, and those under "
            "'zero-bubble', are not compiled: take compile false, or tp 1 and another schedule",
        ),
        (
            {"schedule": "zero-bubble", "units": {"llm": {"compile": True}}},
            "topology: unit 'llm' has compile true, tp 1 and schedule 'zero-bubble', but layers in slices, and those under "
            "'zero-bubble', are not compiled: take compile false, or tp 1 and another schedule",
        ),
        (
            {"units": {"llm": {"tp_overlap": 2}}},
            "topology: unit 'llm' has tp_overlap 2, tp 1 and schedule '1f1b', but only slices exchange rows, and under "
            "'zero-bubble' all at once: take tp_overlap 1, or tp 2 or more and another schedule",
        ),
        (
            {"schedule": "zero-bubble", "units": {"llm": {"tp": 2, "tp_overlap": 2}}},
            "topology: unit 'llm' has tp_overlap 2, tp 2 and schedule 'zero-bubble', but only slices exchange rows, and under "
            "'zero-bubble' all at once: take tp_overlap 1, or tp 2 or more and another schedule",
        ),
        (
            {"schedule": "zigzag", "units": {"llm": {}}},
            "topology: no schedule 'zigzag'; there are 1f1b, interleaved, gpipe, eager, zero-bubble",
        ),
        (
            {"chunks": 2, "units": {"llm": {}}},
            "topology: chunks must be at least 1, and more only with 'interleaved', got 2 with '1f1b'",
        ),
        (
            {"in_flight": 2, "units": {"llm": {}}},
            "topology: in_flight is a limit of at least 1 and only for 'eager', got 2 with '1f1b'",
        ),
        (
            {"units": {"llm": {"pp": 3, "cuts": [2]}}},
            "topology: unit 'llm' has 1 cuts, but pp 3 x chunks 1 parts need 2: change its cuts or its pp",
        ),
        *(
            (
                {"units": {"llm": {"pp": 3, "cuts": cuts}}},
                f"topology: the cuts of unit 'llm' must rise and begin at 1 or later, got {cuts}: "
                "give each part at least one layer",
            )
            for cuts in ([0, 1], [2, 2], [2, 1])
        ),
    ],
)
def test_a_wrong_document_is_refused_in_one_sentence(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, document)
    assert str(caught.value) == f"{tmp_path / 'topology.yaml'}: {message}"


def job_of(topology: PipelineTopology, **fields: Any) -> JobSpec:
    """Return a job that plans for trainers of that topology."""
    planned = TopologySpec(replicas=topology.units["llm"].dp, stages=topology.stages)
    spec = parse_spec({"name": "j", "sources": [{"path": "/data"}], **fields})
    return spec.model_copy(update={"topology": planned, "execution": topology.execution})


def test_a_job_is_planned_for_other_trainers_and_keeps_what_they_do_not_say() -> None:
    spec = job_of(topology_of({"vision": {}, "llm": {"pp": 2}}), global_batch=8)
    links = {"llm": UnitExecution(exchange_s=(0.1, 0.4))}
    spec = spec.with_execution(spec.execution.model_copy(update={"memory_gib": 3.0, "units": links}))
    ours = topology_of({"vision": {"frozen": True}, "llm": {"dp": 3, "pp": 4}}, schedule="gpipe")
    changed = ours.planned_for(spec, 3)
    ours.check_execution(changed.execution, changed.topology.stages)
    assert changed.execution.of_units("exchange_s") == {"llm": (0.1, 0.4)}
    assert (changed.execution.memory_gib, changed.global_batch) == (3.0, 8)


@exactly
@given(topologies.filter(lambda topology: {"vision", "audio"} & set(topology.units)))
def test_trainers_that_take_their_topology_from_the_job_get_the_one_it_was_planned_for(topology: PipelineTopology) -> None:
    assert PipelineTopology.of_job(job_of(topology)) == topology


def test_a_file_without_units_is_of_the_trainers_own_settings_and_the_job_has_the_pipeline(tmp_path: Path) -> None:
    units = {"vision": {"dp": 2, "frozen": True}, "llm": {"tp": 2, "pp": 2, "max_rows": 300, "cuts": [1]}}
    planned = topology_of(units, schedule="gpipe")
    (tmp_path / "trainers.yaml").write_text("optimizer: {learning_rate: 0.25}")
    topology = load_topology_yaml(tmp_path / "trainers.yaml", job_of(planned))
    assert topology.optimizer.learning_rate == 0.25
    assert topology.model_copy(update={"optimizer": planned.optimizer}) == planned
    with pytest.raises(SpecError, match="units: is required"):
        load_topology_yaml(tmp_path / "trainers.yaml")


def test_a_file_that_is_not_there_or_not_yaml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cannot read the topology .*missing\.yaml"):
        load_topology_yaml(tmp_path / "missing.yaml")
    with pytest.raises(SpecError, match="is not valid YAML"):
        load(tmp_path, "units: [")


def test_slices_divide_the_mlp_too() -> None:
    shape = replace(TINY, llm=replace(TINY.llm, mlp=351))
    with pytest.raises(UserError, match="tp 2 of unit 'llm' does not divide its mlp 351: set its tp to a divisor of 1"):
        topology_of({"llm": {"tp": 2}}).check(2, shape)


def test_a_model_s_generator_and_the_topology_s_go_together() -> None:
    generating = MODEL_SHAPES["tiny-generator"]
    both = topology_of({"vision": {}, "llm": {}, "generator": {"pp": 2, "tp": 2}})
    both.check(6, generating)
    with pytest.raises(UserError, match="the model has no unit 'generator', only encoder, vision, audio, llm: take 'generator'"):
        both.check(6, TINY)
    with pytest.raises(UserError, match="the model has a generator, but units does not: name it there, or take a model without"):
        topology_of({"vision": {}, "llm": {}}).check(2, generating)


def test_a_topology_that_fits_passes() -> None:
    topology_of({"vision": {"dp": 2, "tp": 2}, "audio": {"pp": 2}, "llm": {"tp": 2, "pp": 2, "cuts": [3]}}).check(10, TINY)
    topology_of({"llm": {"pp": 2, "cuts": [1, 2, 3]}}, schedule="interleaved", chunks=2).check(2, TINY)


@pytest.mark.parametrize(
    ("units", "fields", "world_size", "message"),
    [
        (
            {"vision": {"dp": 2}, "llm": {"dp": 2, "pp": 2}},
            {},
            4,
            "the topology needs 6 processes (vision 2 x 1 x 1, llm 2 x 1 x 2), but there are 4: "
            "start 6 processes (torchrun's nodes x --nproc-per-node), or change a unit's dp, tp or pp (they stand in this order)",
        ),
        (
            {"vision": {}, "llm": {"dp": 2, "cp": 3, "pp": 2}},
            {},
            4,
            "the topology needs 13 processes (vision 1 x 1 x 1, llm 2 x 1 x 2 with cp 3), but there are 4: "
            "start 13 processes (torchrun's nodes x --nproc-per-node), or change a unit's dp, tp or pp "
            "(they stand in this order), or the cp of 'llm'",
        ),
        (
            {"video": {}, "llm": {}},
            {},
            2,
            "the model has no unit 'video', only encoder, vision, audio, llm: take 'video' out of units",
        ),
        (
            {"encoder": {}, "audio": {}, "llm": {}},
            {},
            3,
            "unit 'encoder' is vision and audio together: name either it or the two",
        ),
        (
            {"encoder": {"tp": 2}, "llm": {}},
            {},
            3,
            "unit 'encoder' holds several encoders, whole: for pp, tp, chunks, checkpointing, frozen_layers, compile or "
            "fp32_residual_connection, name 'vision' and 'audio' in its place",
        ),
        (
            {"encoder": {"compile": True}, "llm": {}},
            {},
            2,
            "unit 'encoder' holds several encoders, whole: for pp, tp, chunks, checkpointing, frozen_layers, compile or "
            "fp32_residual_connection, name 'vision' and 'audio' in its place",
        ),
        (
            {"vision": {"frozen_layers": 2}, "llm": {}},
            {},
            2,
            "unit 'vision' has 2 layers, but frozen_layers is 2: lower it, or set frozen",
        ),
        (
            {"llm": {"pp": 5}},
            {},
            5,
            "unit 'llm' has 4 layers, too few for pp 5 = 5 parts of at least one layer: lower its pp",
        ),
        (
            {"vision": {"pp": 2}, "llm": {}},
            {"schedule": "interleaved", "chunks": 2},
            3,
            "unit 'vision' has 2 layers, too few for pp 2 x chunks 2 = 4 parts of at least one layer: lower its pp or chunks",
        ),
        (
            {"llm": {"tp": 3}},
            {},
            3,
            "tp 3 of unit 'llm' does not divide its heads 4: set its tp to a divisor of 2",
        ),
        (
            {"llm": {"tp": 4}},
            {},
            4,
            "tp 4 of unit 'llm' does not divide its kv_heads 2: set its tp to a divisor of 2",
        ),
        (
            {"llm": {"pp": 2, "cuts": [4]}},
            {},
            2,
            "unit 'llm' has layers 0 to 3, but a part that begins at 4: lower its cuts",
        ),
    ],
)
def test_a_topology_that_does_not_fit_is_refused_in_one_sentence(
    units: dict[str, Any], fields: dict[str, Any], world_size: int, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        topology_of(units, **fields).check(world_size, TINY)
    assert str(caught.value) == message


def test_trainers_that_run_something_else_than_is_planned_for_are_told_both() -> None:
    topology = PipelineTopology.model_validate(
        {"schedule": "zero-bubble", "units": {"vision": {"frozen": True}, "llm": {"pp": 2, "checkpointing": True}}}
    )
    stages = {"vision": 1, "llm": 2}
    topology.check_execution(ExecutionSpec(), {"vision": 1, "llm": 7})  # of a job that says nothing
    topology.check_execution(ExecutionSpec(coefficients={"units": {}}), {"vision": 1, "llm": 7})  # says nothing of the trainers
    topology.check_execution(topology.execution, stages)
    topology.check_execution(topology.execution.model_copy(update={"memory_gib": 40.0}), stages)  # which a topology does not know
    topology.check_execution(topology.execution.model_copy(update={"trainer": None}), stages)
    for change, sentence in (
        ({"schedule": "1f1b"}, "the job plans for schedule 1f1b, but the topology of the trainers has zero-bubble: "),
        ({"units": {}}, "the job plans for frozen units none, but the topology of the trainers has vision: "),
        (
            {"units": {**topology.execution.units, "llm": UnitExecution(tp=2, checkpointing=True)}},
            r"the job plans for tp units llm \(2\), but the topology of the trainers has none: ",
        ),
    ):
        with pytest.raises(UserError, match=sentence):
            topology.check_execution(topology.execution.model_copy(update=change), stages)
    with pytest.raises(UserError, match="the job plans for trainer colocated, but the topology of the trainers has pipeline: "):
        topology.check_execution(ExecutionSpec(trainer="colocated"), stages)
    with pytest.raises(
        UserError, match=r"plans for stages llm \(3\), vision \(1\), but the topology of the trainers has llm \(2\), vision"
    ):
        topology.check_execution(topology.execution, {"vision": 1, "llm": 3})


def test_a_job_is_planned_for_the_dp_of_each_unit_and_trainers_with_another_are_told_both() -> None:
    topology = topology_of({"vision": {"dp": 3}, "audio": {"dp": 2}, "llm": {"dp": 2}})
    assert topology.execution.of_units("dp") == {"vision": 3}, "audio has as many as the llm"
    topology.check_execution(topology.execution, topology.stages)
    spelled_out = {"vision": UnitExecution(dp=3), "audio": UnitExecution(dp=2)}
    topology.check_execution(ExecutionSpec(units=spelled_out), topology.stages)
    sentence = r"the job plans for units with a dp of their own none, but the topology of the trainers has vision \(3\): change"
    with pytest.raises(UserError, match=sentence):
        topology.check_execution(ExecutionSpec(latency_us=1.0), topology.stages)


def test_trainers_that_share_no_sequences_of_a_job_that_does_are_told_both_and_so_are_nodes() -> None:
    shared = topology_of({"vision": {}, "llm": {"cp": 2}})
    shared.check_execution(shared.execution, shared.stages)
    with pytest.raises(UserError, match=r"plans for cp units llm \(2\), but the topology of the trainers has none: change one"):
        topology_of({"vision": {}, "llm": {}}).check_execution(shared.execution, shared.stages)
    nodes = RecoverySpec.model_validate({"nodes": 4, "units": {"vision": {}, "llm": {}}})
    with pytest.raises(UserError, match=r"execution plans for cp units llm \(2\), but the nodes' spec has none: change one of"):
        nodes.check_execution(shared.execution)
