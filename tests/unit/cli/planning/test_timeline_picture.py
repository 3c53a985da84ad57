"""Pictures of simulated steps. What they look like is for eyes; here: that they hold what they should, for any size."""

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from PIL import Image

from headrace.cli.planning.gain import measure
from headrace.cli.planning.gain_picture import draw_gains
from headrace.cli.planning.outcome import Outcome, plan_timed
from headrace.cli.planning.problem import Problem
from headrace.cli.planning.timeline import draw_comparison, draw_timeline
from headrace.plan import Topology
from headrace.reorder_service.planning import plan
from headrace.reorder_service.planning.batch import Batch, make_batch
from headrace.reorder_service.planning.execution import Execution

FORWARD_AND_BACKWARD = {"#12807a", "#93d1cb", "#d1603d", "#f5bfa8"}
IDLE, DEFERRED, CRITICAL = "#e9edf0", "#f2b134", "#22303c"


def draw(out: Path, topology: Topology, costs: dict[str, np.ndarray]) -> np.ndarray:
    ids = np.arange(len(costs["llm"])) + 50
    arrival, planned = (plan(strategy, ids, costs, topology, 0) for strategy in ("random", "disttrain"))
    assert draw_comparison(out, arrival, planned, ids, costs, title="A batch") == out
    return matplotlib.image.imread(out)


def colours(picture: np.ndarray) -> set[str]:
    found = Image.fromarray((picture[:, :, :3] * 255).round().astype(np.uint8)).getcolors(picture.size)
    return {"#{:02x}{:02x}{:02x}".format(*pixel) for _, pixel in found}


def random_batch(topology: Topology, num_samples: int, execution: Execution | None = None) -> Batch:
    rng = np.random.default_rng(0)
    costs = {unit: rng.lognormal(0, 1, num_samples) for unit in topology.stages}
    return make_batch(np.arange(num_samples), costs, topology, 0, execution=execution)


def outcome(strategy: str, batch: Batch) -> Outcome:
    return Outcome.of(plan_timed(batch, strategy)[0], batch)


@pytest.mark.parametrize(("replicas", "microbatches", "samples"), [(1, 2, 8), (4, 4, 24), (3, 4, 2)])
def test_it_draws_what_fits(tmp_path: Path, replicas: int, microbatches: int, samples: int) -> None:
    rng = np.random.default_rng(0)
    costs = {"encoder": rng.lognormal(0, 1, samples), "llm": rng.lognormal(0, 1, samples)}
    topology = Topology(replicas=replicas, microbatches=microbatches, stages={"encoder": 1, "llm": 3})
    picture = draw(tmp_path / "p.png", topology, costs)
    assert picture.shape[1] > 1000
    assert FORWARD_AND_BACKWARD | {IDLE, CRITICAL} <= colours(picture)


def test_its_height_stays_bounded_for_many_replicas(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    costs = {"encoder": rng.random(256), "llm": rng.random(256)}
    four, many = (
        draw(tmp_path / f"{n}.png", Topology(replicas=n, microbatches=4, stages={"encoder": 1, "llm": 3}), costs) for n in (4, 64)
    )
    assert many.shape == four.shape


def test_a_batch_that_costs_nothing_is_drawn_as_empty(tmp_path: Path) -> None:
    topology = Topology(replicas=1, microbatches=2, stages={"encoder": 1, "llm": 1})
    assert draw(tmp_path / "p.png", topology, {"encoder": np.zeros(3), "llm": np.zeros(3)}).size


def test_deferral_is_marked_where_there_is_some(tmp_path: Path) -> None:
    batch = random_batch(Topology(replicas=1, microbatches=6, stages={"encoder": 2, "llm": 2}), 40)
    late, prompt = outcome("entrain", batch), outcome("random", batch)
    assert late.num_deferred() > 0
    for of_plan, marked in ((late, True), (prompt, False)):
        picture = matplotlib.image.imread(draw_timeline(tmp_path / "p.png", of_plan, end=30.0, title="A batch"))
        assert (DEFERRED in colours(picture)) == marked


@pytest.mark.parametrize("execution", [Execution(schedule="interleaved", chunks=3), Execution(schedule="eager", in_flight=4)])
def test_any_schedule_and_any_units_are_drawn(tmp_path: Path, execution: Execution) -> None:
    topology = Topology(replicas=2, microbatches=6, stages={"vision": 1, "audio": 1, "depth": 1, "llm": 2, "generator": 1})
    picture = draw_timeline(tmp_path / "p.png", outcome("random", random_batch(topology, 50, execution)), end=50.0, title="$x_{$")
    assert colours(matplotlib.image.imread(picture)) > FORWARD_AND_BACKWARD


def test_weights_have_a_colour_of_their_own_where_they_are_put_off(tmp_path: Path) -> None:
    topology = Topology(replicas=1, microbatches=4, stages={"encoder": 1, "llm": 2})
    for execution in (Execution(), Execution(schedule="zero-bubble")):
        picture = draw_timeline(tmp_path / "p.png", outcome("random", random_batch(topology, 20, execution)), end=50.0, title="x")
        found = colours(matplotlib.image.imread(picture)) >= {"#56a8a3", "#e39073"}
        assert found == (execution.schedule == "zero-bubble")


def test_on_a_longer_time_axis_the_same_step_is_shorter(tmp_path: Path) -> None:
    step = outcome("random", random_batch(Topology(replicas=1, microbatches=4, stages={"encoder": 1, "llm": 1}), 30))
    widths = []
    for factor in (1, 2):
        out = draw_timeline(tmp_path / "p.png", step, end=factor * step.predicted.iteration_s, title="A batch")
        above_the_legend = (matplotlib.image.imread(out)[:-70, :, :3] * 255).round().astype(int)
        coloured = np.argwhere(np.ptp(above_the_legend, axis=2) > 40)
        widths.append(int(np.ptp(coloured[:, 1])))
    assert widths[0] == pytest.approx(2 * widths[1], rel=0.02)


def test_gains_are_bars_above_the_pipelines(tmp_path: Path) -> None:
    batch = random_batch(Topology(replicas=2, microbatches=8, stages={"encoder": 1, "llm": 1}), 64)
    problem = Problem(samples=batch, batch=batch, packs=None)
    gains = [measure(strategy, [problem]) for strategy in ("random", "disttrain", "entrain")]
    assert gains[1].speedup_over(gains[0]) == pytest.approx(gains[0].iteration_s / gains[1].iteration_s)
    picture = matplotlib.image.imread(draw_gains(tmp_path / "p.png", gains, title="data", seconds=True))
    taller = matplotlib.image.imread(draw_gains(tmp_path / "p.png", [*gains, gains[1]], title="data", seconds=True))
    assert FORWARD_AND_BACKWARD | {IDLE, "#9fb3c1", "#f0d9cf"} <= colours(picture)
    assert taller.shape[0] > picture.shape[0], "a bar for each strategy"
