"""Pictures of what strategies do to a batch: one for each of them, from the command, and beside its text on the page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headrace.cli.main import main
from headrace.cli.planning.rank_picture import RankStep
from headrace.cli.planning.strategy_pictures import DRAWN, IDEAS
from headrace.plan import BASELINE_STRATEGIES, Topology
from headrace.reorder_service.planning import STRATEGIES
from headrace.reorder_service.planning.batch import make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.strategies import arrival

DOCS = Path(__file__).parents[4] / "docs"
LARGEST_BYTES = 60_000


def test_every_strategy_has_a_small_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    table, folder = tmp_path / "costs.jsonl", tmp_path / "pictures"
    costs = rng.lognormal(0, 0.6, (12, 2)).tolist()
    rows = ({"sample_id": i, "cost_encoder": encoder, "cost_llm": llm} for i, (encoder, llm) in enumerate(costs))
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [
        "--replicas",
        "2",
        "--microbatches",
        "2",
        "--stages",
        "encoder=1,llm=1",
        "--out",
        str(tmp_path),
        "--format",
        "json",
    ]
    assert main(["compare", str(table), *options, "--strategy-pictures", str(folder)]) == 0
    written = [Path(path) for path in json.loads(capsys.readouterr().out)["strategy_pictures"]]
    assert {path.stem for path in written} == set(DRAWN) == set(IDEAS)
    for path in written:
        assert path.parent == folder
        assert path.stat().st_size < LARGEST_BYTES
        with Image.open(path) as picture:
            assert picture.width == 1000


def test_the_page_has_every_strategy_with_its_picture() -> None:
    page = (DOCS / "strategies.md").read_text()
    assert {*STRATEGIES, *BASELINE_STRATEGIES} <= set(DRAWN)
    assert [name for name in DRAWN if f"\n### {name}\n" not in page] == []
    assert [name for name in STRATEGIES if f"| [`{name}`](#{name}) |" not in page] == []
    for name in DRAWN:
        assert f"](pictures/strategies/{name}.png)" in page
        assert (DOCS / "pictures" / "strategies" / f"{name}.png").stat().st_size < LARGEST_BYTES


@pytest.mark.parametrize("meet", ["microbatch", "phases"])
def test_ranks_are_drawn_for_as_long_as_their_step_is_predicted_to_take(meet: str) -> None:
    costs = {unit: np.random.default_rng(0).random(20) for unit in ("encoder", "llm")}
    topology = Topology(replicas=3, microbatches=2, stages=dict.fromkeys(costs, 1))
    execution = Execution(colocated="microbatch" if meet == "microbatch" else "phases")
    batch = make_batch(np.arange(20), costs, topology, 0, execution=execution)
    step = RankStep.of(batch, arrival.plan_slots(batch))
    assert max(float((start + lasts).max()) for *_, start, lasts in step.passes()) == pytest.approx(step.predicted.iteration_s)
