"""The bundled cost tables become models of published sizes with the tables' own costs, and searches place them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.orchestrate.cost_tables import SHAPES, TABLES, TOKENS, all_searches, table_demand
from benchmarks.planning.inputs import CHARTQA, Family
from headrace.plan import LLM


@pytest.mark.parametrize("family", TABLES, ids=lambda family: family.name)
def test_units_take_as_long_as_their_costs_say(family: Family) -> None:
    costs = family.table().costs
    units = {unit.name: unit for unit in table_demand(family, 64).units}
    assert list(units) == list(costs)
    scale = float(units[LLM].forward_s[1].mean()) / float(costs[LLM].mean())
    for name, unit in units.items():
        assert unit.forward_s[1] == pytest.approx(costs[name] * scale)
    tokens = units[LLM].sent_bytes / (2 * SHAPES[LLM].width)
    assert float(np.mean(tokens)) == pytest.approx(TOKENS)


@pytest.mark.slow
def test_no_paper_finds_more_than_headrace() -> None:
    found, seconds = all_searches(table_demand(CHARTQA, 16), num_batches=1)
    assert found.answers
    assert all(found.best.key <= judged.key for judged in found.answers.values())
    assert seconds > 0
