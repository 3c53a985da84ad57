"""What holds a job up, in words: each sentence by its situation, from statuses as the reorder service gives them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.bottleneck import Finding, bottleneck, decoding_threads
from headrace.rates import MAX_SPAN_S, SPAN_S, Look, Looks, data_wait, decoding_rates, samples_per_s, steps_per_s
from headrace.v1 import jobs_pb2
from headrace.v1.common_pb2 import Occupancy
from headrace.v1.jobs_pb2 import JobStatus, PreprocessorStatus, RankStatus
from headrace.v1.membership_pb2 import Snapshot

MIB = 1 << 20


def member(name: str = "a", threads: int = 2, store_mib: int = 5, parts: Sequence[int] = (), **fields: Any) -> PreprocessorStatus:
    """`parts`: ordered, read, decoding, stored. Its budget is 100 MiB."""
    occupancy = Occupancy(**dict(zip(("ordered", "read", "decoding", "stored"), parts, strict=False)))
    held = {"store_bytes": store_mib * MIB, "store_budget_bytes": 100 * MIB}
    return PreprocessorStatus(preprocessor=name, slots=2 * threads + 2, occupancy=occupancy, **held, **fields)


def rank(number: int = 0, next_step: int = 10, data_wait_s: float = 0.0, step_s: float = 1.0) -> RankStatus:
    return RankStatus(rank=number, committed_steps=next_step, data_wait_s=data_wait_s, step_s=step_s)


def status(wait: float = 0.0, window: int = 4, own_window_bytes: int | None = None, **fields: Any) -> JobStatus:
    """A job that runs well: 10 of 100 steps of a second each, of which `wait` seconds passed in waiting for data.

    `own_window_bytes`: of its spec.
    """
    running: dict[str, Any] = {
        "job": "demo",
        "state": jobs_pb2.JOB_STATE_RUNNING,
        "committed_steps": 10,
        "num_steps": 100,
        "num_shards": 40,
        "indexed_shards": 40,
        "planned_steps": window,
        "data_wait_s": 10 * wait,
        "step_s": 10.0,
        "window_bytes": own_window_bytes or 2 << 30,
        "spec_json": json.dumps({"window": window, "window_bytes": own_window_bytes}),
        "preprocessors": [member()],
        "ranks": [rank()],
        "leader": "10.0.0.1:7070",
        "term": 1,
        "generation": 1,
    }
    return JobStatus(**running | fields)


def ranks(*next_steps: int, **fields: Any) -> list[RankStatus]:
    return [rank(number, next_step, **fields) for number, next_step in enumerate(next_steps)]


FAILED, CANCELLED, DONE = jobs_pb2.JOB_STATE_FAILED, jobs_pb2.JOB_STATE_CANCELLED, jobs_pb2.JOB_STATE_DONE
INDEXING = jobs_pb2.JOB_STATE_INDEXING
WAIT = "trainers wait 34% of their time for data: "
BUSY = [member("a", parts=(3, 1, 2)), member("b", parts=(3, 1, 2))]
IDLE = [member("a", parts=(0, 0, 0, 8)), member("b", parts=(0, 0, 0, 8))]
READING = [member("a", parts=(1, 3, 0)), member("b", parts=(0, 2, 0))]
FULL = [member("a", parts=(4, 0, 0, 8), store_mib=90), member("b", parts=(4, 0, 0, 8), store_mib=90)]

SITUATIONS = {
    # nothing to measure
    "done": (status(state=DONE), "every step is committed"),
    "failed": (
        status(state=FAILED, message="no memory"),
        "no memory: mend that and submit the job again, it goes on from its last commit",
    ),
    "cancelled": (status(state=CANCELLED, message="job 'demo' was cancelled"), "job 'demo' was cancelled"),
    "paused": (status(paused=True), "paused, 4 planned steps left: `headrace job resume demo` goes on"),
    "paused for long": (status(paused=True, planned_steps=0), "paused, no step is planned: `headrace job resume demo` goes on"),
    "no preprocessor": (
        status(preprocessors=[]),
        "no preprocessor is connected: start one with `headrace preprocessor --reorder 10.0.0.1:7070`",
    ),
    "no preprocessor to index": (
        status(state=INDEXING, preprocessors=[]),
        "no preprocessor is connected: start one with `headrace preprocessor --reorder 10.0.0.1:7070`",
    ),
    "listing": (status(state=INDEXING, num_shards=0), "waiting for the shards to be listed"),
    "indexing": (
        status(state=INDEXING, indexed_shards=28),
        "the first steps wait for shards to be indexed (28 of 40 are): more preprocessors index more at a time",
    ),
    "no trainer": (
        status(ranks=[]),
        "no trainer is connected: start one with `headrace train --endpoint 10.0.0.1:7070 --job demo`, or connect your own",
    ),
    "planning the first": (status(ranks=[rank(step_s=0)], planned_steps=0), "the first steps are being planned"),
    "the trainer begins": (status(ranks=[rank(step_s=0)], planned_steps=1), "the trainers begin, 1 step planned"),
    # ranks
    "a rank that does not wait is late": (
        status(ranks=ranks(14, 14, 14, 10)),
        "rank 3 is 4 steps behind the others: it does not wait for data, look at its host and its log",
    ),
    "a rank that waits is late": (
        status(ranks=ranks(10, 12, data_wait_s=0.5)),
        "rank 0 is 2 steps behind the others: it waits 50% of its step for data, look at its network",
    ),
    "a rank that never committed is late": (
        status(ranks=[rank(0, 14), rank(1, 10, step_s=0)]),
        "rank 1 is 4 steps behind the others: it has committed none since it connected, see its log",
    ),
    "many ranks are late": (
        status(ranks=ranks(12, 14, 12, 10, 12, 11)),
        "ranks 3, 5, 0 and 2 more are up to 4 steps behind the others: "
        "rank 3 does not wait for data, look at its host and its log",
    ),
    "ranks in lockstep": (
        status(ranks=ranks(11, 10), preprocessors=IDLE),
        "preprocessors wait: all that is ordered is decoded, the trainer is the slowest part: "
        "nothing to gain from more preprocessors",
    ),
    "nodes, of which one commits for all": (
        status(ranks=[rank(0, 14), rank(1, 0, step_s=0)], preprocessors=IDLE, snapshot=Snapshot()),
        "preprocessors wait: all that is ordered is decoded, the trainer is the slowest part: "
        "nothing to gain from more preprocessors",
    ),
    # trainers do not wait
    "full stores": (
        status(preprocessors=FULL),
        "preprocessors wait: their stores are full, the trainer is the slowest part: nothing to gain from more preprocessors",
    ),
    "just fast enough": (
        status(wait=0.01, preprocessors=BUSY),
        "preprocessors keep up: the trainer waits 1% of its time for data and is the slowest part: "
        "nothing to gain from more preprocessors",
    ),
    # trainers wait
    "decoding": (
        status(wait=0.34, preprocessors=BUSY),
        WAIT + "preprocessors decode as fast as they can (decoding 4 of 4, stores 5% full): add preprocessors",
    ),
    "window of bytes too small": (
        status(wait=0.34, planned_steps=2, planned_bytes=3 << 30, own_window_bytes=4 << 30, preprocessors=IDLE),
        WAIT + "the window is full (3.0 of 4.0 GiB planned): "
        "submit with more `window_bytes`, if the preprocessors' stores hold so much",
    ),
    "stores too small for another step": (
        status(wait=0.34, planned_steps=3, planned_bytes=7 << 28, preprocessors=IDLE),
        WAIT + "the stores hold no further step (1.8 of 2.0 GiB planned): "
        "raise the preprocessors' --budget-mib, or add preprocessors",
    ),
    "stores too small": (
        status(wait=0.34, preprocessors=FULL),
        WAIT + "the stores are 90% full of what is needed later: raise the preprocessors' --budget-mib, or add preprocessors",
    ),
    "reading": (
        status(wait=0.34, preprocessors=READING),
        WAIT + "reading is the slowest stage, parts wait to be read while decoders idle (decoding 0 of 4): "
        "give preprocessors a --cache, or faster storage, or add preprocessors",
    ),
    "nothing ordered": (
        status(wait=0.34, preprocessors=IDLE),
        WAIT + "the slots are free and nothing is ordered, the window (4 steps) is too small: "
        "submit with a larger `window`; where that is no help, the network to the trainers is too slow",
    ),
    "one has it all": (
        status(wait=0.34, preprocessors=[member("a", parts=(2, 3, 2)), member("b"), member("c")]),
        WAIT + "the slots are free and too little is ordered, the window (4 steps) is too small: "
        "submit with a larger `window`; where that is no help, the network to the trainers is too slow",
    ),
    "planning": (
        status(wait=0.34, window=8, planned_steps=1, preprocessors=IDLE),
        WAIT + "only 1 of the window's 8 steps planned, probing and planning are the slowest part: "
        "add preprocessors, which probe too",
    ),
    "the end": (
        status(wait=0.34, committed_steps=98, planned_steps=2, preprocessors=IDLE),
        WAIT + "the last 2 steps of the job are planned: nothing is left to order",
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_bottleneck_is_named_with_its_remedy(situation: str) -> None:
    now, words = SITUATIONS[situation]
    assert str(bottleneck([Look(at_s=0.0, status=now)])) == words


def test_a_finding_without_a_remedy_is_its_sentence() -> None:
    assert str(Finding(sentence="paused")) == "paused"


def test_the_wait_of_the_steps_between_two_looks_counts_and_not_that_of_the_beginning() -> None:
    before = status(wait=0.5, preprocessors=IDLE)
    now = status(committed_steps=20, step_s=20.0, data_wait_s=5.1, preprocessors=IDLE)
    looks = [Look(at_s=0.0, status=before), Look(at_s=5.0, status=now)]
    assert data_wait(looks) == pytest.approx(0.01)
    assert bottleneck(looks).remedy == "nothing to gain from more preprocessors"


def test_stages_are_averaged_over_the_latest_looks() -> None:
    """One look may fall between two parts."""
    busy, between = status(wait=0.34, preprocessors=BUSY), status(wait=0.34, preprocessors=IDLE)
    old = [Look(at_s=-SPAN_S - 1.0, status=status(committed_steps=9, wait=0.34, preprocessors=IDLE))] * 9
    latest = [
        Look(at_s=-3.0, status=busy),
        Look(at_s=-2.0, status=busy),
        Look(at_s=-1.0, status=busy),
        Look(at_s=0.0, status=between),
    ]
    assert "(decoding 3 of 4," in bottleneck(old + latest).sentence


def test_a_job_without_commits_has_stalled_after_several_times_its_latest_step() -> None:
    def after(idle_s: float, step_s: float) -> str:
        now = status(ranks=[rank(step_s=step_s)], preprocessors=IDLE)
        before = status(committed_steps=9, ranks=[rank(next_step=9)], step_s=9.0)
        times = {-1.0: before, 0.0: now, idle_s: now}
        return bottleneck([Look(at_s=at_s, status=seen) for at_s, seen in times.items()]).sentence

    assert after(12.0, step_s=0.4) == "no step was committed in the last 12 s, and the latest took 0.4 s"
    assert after(12.0, step_s=4.0).startswith("preprocessors wait")
    assert after(2.0, step_s=0.1).startswith("preprocessors wait")


@pytest.mark.parametrize("threads", [1, 2, 3, 16, 192])
def test_the_threads_of_a_preprocessor_are_known_from_its_slots(threads: int) -> None:
    """As headrace.preprocessor.engine announces them."""
    from headrace.preprocessor.engine import read_ahead_parts

    assert decoding_threads(threads + read_ahead_parts(threads)) == threads


# -- rates ------------------------------------------------------------------------------------------------------------


def looked(*seen: tuple[float, JobStatus]) -> list[Look]:
    looks = Looks()
    for at_s, now in seen:
        looks.add(Look(at_s=at_s, status=now))
    return looks.held


def test_rates_are_differences_over_the_time_between_the_looks() -> None:
    before = status(committed_samples=160, preprocessors=[member("a", samples_decoded=100, bytes_decoded=1000)])
    now = status(
        committed_steps=12,
        committed_samples=192,
        preprocessors=[member("a", samples_decoded=110, bytes_decoded=3000), member("b", samples_decoded=7)],
    )
    looks = looked((10.0, before), (12.0, now))
    assert (steps_per_s(looks), samples_per_s(looks)) == (1.0, 16.0)
    rates = decoding_rates(looks)
    assert (rates["a"].samples_per_s, rates["a"].bytes_per_s) == (5.0, 1000.0)
    assert rates["b"].samples_per_s == 0.0


def test_one_look_gives_no_rate() -> None:
    looks = looked((10.0, status(committed_samples=160)))
    assert (steps_per_s(looks), samples_per_s(looks), decoding_rates(looks)["a"].samples_per_s) == (0.0, 0.0, 0.0)


def test_a_preprocessor_that_connects_again_does_not_leap() -> None:
    silent = PreprocessorStatus(preprocessor="a", slots=4)  # no heartbeat yet
    reported = member("a", samples_decoded=50_000)
    looks = looked((0.0, status(preprocessors=[silent])), (1.0, status(preprocessors=[reported])))
    assert decoding_rates(looks)["a"].samples_per_s == 0.0


def test_counters_that_began_anew_are_no_negative_rate() -> None:
    looks = looked((0.0, status(committed_samples=50)), (1.0, status(committed_samples=0, committed_steps=0)))
    assert (samples_per_s(looks), steps_per_s(looks)) == (0.0, 0.0)


@pytest.mark.parametrize("life", [{"term": 2}, {"generation": 2}])
def test_another_leader_or_generation_is_looked_at_anew(life: dict[str, int]) -> None:
    assert len(looked((0.0, status()), (1.0, status()), (2.0, status(**life)))) == 1


def test_looks_reach_back_over_the_latest_seconds() -> None:
    looks = looked(*((float(s), status(committed_steps=s)) for s in range(20)))
    assert [look.at_s for look in looks] == [14.0, 15.0, 16.0, 17.0, 18.0, 19.0]


def test_looks_reach_back_to_the_latest_commit_but_not_for_ever() -> None:
    steps = [status(committed_steps=1), *[status(committed_steps=2)] * 30]
    assert looked(*((float(s), now) for s, now in enumerate(steps)))[0].status.committed_steps == 1
    idle = looked(*((10.0 * s, status()) for s in range(100)))
    assert idle[-1].at_s - idle[0].at_s == MAX_SPAN_S
