"""The report that every benchmark shares: goals, ratios, the table, the JSON."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.report import RESULTS, WIDTH, Goal, Report, Rival, Row, Section, at_least, at_most, machine, more_than, number
from benchmarks.timing import Timing, time_calls


def report(*rows: Row) -> Report:
    section = Section(title="small sums", rows=rows)
    return Report(benchmark="sums", date="2030-01-02T03:04:05+00:00", quick=False, sections=[section])


def shown(of: Report) -> str:
    out = io.StringIO()
    of.show(Console(file=out))
    return out.getvalue()


FAST = Row(name="plan, quickest", value=5.0, unit="ms", rival=Rival(value=20.0, source="a package"), goal=at_most(10.0))
SLOW = Row(name="plan, slowest", value=30.0, unit="ms", goal=at_most(10.0), detail="median 31 ms of 3")
NOTED = Row(name="import", value=0.25, unit="s")


@pytest.mark.parametrize(
    ("goal", "met", "missed"),
    [(at_most(2.0), [1.9, 2.0], [2.1]), (at_least(2.0), [2.0, 2.1], [1.9]), (more_than(2.0), [2.1], [2.0, 1.9])],
)
def test_a_goal_includes_its_limit_unless_more_is_asked_for(goal: Goal, met: list[float], missed: list[float]) -> None:
    assert [goal.met(value) for value in met] == [True] * len(met)
    assert [goal.met(value) for value in missed] == [False] * len(missed)


def test_a_value_that_is_no_number_meets_no_goal() -> None:
    assert not any(goal.met(math.nan) for goal in (at_most(1.0), at_least(1.0), more_than(1.0)))


def test_a_goal_with_an_unknown_sign_is_refused() -> None:
    with pytest.raises(ValueError, match="<=, >=, >, got '=='"):
        Goal(sign="==", limit=1.0)


def test_the_ratio_is_ours_over_theirs() -> None:
    assert FAST.ratio == 0.25


def test_there_is_no_ratio_without_a_rival_or_over_zero() -> None:
    assert NOTED.ratio is None
    assert Row(name="gap", value=1.0, rival=Rival(value=0.0, source="the optimum")).ratio is None


def test_a_row_without_goal_is_neither_met_nor_missed() -> None:
    assert (FAST.ok, SLOW.ok, NOTED.ok) == (True, False, None)


def test_the_verdict_counts_goals_and_names_the_missed_ones() -> None:
    assert report(FAST, SLOW, NOTED).verdict == "1 of 2 goals met; missed: plan, slowest"
    assert report(FAST, NOTED).verdict == "1 of 1 goals met"
    assert report().verdict == "0 of 0 goals met"


def test_json_has_every_column_and_null_where_there_is_nothing_to_say(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sums.json"
    report(FAST, NOTED).write(path)
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["benchmark"] == "sums"
    assert document["date"] == "2030-01-02T03:04:05+00:00"
    assert document["rows"] == [
        {
            "section": "small sums",
            "name": "plan, quickest",
            "value": 5.0,
            "unit": "ms",
            "rival": 20.0,
            "rival_source": "a package",
            "ratio": 0.25,
            "goal": "<= 10",
            "ok": True,
            "detail": "",
        },
        {
            "section": "small sums",
            "name": "import",
            "value": 0.25,
            "unit": "s",
            "rival": None,
            "rival_source": None,
            "ratio": None,
            "goal": None,
            "ok": None,
            "detail": "",
        },
    ]


def test_a_value_that_json_cannot_hold_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "sums.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="JSON"):
        report(Row(name="broken", value=math.inf)).write(path)
    assert path.read_text() == "old"


def test_the_table_shows_value_rival_ratio_goal_and_verdict_in_one_line_each() -> None:
    lines = shown(report(FAST, SLOW, NOTED)).splitlines()
    line = {name: " ".join(next(line for line in lines if name in line).split()) for name in ("quickest", "slowest", "import")}
    assert line["quickest"] == "plan, quickest 5 ms 20 ms (a package) 0.25 <= 10 yes"
    assert line["slowest"] == "plan, slowest median 31 ms of 3 30 ms - - <= 10 NO"
    assert line["import"] == "import 0.25 s - - no goal"
    assert any("small sums" in line for line in lines)


def test_where_the_output_is_no_terminal_the_table_has_its_width_and_folds_what_is_longer() -> None:
    long = Row(name="§" * 150, value=1.0, rival=Rival(value=2.0, source="¶" * 120))
    text = shown(report(long, FAST))
    assert 100 < max(map(len, text.splitlines())) <= WIDTH
    assert text.count("§") == 150
    assert text.count("¶") == 120


def test_columns_stand_below_each_other_in_all_sections() -> None:
    sections = [Section(title=f"section {i}", rows=[row]) for i, row in enumerate((FAST, SLOW, NOTED))]
    lines = shown(Report(benchmark="sums", date="", quick=False, sections=sections)).splitlines()
    ends = {line.index(text) + len(text) for line in lines for text in ("5 ms", "30 ms", "0.25 s") if f" {text} " in line}
    assert len(ends) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.000123456, "0.0001235"), (1.27969, "1.28"), (53.88, "53.88"), (1048576, "1,048,576"), (9999.4, "9999")],
)
def test_numbers_have_four_digits_and_large_ones_all_of_them(value: float, text: str) -> None:
    assert number(value) == text


def test_the_machine_is_described() -> None:
    facts = machine()
    assert {"cpu", "cores", "python", "numba", "numpy"} <= facts.keys()
    assert all(facts.values())


def test_calls_are_repeated_between_the_least_and_the_most() -> None:
    calls: list[int] = []
    few = time_calls(lambda: calls.append(1), budget_s=0.0, least=3, most=9)
    assert (few.repetitions, len(calls)) == (3, 4)  # one to warm up
    assert 0 <= few.best_s <= few.median_s
    assert few.cpu_s >= 0
    assert time_calls(lambda: None, budget_s=60.0, least=3, most=9).repetitions == 9


def test_a_timing_is_told_in_the_unit_of_its_best() -> None:
    assert Timing(best_s=0.0123, median_s=0.0145, cpu_s=0.0122, repetitions=7).detail == "median 14.5, cpu 12.2 ms of 7"
    assert Timing(best_s=1.5, median_s=2.5, cpu_s=1.25, repetitions=3).detail == "median 2.5, cpu 1.25 s of 3"


@pytest.mark.parametrize("benchmark", ["colocated", "pipeline", "planning", "preprocess", "recovery", "scale", "transport"])
def test_the_repository_has_the_results_of_every_benchmark_where_it_writes_them(benchmark: str) -> None:
    assert (RESULTS / f"{benchmark}.json").is_file()
