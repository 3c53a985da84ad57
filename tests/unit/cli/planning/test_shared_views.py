"""What a user sees of ranks that units share: pictures, traces and the turns of each rank, which are those of the trainers."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from headrace.cli.main import main
from headrace.cli.planning.emulated_ranks import MeasuredStep, pipeline_of
from headrace.cli.planning.outcome import Outcome
from headrace.cli.planning.pipeline_panel import Panel
from headrace.cli.planning.rank_actions import ranks_json
from headrace.cli.planning.timeline import draw_timeline
from headrace.cli.planning.trace_events import write_trace
from headrace.cli.planning.tracks import Tracks
from headrace.execution_spec import COLOCATED, NESTED
from headrace.schedule import Action, Kind
from headrace.trainer.pipeline.events import Event, Recording
from tests.unit.cli.planning.shared_world import SHAPES, SHARED_STEPS, guests_of, shared_outcome, turns_of_trainers

COSTS = str(Path(__file__).parents[3] / "data" / "costs" / "chartqa_512.parquet")
SHARED = ["--batch", "48", "--replicas", "2", "--microbatches", "6", "--stages", "encoder=1,llm=2", "--dp", "encoder=4"]
SHARED += ["--on-llm", "encoder"]
BOTH = pytest.mark.parametrize("order", [NESTED, COLOCATED])
ALL = pytest.mark.parametrize(
    ("shape", "order"),
    [
        pytest.param(shape, order, marks=[] if order == NESTED or shape == "in pieces" else pytest.mark.slow)
        for shape, order in SHARED_STEPS
    ],
)


def work_of_ranks(outcome: Outcome) -> dict[str, float]:
    """Seconds that all ranks together spend on each unit: every slice takes as long as its stage does."""
    batch, sharing = outcome.batch, outcome.batch.execution.sharing
    assert sharing is not None
    totals = batch.costs.sum(axis=1) * batch.step_factors
    return {unit: sharing.slices.get(unit, 1) * total for unit, total in zip(batch.units, totals.tolist(), strict=True)}


def no_two_overlap(spans: dict[Any, list[tuple[float, float]]]) -> bool:
    return all(end <= start + 1e-9 for of_one in spans.values() for (_, end), (start, _) in itertools.pairwise(sorted(of_one)))


@ALL
def test_every_rank_has_the_turns_of_the_trainers(shape: str, order: Any) -> None:
    schedule = "zero-bubble" if shape == "replicas on slices" else "1f1b"
    outcome = shared_outcome(shape, order, schedule)
    found = {
        one["rank"]: [(a["unit"], a["kind"], a["microbatch"], a.get("piece", 0)) for a in one["actions"]]
        for one in ranks_json(outcome)["ranks"]
    }
    assert found == turns_of_trainers(outcome)


@ALL
def test_the_turns_are_all_that_ranks_do_one_after_the_other(shape: str, order: Any) -> None:
    outcome = shared_outcome(shape, order)
    ranks, topology = ranks_json(outcome)["ranks"], pipeline_of(outcome.batch)
    assert [one["rank"] for one in ranks] == list(range(topology.world_size))
    seconds: dict[str, float] = defaultdict(float)
    for one in ranks:
        places = {place.unit: {"replica": place.replica, "stage": place.stage} for place in topology.places(one["rank"])}
        assert one["units"] == places
        ends = [0.0, *(action["end_s"] for action in one["actions"])]
        assert all(before <= action["start_s"] + 1e-9 for before, action in zip(ends, one["actions"], strict=False))
        for action in one["actions"]:
            seconds[action["unit"]] += action["end_s"] - action["start_s"]
    assert seconds == pytest.approx(work_of_ranks(outcome))
    assert max(action["end_s"] for one in ranks for action in one["actions"]) == outcome.predicted.iteration_s


@ALL
def test_a_row_of_the_picture_shows_one_action_at_a_time_and_all_of_them(shape: str, order: Any, tmp_path: Path) -> None:
    outcome = shared_outcome(shape, order)
    panel = Panel.of(outcome)
    assert sum(map(len, panel.tracks.ranks)) == pipeline_of(outcome.batch).world_size
    action, track = panel.tracks.boxes(np.arange(panel.timeline.stage.size))
    assert set(action.tolist()) == set(range(panel.timeline.stage.size))
    spans = defaultdict(list)
    seconds: dict[str, float] = defaultdict(float)
    for a, at in zip(action.tolist(), track.tolist(), strict=True):
        start_s, end_s = float(panel.timeline.start_s[a]), float(panel.timeline.end_s[a])
        spans[at].append((start_s, end_s))
        unit = outcome.batch.units[outcome.unit_of_stage[panel.timeline.stage[a]]]
        seconds[unit] += (end_s - start_s) * len(panel.tracks.ranks[at])
    assert no_two_overlap(spans)
    assert seconds == pytest.approx(work_of_ranks(outcome))
    rows = panel.rows()
    drawn = rows[np.isfinite(rows)]
    assert len(set(drawn.tolist())) == drawn.size > 0
    names = [name for name in panel.tracks.names if name.startswith("rank")]
    assert sum(map(len, panel.tracks.ranks)) >= len(set(names)) == len(names), "each names ranks of its own"


@BOTH
def test_the_trace_has_a_thread_for_each_rank(order: Any, tmp_path: Path) -> None:
    outcome = shared_outcome("in pieces", order)
    document = json.loads(write_trace(tmp_path / "t.json", outcome).read_text())
    assert document["otherData"]["sharing"] == order
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert names == {(0, 0): "rank 0", (0, 1): "rank 1", (1, 0): "rank 2", (1, 1): "rank 3"}
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    spans = defaultdict(list)
    seconds: dict[str, float] = defaultdict(float)
    for event in slices:
        spans[event["pid"], event["tid"]].append((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
        seconds[event["args"]["unit"]] += event["dur"] / 1e6
    assert spans.keys() == names.keys()
    assert no_two_overlap(spans)
    assert seconds == pytest.approx(work_of_ranks(outcome))
    assert {event["name"] for event in slices} >= {"F 0.0 (vision)", "F 0.2 (vision)", "B 0.2 (vision)", "F 0 (llm)", "B 4 (llm)"}
    critical = [event for event in slices if event["args"]["critical"]]
    assert max(event["ts"] + event["dur"] for event in critical) == pytest.approx(outcome.predicted.iteration_s * 1e6)


@pytest.mark.parametrize("shape", ["in pieces", "beside ranks of their own"])
def test_units_keep_their_colours_and_waiting_is_seen(shape: str, tmp_path: Path) -> None:
    outcome = shared_outcome(shape, NESTED)
    out = draw_timeline(tmp_path / "p.png", outcome, end=outcome.predicted.iteration_s, title="A batch", unit="s")
    packed = (matplotlib.image.imread(out)[:, :, :3] * 255).round().astype(int) @ [1 << 16, 1 << 8, 1]
    found = {f"#{pixel:06x}" for pixel in np.unique(packed).tolist()}
    assert {"#12807a", "#93d1cb", "#d1603d", "#f5bfa8", "#e9edf0"} <= found


@ALL
def test_measured_actions_are_in_the_tracks_of_the_simulated_ones(shape: str, order: Any) -> None:
    """What processes would record that take exactly the simulated times: an event on every rank that takes an action."""
    outcome = shared_outcome(shape, order)
    topology = pipeline_of(outcome.batch)
    recordings = []
    for one in ranks_json(outcome)["ranks"]:
        places = {place.unit: place for place in topology.places(one["rank"])}
        events = [
            Event(
                places[a["unit"]],
                Action(kind=Kind[a["kind"].upper()], microbatch=a["microbatch"], chunk=a.get("piece", 0)),
                *(7.0 + a["start_s"], 7.0 + a["end_s"], 0.0, a["end_s"] - a["start_s"]),
            )
            for a in one["actions"]
        ]
        recordings.append(Recording(events, 0.0))
    measured = MeasuredStep(recordings=recordings, num_processes=topology.world_size, asked_s=1.0, slept_s=1.0)
    timeline, tracks = measured.timeline(outcome)
    simulated = outcome.timeline()
    expected = boxes_of(simulated, Tracks.of(outcome, simulated))
    found = boxes_of(timeline, tracks)
    assert found.keys() == expected.keys()
    assert [found[key] for key in expected] == pytest.approx([*expected.values()])


def boxes_of(timeline: Any, tracks: Tracks) -> dict[tuple[int, ...], float]:
    """Return the start of each box by track, stage, replica, microbatch, kind and chunk."""
    action, track = tracks.boxes(np.arange(timeline.stage.size))
    columns = (timeline.stage, timeline.replica, timeline.microbatch, timeline.kind, timeline.chunk)
    keys = np.stack([track, *(column[action] for column in columns)], axis=1).tolist()
    return dict(zip(map(tuple, keys), timeline.start_s[action].tolist(), strict=True))


@BOTH
def test_auto_takes_what_is_fastest_on_the_shared_ranks(order: Any) -> None:
    seconds = {
        strategy: shared_outcome("replicas on stages", order, strategy=strategy).predicted.iteration_s
        for strategy in ("random", "disttrain", "entrain", "joint", "taper", "auto")
    }
    assert seconds["auto"] == min(seconds.values())


def test_simulate_draws_and_traces_them_and_tells_their_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--strategies", "entrain", "--pieces", "encoder=2", "--out", str(tmp_path), "--format", "json"]
    assert main(["simulate", COSTS, *SHARED, *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["on_llm"], report["sharing"]) == (["encoder"], "nested")
    for row in report["strategies"]:
        assert matplotlib.image.imread(row["picture"]).shape[1] > 1000
        assert json.loads(Path(row["trace"]).read_text())["otherData"]["sharing"] == "nested"
        assert [one["rank"] for one in row["ranks"]] == [0, 1, 2, 3]
        assert {action.get("piece") for action in row["ranks"][0]["actions"]} == {None, 0, 1}


def test_a_plan_tells_the_turns_of_its_ranks_and_prints_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", COSTS, *SHARED, "--strategy", "entrain", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    kinds = [action["kind"] for action in document["ranks"][3]["actions"] if action["unit"] == "llm"]
    assert sorted(kinds) == ["backward"] * 6 + ["forward"] * 6
    assert document["ranks"][3]["units"] == {"encoder": {"replica": 3, "stage": 0}, "llm": {"replica": 1, "stage": 1}}
    assert main(["plan", COSTS, *SHARED, "--strategy", "entrain"]) == 0
    assert "Microbatches of replica" in capsys.readouterr().out
    assert main(["plan", COSTS, "--batch", "48", "--strategy", "random", "--format", "json"]) == 0
    assert "ranks" not in json.loads(capsys.readouterr().out), "where every unit has ranks of its own"


def test_shapes_have_their_guests_on_all_ranks_of_the_llm() -> None:
    for shape, units in SHAPES.items():
        assert {int(np.prod(units[guest])) for guest in guests_of(shape)} == {int(np.prod(units["llm"]))}
