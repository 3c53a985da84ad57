"""1F1B as data: what each stage does, in which order."""

import pytest

from headrace.schedule import Action, Kind, Schedule, one_f_one_b


def text(schedule: Schedule) -> list[str]:
    return [" ".join(f"{'FB'[action.kind]}{action.microbatch}" for action in actions) for actions in schedule]


def test_a_stage_warms_up_alternates_and_drains() -> None:
    assert text(one_f_one_b(3, range(4))) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_with_fewer_microbatches_than_stages_the_early_stages_run_all_forwards_first() -> None:
    assert text(one_f_one_b(4, range(2))) == ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]


def test_microbatches_that_are_left_out_leave_no_gap() -> None:
    assert text(one_f_one_b(2, [0, 3])) == ["F0 F3 B0 B3", "F0 B0 F3 B3"]


def test_without_microbatches_no_stage_has_anything_to_do() -> None:
    assert one_f_one_b(3, []) == ((), (), ())


@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 5, 9])
def test_every_stage_runs_every_microbatch_forth_and_back_within_its_memory(num_stages: int, num_microbatches: int) -> None:
    for stage, actions in enumerate(one_f_one_b(num_stages, range(num_microbatches))):
        for kind in Kind:
            assert [a.microbatch for a in actions if a.kind == kind] == list(range(num_microbatches))
        in_flight = most = 0
        for action in actions:
            in_flight += 1 if action.kind == Kind.FORWARD else -1
            most = max(most, in_flight)
        assert in_flight == 0
        assert most == min(num_stages - stage, num_microbatches)


def test_an_action_is_a_value() -> None:
    assert Action(kind=Kind.FORWARD, microbatch=2) in one_f_one_b(1, [2])[0]


@pytest.mark.parametrize(("num_stages", "microbatches"), [(0, [0]), (2, [1, 1])])
def test_nonsense_is_refused(num_stages: int, microbatches: list[int]) -> None:
    with pytest.raises(ValueError, match=r"at least one stage|runs once"):
        one_f_one_b(num_stages, microbatches)
