"""The picture of a batch before and after planning. What it looks like is for eyes; here: that it is there, for any size."""

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from cli.timeline import draw_comparison
from headrace.plan import Topology
from reorder_service.planning import plan


def draw(out: Path, topology: Topology, costs: dict[str, np.ndarray]) -> np.ndarray:
    ids = np.arange(len(costs["llm"])) + 1000
    arrival, planned = (plan(strategy, ids, costs, topology, seed=0) for strategy in ("random", "disttrain"))
    assert draw_comparison(out, arrival, planned, ids, costs, title="A batch") == out
    return matplotlib.image.imread(out)


@pytest.mark.parametrize(("replicas", "microbatches", "samples"), [(1, 2, 8), (4, 8, 64), (3, 4, 2)])
def test_it_draws_what_fits(tmp_path: Path, replicas: int, microbatches: int, samples: int) -> None:
    rng = np.random.default_rng(0)
    costs = {"encoder": rng.lognormal(0, 1, samples), "llm": rng.lognormal(0, 1, samples)}
    topology = Topology(replicas=replicas, microbatches=microbatches, stages={"encoder": 1, "llm": 3})
    picture = draw(tmp_path / "p.png", topology, costs)
    assert picture.shape[1] > 1000
    colours = {tuple(pixel) for pixel in (picture[:, :, :3] * 255).round().astype(int).reshape(-1, 3)[::7].tolist()}
    for box in [(0x12, 0x80, 0x7A), (0x93, 0xD1, 0xCB), (0xD1, 0x60, 0x3D), (0xF5, 0xBF, 0xA8), (0xE9, 0xED, 0xF0)]:
        assert box in colours, "forward and backward of both units, and idle time"


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
