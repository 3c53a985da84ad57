"""What a process did when, and the trace of it."""

from __future__ import annotations

import math
from typing import Any

from headrace.schedule import Action, Kind
from headrace.trainer.loading.stopwatch import Lap
from headrace.trainer.pipeline.events import Event, Recording, duration_s, measured_work, trace
from headrace.trainer.pipeline.topology import Place

FORWARD, BACKWARD = Action(kind=Kind.FORWARD, microbatch=3), Action(kind=Kind.BACKWARD, microbatch=3)
LLM_0, LLM_1, OTHER = Place("llm", 0, 0, 0), Place("llm", 0, 1, 0), Place("llm", 1, 0, 0)


def recordings() -> list[Recording]:
    """Two hosts whose clocks began 100 s apart."""
    return [
        Recording([Event(LLM_0, FORWARD, 10.0, 14.0, 1.0, 2.5), Event(LLM_0, BACKWARD, 18.0, 20.0, 0.5, 1.0)], 1_000.0),
        Recording([Event(LLM_1, FORWARD, 14.0, 16.0, 0.0, 2.0)], 1_000.0),
        Recording([Event(OTHER, FORWARD, 111.0, 112.0, 0.0, 1.0)], 900.0),
    ]


def boxes(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == "X"]


def test_time_is_waiting_computing_and_the_rest() -> None:
    event = Event(LLM_0, FORWARD, 10.0, 14.0, 1.0, 2.5)
    assert (event.drawn_start_s, event.overhead_s) == (11.0, 0.5)


def test_a_step_lasts_from_the_first_start_to_the_last_end() -> None:
    assert duration_s(recordings()[:2]) == 10.0
    assert duration_s([Recording((), 0.0)]) == 0.0


def test_boxes_begin_where_the_waiting_ends_and_hosts_are_aligned() -> None:
    found = [(box["name"], box["cat"], box["ts"], box["dur"]) for box in boxes(trace(recordings()))]
    assert found == [
        ("F 3", "forward", 1e6, 3e6),
        ("B 3", "backward", 8.5e6, 1.5e6),
        ("F 3", "forward", 4e6, 2e6),
        ("F 3", "forward", 1e6, 1e6),
    ]


def test_a_replica_of_a_unit_is_a_process_and_a_stage_a_thread() -> None:
    document = trace(recordings(), label="EMULATED")
    named = {(e["name"], e["pid"], e["tid"]): e["args"].get("name") for e in document["traceEvents"] if e["ph"] == "M"}
    processes = [name for (what, _, _), name in named.items() if what == "process_name"]
    assert processes == ["EMULATED llm, replica 0", "EMULATED llm, replica 1"]
    threads = [named["thread_name", box["pid"], box["tid"]] for box in boxes(document)]
    assert threads == ["stage 0", "stage 0", "stage 1", "stage 0"]
    assert document["otherData"] == {"origin_unix_s": 1_010.0, "label": "EMULATED"}


def test_chunks_and_slices_are_named_where_there_are_several() -> None:
    action = Action(kind=Kind.FORWARD, microbatch=0, chunk=1)
    document = trace([Recording([Event(Place("llm", 0, 2, 1), action, 0.0, 1.0, 0.0, 1.0)], 0.0)])
    assert [box["name"] for box in boxes(document)] == ["F 0.1"]
    names = [event["args"].get("name") for event in document["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["stage 2, slice 1"]


def test_weights_that_were_put_off_are_a_kind_of_their_own() -> None:
    action = Action(kind=Kind.WEIGHT, microbatch=3)
    [box] = boxes(trace([Recording([Event(LLM_0, action, 0.0, 1.0, 0.0, 1.0)], 0.0)]))
    assert (box["name"], box["cat"]) == ("W 3", "weight")


def test_a_trace_of_nothing_is_empty() -> None:
    assert trace([Recording((), 0.0)])["traceEvents"] == []


def test_measured_work_is_an_actions_time_without_waiting_for_messages_or_data_which_are_put_before_it() -> None:
    def event(kind: Kind, microbatch: int, chunk: int, start_s: float, computed_s: float = 0.5) -> Event:
        action = Action(kind=kind, microbatch=microbatch, chunk=chunk)
        return Event(LLM_0, action, start_s, start_s + 10.0, 3.0, computed_s, data_wait_s=1.0)

    events = [event(Kind.FORWARD, 2, 0, 50.0), event(Kind.FORWARD, 2, 1, 60.0), event(Kind.BACKWARD, 2, 0, 70.0)]
    nothing = event(Kind.FORWARD, 5, 0, 80.0, computed_s=0.0)
    forward, backward = measured_work([*events, nothing], clock_unix_s=1_000.0)
    assert (forward.unit, forward.replica, forward.stage) == ("llm", 0, 0)
    assert (forward.kind, forward.microbatches, forward.chunks, forward.seconds) == (Kind.FORWARD, (2, 2), (0, 1), (6.0, 6.0))
    assert (forward.origin_unix_s, forward.begins_s) == (1_054.0, (0.0, 10.0))
    assert (backward.kind, backward.microbatches, backward.chunks, backward.seconds) == (Kind.BACKWARD, (2,), (), (6.0,))
    assert (backward.origin_unix_s, backward.begins_s) == (1_074.0, (0.0,))


def test_the_wait_for_sums_of_gradients_is_told_with_the_last_kind_of_actions() -> None:
    events = [Event(LLM_0, FORWARD, 10.0, 11.0, 0.0, 1.0), Event(LLM_0, BACKWARD, 12.0, 14.0, 0.0, 2.0)]
    forward, backward = measured_work(events, 1_000.0, reduction=Lap(None, 15.5, 16.0))
    assert (forward.reduction_s, math.isnan(forward.reduction_begin_s)) == (0.0, True)
    assert (backward.origin_unix_s, backward.reduction_begin_s, backward.reduction_s) == (1_012.0, 3.5, 0.5)
    assert measured_work([], 1_000.0, reduction=Lap(None, 15.5, 16.0)) == []


def test_on_a_gpu_measured_work_is_of_the_device() -> None:
    events = [Event(LLM_0, FORWARD, 10.0, 10.1, 0.0, 0.1), Event(LLM_0, BACKWARD, 10.1, 10.2, 0.0, 0.1)]
    two_portions = [Lap(FORWARD, 11.0, 12.0), Lap(FORWARD, 14.0, 15.5)]  # between them the device waits for a message
    forward, backward = measured_work(events, 1_000.0, [*two_portions, Lap(BACKWARD, 16.0, 17.0)])
    assert (forward.origin_unix_s, forward.seconds) == (1_013.0, (2.5,))
    assert (backward.origin_unix_s, backward.seconds) == (1_016.0, (1.0,))


def test_only_the_first_of_the_slices_of_a_stage_tells_its_work() -> None:
    action = Action(kind=Kind.FORWARD, microbatch=0)
    assert measured_work([Event(Place("llm", 0, 0, 1), action, 0.0, 1.0, 0.0, 1.0)], 0.0) == []
