"""Policies on availability traces: by hand, against the bound, and where a guarantee ends."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.reorder_service.recovery.forecast.availability import NodeChange, Trace, draw
from headrace.reorder_service.recovery.forecast.availability_replay import Activity, Policy, Run, replay
from headrace.reorder_service.recovery.forecast.policies import Assumptions, ForecastJob, Headrace, failure_free
from headrace.reorder_service.recovery.forecast.rivals import RIVALS
from headrace.reorder_service.recovery.recovery_choice import busiest_link
from tests.examples import with_examples
from tests.unit.reorder_service.recovery.recovery_world import profile_of, templates_of

POLICIES = {"headrace": Headrace, **RIVALS}
ASSUMED = Assumptions(
    detect_s=1.0,
    rebuild_s=0.5,
    copy_bytes_per_s=1.0,
    link_bytes_per_s=1.0,
    restart_s=3.0,
    storage_bytes_per_s=2.0,
    save_every=2,
    torchft_s=5.0,
)


def job_of(num_nodes: int = 4, *, max_failures: int = 1, microbatches: int = 12) -> ForecastJob:
    """Four layers of a second and a byte each, and nodes of one GPU with room for all of them. A node alone does a microbatch in
    4 s; two behind each other do m of them in 2 m + 2 s. So nodes are best alone."""
    profile = profile_of([[1.0]] * 4, memory=4)
    return ForecastJob.of(profile, num_nodes, max_failures, global_batch=microbatches)


def trace_of(*changes: NodeChange, end_s: float, num_nodes: int = 4) -> Trace:
    return Trace(nodes=tuple(f"n{i}" for i in range(num_nodes)), changes=changes, end_s=end_s)


def run_of(
    name: str, trace: Trace, *, job: ForecastJob | None = None, notice_s: float = 0.0, assumed: Assumptions = ASSUMED
) -> Run:
    job = job or job_of()
    policy: Policy = POLICIES[name](job, assumed)
    run = replay(policy, trace, notice_s=notice_s)
    assert run.name == name
    assert run.spans[0].start_s == 0
    assert [span.end_s for span in run.spans[:-1]] == [span.start_s for span in run.spans[1:]]
    assert run.spans[-1].end_s == trace.end_s
    return run


ONE_LOSS = NodeChange(time_s=30.0, lost=("n1",))


@pytest.mark.parametrize("name", ["headrace", "torchft-like", "torchft-like, tuned"])
def test_without_failures_it_is_all_that_the_nodes_can_do(name: str) -> None:
    trace = trace_of(end_s=100.0)
    run = run_of(name, trace)
    assert run.samples == pytest.approx(100.0)  # four nodes, 4 s each
    assert run.samples == pytest.approx(failure_free(job_of(), trace).samples)
    assert (run.recoveries, run.lost_s, run.stopped) == (0, 0.0, "")


def test_headrace_reroutes_the_lost_microbatches_and_keeps_what_the_others_have_done() -> None:
    """Steps of 12 s: two are done, half of the third, too. 1 s to know it; one more microbatch of 4 s on each of the three that
    are left, and 0.5 s twice. Then steps of 16 s. Every node has every layer."""
    trace = trace_of(ONE_LOSS, end_s=84.0)
    run = run_of("headrace", trace)
    assert run.seconds(Activity.UNDONE) == 0
    assert run.seconds(Activity.RECOVERS) == pytest.approx(1.0 + 4.0 + 0.5 + 0.5)
    assert run.samples == pytest.approx(30 + 48 * 12 / 16)
    assert failure_free(job_of(), trace).samples == pytest.approx(30 + 54 * 12 / 16)
    assert (run.recoveries, run.samples_per_s) == (1, pytest.approx(66 / 84))


def test_headrace_does_the_step_again_where_connecting_takes_longer() -> None:
    """Half a step of 12 s is less than the second 6.5 s for groups: 6 s are in vain, 7.5 s go by; then steps of 16 s."""
    run = run_of("headrace", trace_of(ONE_LOSS, end_s=85.5), assumed=replace(ASSUMED, rebuild_s=6.5))
    assert run.seconds(Activity.UNDONE) == pytest.approx(6.0)
    assert run.seconds(Activity.RECOVERS) == pytest.approx(7.5)
    assert run.samples == pytest.approx(24 + 48 * 12 / 16)


def test_headrace_loses_nothing_of_a_step_to_a_loss_that_is_announced() -> None:
    """A notice of 10 s is enough for the step that ends at 24 s, one of 2 s comes too late."""
    run = run_of("headrace", trace_of(ONE_LOSS, end_s=80.5), notice_s=10.0)
    assert (run.seconds(Activity.UNDONE), run.seconds(Activity.RECOVERS)) == (0.0, pytest.approx(0.5))
    assert run.samples == pytest.approx(24 + 56 * 12 / 16)
    late = run_of("headrace", trace_of(ONE_LOSS, end_s=80.5), notice_s=2.0)
    assert late.seconds(Activity.RECOVERS) == pytest.approx(6.0)


def test_headrace_takes_a_node_that_is_back_at_the_end_of_a_step_and_copies_its_layers() -> None:
    """After the loss a step ends at 36 + 8 s. The node comes with nothing: four bytes, one a second."""
    trace = trace_of(ONE_LOSS, NodeChange(time_s=40.0, joined=("n1",)), end_s=84.5)
    run = run_of("headrace", trace)
    assert run.seconds(Activity.RECOVERS) == pytest.approx(6.0 + 0.5 + 4.0)
    assert run.samples == pytest.approx(24 + 12 + 36)
    assert run.recoveries == 2


def test_varuna_goes_back_to_its_checkpoint() -> None:
    """Two steps of 12 s, 2 s for a checkpoint, 4 s in vain; known after 1 s, started in 3, loaded in 2; then steps of 16 s."""
    run = run_of("varuna-like", trace_of(ONE_LOSS, end_s=78.0))
    seconds = {activity: run.seconds(activity) for activity in Activity}
    assert seconds[Activity.UNDONE] == pytest.approx(4.0)
    assert seconds[Activity.RECOVERS] == pytest.approx(6.0)
    assert seconds[Activity.SAVES] == pytest.approx(2.0 + 2.0)
    assert run.samples == pytest.approx(24 + 24 + 8 * 12 / 16)
    tuned = run_of("varuna-like, tuned", trace_of(ONE_LOSS, end_s=78.0))
    assert tuned.seconds(Activity.SAVES) == pytest.approx(2 * 2.0 + 2 * 2.0)
    assert tuned.seconds(Activity.UNDONE) == pytest.approx(2.0)  # 28 to 30 s


def test_bamboo_goes_on_with_a_node_that_does_the_work_of_two_until_both_are_lost() -> None:
    """Layers of 4 / 3 s and two bytes: two nodes hold them, and do 6 microbatches in 8 / 3 (6 + 1) s; one alone takes 32 s."""
    loss = run_of("bamboo-like", trace_of(ONE_LOSS, end_s=79.5))
    assert loss.seconds(Activity.UNDONE) == 0
    assert loss.samples == pytest.approx(30 * 12 / (56 / 3) + 48 * 12 / 32)
    both = run_of("bamboo-like", trace_of(ONE_LOSS, NodeChange(time_s=31.5, lost=("n0",)), end_s=79.5))
    assert both.seconds(Activity.UNDONE) == pytest.approx(30.0)  # less than two steps: no checkpoint yet
    assert both.seconds(Activity.RECOVERS) == pytest.approx(1.5 + 6.0)
    assert both.samples == pytest.approx(42 * 12 / (8 / 3 * 13))  # the two nodes left, all 12 microbatches


@pytest.mark.parametrize(("name", "pause_s"), [("torchft-like", 5.0), ("torchft-like, tuned", 0.49)])
def test_torchft_goes_on_with_a_smaller_batch(name: str, pause_s: float) -> None:
    run = run_of(name, trace_of(ONE_LOSS, NodeChange(time_s=70.0, joined=("n1",)), end_s=100.0))
    assert run.seconds(Activity.UNDONE) == pytest.approx(6.0)
    assert run.seconds(Activity.RECOVERS) == pytest.approx(pause_s)
    steps = np.ceil((70 - 30 - pause_s) / 12)  # of nine samples, until the node joins at the end of one
    assert run.samples == pytest.approx(24 + steps * 9 + 100 - (30 + pause_s + steps * 12))


@with_examples(12)
@given(seed=st.integers(0, 10_000), notice_s=st.sampled_from([0.0, 20.0]), rare=st.integers(1, 20))
def test_no_policy_does_more_than_the_nodes_there_could(seed: int, notice_s: float, rare: int) -> None:
    job = job_of(8)
    trace = draw(np.random.default_rng(seed), num_nodes=8, mtbf_s=20.0 * rare, mttr_s=100.0, end_s=1_000.0)
    bound = failure_free(job, trace)
    for name in POLICIES:
        run = run_of(name, trace, job=job, notice_s=notice_s)
        assert run.samples <= bound.samples * (1 + 1e-9)
        assert sum(run.seconds(activity) for activity in Activity) == pytest.approx(trace.end_s)


@pytest.mark.parametrize("name", POLICIES)
def test_more_frequent_failures_do_not_help(name: str) -> None:
    samples = []
    for mtbf_s in (2_000.0, 200.0, 40.0):
        trace = draw(np.random.default_rng(3), num_nodes=8, mtbf_s=mtbf_s, mttr_s=60.0, end_s=4_000.0)
        samples.append(run_of(name, trace, job=job_of(8)).samples)
    assert samples == sorted(samples, reverse=True)


def test_who_cannot_go_on_stops_and_says_why() -> None:
    """Two of three nodes at once, where one may be lost: the copies are there, but not enough nodes. Others wait, or go on."""
    trace = trace_of(
        NodeChange(time_s=40.0, lost=("n0", "n1")), NodeChange(time_s=60.0, joined=("n0",)), end_s=100.0, num_nodes=3
    )
    run = run_of("headrace", trace, job=job_of(3))
    assert run.stopped.startswith("after 40 s: 1 nodes are left, but 2 replicas need 1 each: add 1 or more nodes")
    assert run.seconds(Activity.STOPPED) == pytest.approx(60.0)
    assert run.samples == pytest.approx(2 * 12)
    assert run_of("varuna-like", trace, job=job_of(3)).stopped == ""


def test_torchft_without_a_whole_group_waits_for_one() -> None:
    trace = trace_of(NodeChange(time_s=30.0, lost=("n0", "n1", "n2", "n3")), NodeChange(time_s=50.0, joined=("n2",)), end_s=79.0)
    run = run_of("torchft-like", trace)
    assert run.seconds(Activity.WAITS) == pytest.approx(20.0)
    assert run.samples == pytest.approx(24 + (79 - 50 - 3 - 2) * 3 / 12)


def test_a_model_that_does_not_fit_twice_is_not_for_bamboo() -> None:
    job = ForecastJob.of(profile_of([[1.0]] * 4, memory=1), 8, 1, global_batch=12)
    with pytest.raises(UserError, match="do not hold the model"):
        RIVALS["bamboo-like"](job, ASSUMED)


def test_a_layer_comes_from_all_that_have_it_and_the_busiest_link_counts() -> None:
    templates = templates_of(4, 1, 1, 4, layer_bytes=[8, 2, 2, 2])
    missing = {"new": {0: ("a", "b"), 1: ("a",)}, "other": {0: ("a", "b")}}
    assert busiest_link(missing, templates) == 10  # "new" receives 8 + 2; "a" sends 4 + 2 + 4 as well
    assert busiest_link({}, templates) == 0
    assert busiest_link({"new": {0: ("a",)}, "other": {0: ("a",)}}, templates) == 16


def test_a_batch_that_is_no_whole_microbatches_names_the_nearest_that_is() -> None:
    with pytest.raises(UserError, match="10 samples are no whole microbatches of 4: 8 would be"):
        ForecastJob.of(job_of().profile, 4, 1, global_batch=10, microbatch=4)
