"""Which actors are ended and started, without Ray."""

from __future__ import annotations

import pytest

from headrace.cli.ray_engine.hosted_fleet import EARLY_S, HOPELESS, LONGEST_PAUSE_S, SILENT_S, Hosted, Pauses, surplus


def hosted(number: int, node: str = "a", endpoint: str = "a:1") -> Hosted:
    return Hosted(number=number, started_s=0.0, heard_s=1.0, node=node, endpoint=endpoint)


def test_those_that_do_not_listen_are_ended_first_then_the_latest_of_the_fullest_node() -> None:
    fleet = [hosted(1), hosted(2), hosted(3, node="b"), hosted(4, node="b"), hosted(5), hosted(6, node="c", endpoint="")]
    assert [gone.number for gone in surplus(fleet, 2)] == [6, 5, 4, 2]
    assert surplus(fleet, 6) == surplus(fleet, 9) == []
    assert len(surplus(fleet, 0)) == 6


def test_an_actor_that_has_answered_once_and_no_more_is_lost_and_one_that_has_no_node_yet_is_not() -> None:
    asked = hosted(1).asked(2.0)
    assert not asked.is_silent(2.0 + SILENT_S)
    assert asked.is_silent(2.1 + SILENT_S)
    assert asked.asked(11.0).is_silent(2.1 + SILENT_S), "a question that is asked again is as old as the first time"
    assert not Hosted(number=1, started_s=0.0).asked(0.0).is_silent(1000.0)


def test_a_pause_of_the_driver_in_which_it_asked_nothing_is_no_silence_of_the_actor() -> None:
    paused = hosted(1)
    assert not paused.is_silent(1000.0)
    paused = paused.asked(1000.0)
    assert not paused.is_silent(1000.0 + SILENT_S)
    answered = paused.answered(1001.0, node="b", endpoint="b:2")
    assert (answered.heard_s, answered.node, answered.endpoint) == (1001.0, "b", "b:2")
    assert not answered.is_silent(2000.0)


def test_after_ends_soon_after_the_start_there_are_pauses_which_become_longer() -> None:
    pauses, now_s, seen = Pauses(), 0.0, []
    assert pauses.may_start(now_s)
    for _ in range(8):
        pauses.note_end(EARLY_S / 2, now_s)
        begun_s = now_s
        while not pauses.may_start(now_s):
            now_s += 0.5
        seen.append(now_s - begun_s)
    assert seen == [1, 2, 4, 8, 16, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_one_that_has_lived_is_replaced_at_once() -> None:
    pauses = Pauses()
    pauses.note_end(EARLY_S, 0.0)
    assert pauses.may_start(0.0)


@pytest.mark.parametrize("listened", [False, True])
def test_it_is_hopeless_after_several_early_ends_in_a_row(listened: bool) -> None:
    pauses = Pauses()
    for number in range(HOPELESS):
        assert not pauses.is_hopeless
        pauses.note_end(0.0, float(number))
        if listened:
            pauses.note_success()
    assert pauses.is_hopeless != listened
