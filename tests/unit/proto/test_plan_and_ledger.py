"""StepPlan's invariants and public form; the ledger's hash; values on the wire."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import message_codec
from headrace.ledger import LedgerEntry, ledger_sha256
from headrace.plan import GENERATOR, LLM, Microbatch, Predicted, StepPlan, Topology
from headrace.quarantine import Reason, Rejected
from headrace.sample import Probe, SampleRef
from headrace.v1 import common_pb2, sessions_pb2

DOCUMENT: dict[str, Any] = {
    "strategy": "entrain",
    "seed": 0,
    "generation": 1,
    "topology": {"replicas": 2, "microbatches": 2, "stages": {"encoder": 1, "llm": 3}},
    "replicas": [
        {"replica": 0, "microbatches": [{"encoder": [5, 9], "llm": [5]}, {"encoder": [7], "llm": [7, 9]}]},
        {"replica": 1, "microbatches": [{"encoder": [1], "llm": [1]}, {"encoder": [], "llm": []}]},
    ],
    "predicted": {"iteration_s": 1.93, "bubble": 0.11, "lower_bound_s": 1.8},
}


def make_plan(*replicas: list[dict[str, list[int]]]) -> StepPlan:
    microbatches = tuple(
        tuple(Microbatch(units={unit: tuple(ids) for unit, ids in units.items()}) for units in replica) for replica in replicas
    )
    stages = dict.fromkeys(replicas[0][0], 1)
    topology = Topology(replicas=len(replicas), microbatches=len(replicas[0]), stages=stages)
    return StepPlan(strategy="test", seed=0, topology=topology, replicas=microbatches)


def test_the_public_form_is_stable() -> None:
    plan = StepPlan.from_json(DOCUMENT)
    plan.check()
    assert plan.to_json() == DOCUMENT
    assert plan.predicted == Predicted(iteration_s=1.93, bubble=0.11, lower_bound_s=1.8)
    assert plan.sample_ids() == [1, 5, 7, 9]
    deep = DOCUMENT | {"chosen": "joint", "in_flight": 5}
    assert StepPlan.from_json(deep).to_json() == deep
    without = {key: value for key, value in DOCUMENT.items() if key != "predicted"}
    assert StepPlan.from_json(without).to_json() == without


@pytest.mark.parametrize("samples", [0, 3, 200, 20_000])
def test_a_plan_is_the_same_behind_the_wire_but_for_its_prediction(samples: int) -> None:
    ids = [list(range(2**40 + number, 2**40 + samples, 4)) for number in range(4)]
    plan = make_plan([{"encoder": ids[0], LLM: ids[1]}, {"encoder": ids[1], LLM: ids[0]}], [{LLM: ids[2]}, {LLM: ids[3]}])
    plan = replace(plan, replicas=plan.replicas[:1] * 2, seed=2**63 + 5, generation=7, chosen="joint", in_flight=5)
    written = message_codec.plan_message(plan).SerializeToString()
    assert message_codec.plan_value(sessions_pb2.WholePlan.FromString(written)) == plan
    event = message_codec.field_bytes(sessions_pb2.RankPlan.WHOLE_FIELD_NUMBER, written)
    assert message_codec.plan_value(sessions_pb2.RankPlan.FromString(event).whole) == plan


DEALT: dict[str, Any] = DOCUMENT | {"unit_replicas": {"encoder": [[[5], []], [[9, 1], []], [[], [7]]]}}
"""The same plan, whose encoder has three replicas."""


def test_a_plan_for_a_unit_with_replicas_of_its_own_is_the_same_in_its_public_form_and_behind_the_wire() -> None:
    plan = StepPlan.from_json(DEALT)
    plan.check()
    assert plan.to_json() == DEALT
    written = message_codec.plan_message(plan).SerializeToString()
    assert message_codec.plan_value(sessions_pb2.WholePlan.FromString(written)) == replace(plan, predicted=None)


@pytest.mark.parametrize(
    ("unit", "replicas", "words"),
    [
        ("llm", [[[5, 9, 1], [7]]], "unit_replicas names 'llm', which is no unit of encoder, llm but 'llm'"),
        ("audio", [[[5, 9, 1], [7]]], "unit_replicas names 'audio'"),
        ("encoder", [[[5, 9, 1, 7]]], "a replica of unit 'encoder' has 1 microbatches, and the plan 2"),
        ("encoder", [[[5, 9, 1], [7]], [[5], []]], "sample 5 stands twice in the replicas of unit 'encoder'"),
        ("encoder", [[[5, 9], [7]]], "sample 1: the replicas of unit 'encoder' have it in microbatch None, and the plan in 0"),
        ("encoder", [[[5, 9, 1, 7], []]], "sample 7: the replicas of unit 'encoder' have it in microbatch 0, and the plan in 1"),
    ],
)
def test_replicas_of_a_unit_that_do_not_have_the_plans_samples_are_refused(unit: str, replicas: list, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StepPlan.from_json(DOCUMENT | {"unit_replicas": {unit: replicas}}).check()


SHARED: dict[str, Any] = DOCUMENT | {"degrees": {"9": 2}}
"""The same plan, with a sample that both replicas of the LLM share."""


def test_a_plan_with_shared_sequences_is_the_same_in_its_public_form_and_behind_the_wire() -> None:
    plan = StepPlan.from_json(SHARED)
    plan.check()
    assert plan.to_json() == SHARED
    assert (plan.sharers(9, 0), plan.sharers(7, 0)) == (range(2), range(1))
    written = message_codec.plan_message(plan).SerializeToString()
    assert message_codec.plan_value(sessions_pb2.WholePlan.FromString(written)) == replace(plan, predicted=None)


@pytest.mark.parametrize("degrees", [{"9": 1}, {"9": 3}, {"1": 2}, {"4": 2}])
def test_sequences_are_shared_by_two_replicas_that_are_there_or_more(degrees: dict[str, int]) -> None:
    """Sample 1 is on the last replica, and 4 is nowhere."""
    [(sample, degree)] = degrees.items()
    with pytest.raises(ValueError, match=f"sample {sample} is shared by {degree} replicas of 'llm': it needs two or more"):
        StepPlan.from_json(DOCUMENT | {"degrees": degrees}).check()


def test_deferral_is_sound() -> None:
    make_plan([{"encoder": [1, 2], LLM: [1]}, {"encoder": [], LLM: [2]}]).check()


@pytest.mark.parametrize(
    ("replicas", "words"),
    [
        ([[{"encoder": [1], LLM: [1]}, {"encoder": [], LLM: [1]}]], "twice"),
        ([[{"encoder": [1], LLM: [1]}], [{"encoder": [1], LLM: [1]}]], "twice"),
        ([[{"encoder": [], LLM: [1]}, {"encoder": [1], LLM: []}]], "out of order"),
        ([[{"encoder": [1, 2], LLM: [1]}]], "but not in"),
        ([[{"encoder": [2], LLM: [1]}], [{"encoder": [1], LLM: [3]}]], "but not in"),
        ([[{"encoder": [1], LLM: [], GENERATOR: [1]}, {"encoder": [], LLM: [1], GENERATOR: []}]], "out of order"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(replicas: list[list[dict[str, list[int]]]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_plan(*replicas).check()


@pytest.mark.parametrize(
    "wrong", [{"replicas": 0}, {"microbatches": 0}, {"stages": {}}, {"stages": {LLM: 0}}, {"stages": {"e": 1}}]
)
def test_a_topology_has_at_least_one_of_everything(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least"):
        Topology(**{"replicas": 1, "microbatches": 1, "stages": {LLM: 1}, **wrong})


def entry(step: int, *samples: str, loss: float = math.nan) -> LedgerEntry:
    return LedgerEntry(step=step, samples=samples, loss=loss)


def test_the_ledger_hash_is_of_steps_and_sorted_names_alone() -> None:
    """Golden: two jobs are compared by it, also over releases."""
    golden = "3162b176c55dac19b528881bae22068118e27b177c802f45524cd467599d307f"
    assert ledger_sha256([entry(0, "d/a/1", "d/b/ü"), entry(1)]) == golden
    assert ledger_sha256([entry(0, "d/b/ü", "d/a/1", loss=3.0), entry(1)]) == golden
    assert ledger_sha256([entry(1), entry(0, "d/a/1", "d/b/ü")]) != golden
    assert ledger_sha256([entry(0, "d/a/1"), entry(1, "d/b/ü")]) != golden


names = st.text(st.characters(codec="utf-8"), max_size=20)
int32 = st.integers(0, 2**31 - 1)
refs = st.builds(SampleRef, sample_id=st.integers(0, 2**63 - 1), shard=int32, row=st.integers(0, 2**63 - 1))
counts = st.lists(int32, max_size=4).map(tuple)
probes = st.builds(Probe, name=names, num_tokens=int32, num_targets=int32, image_patches=counts, mel_frames=counts)
rejections = st.builds(
    Rejected,
    name=names,
    reason=st.sampled_from(Reason),
    detail=names,
    sample_id=st.none() | st.integers(0, 2**63 - 1),
    row=st.none() | st.integers(0, 2**63 - 1),
)


@given(refs, probes, rejections)
def test_values_come_back_from_the_wire(ref: SampleRef, probe: Probe, rejected: Rejected) -> None:
    def wire(message: Any) -> Any:
        return type(message).FromString(message.SerializeToString())

    assert message_codec.ref_value(wire(message_codec.ref_message(ref))) == ref
    message = wire(message_codec.probe_message(ref.sample_id, probe))
    assert (message.sample_id, message_codec.probe_value(message)) == (ref.sample_id, probe)
    assert message_codec.rejection_value(wire(message_codec.rejection_message(rejected))) == rejected


def test_a_reason_of_a_newer_release_is_kept_in_words() -> None:
    found = message_codec.rejection_value(common_pb2.Rejection(name="a", reason="because", detail="of that"))
    assert (found.reason, found.detail) == (Reason.OTHER, "because: of that")
