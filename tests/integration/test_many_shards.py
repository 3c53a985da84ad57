"""A data set of many shards: its job begins when the first of them are indexed, and has the same global batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace import trainer
from headrace.cli.main import main
from headrace.ledger import ledger_sha256

pytestmark = pytest.mark.integration

SHARDS, ROWS = 60, 2
LEDGER_SHA256 = "ef05bab655ea1bed2a40bdb9bbaefdf0ba0438bf7dea1fef87e1d8840baec5b2"
"""As it is with every shard indexed before the first step."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "many"
    folder.mkdir()
    for shard in range(SHARDS):
        rows = [{"text": f"shard {shard}, row {row}"} for row in range(ROWS)]
        (folder / f"{shard:02}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_a_job_begins_before_its_shards_are_indexed_and_has_the_same_ledger(calm, spec, data, capsys) -> None:
    job = calm.submit(spec("many", sources=[{"path": str(data)}], shuffle_shards=4, global_batch=4, window=2))
    looks = []

    def look(step: trainer.Step) -> None:
        with calm.client() as client:
            looks.append(client.show(job))
        if step.index == 8:
            assert main(["audit", job, "--endpoint", calm.endpoint]) == 0
            assert main(["replay", job, "119", "--endpoint", calm.endpoint]) == 2

    assert calm.consume(job, look) == list(range(SHARDS * ROWS // 4))
    assert [status.num_shards for status in looks] == [SHARDS] * len(looks)
    assert looks[1].committed_steps == 1
    assert 0 < looks[0].indexed_shards <= looks[1].indexed_shards < SHARDS
    assert (looks[1].num_steps, looks[-1].num_steps) == (0, 30)
    assert looks[-1].indexed_shards == SHARDS
    assert "its order does not reach step 29 yet" in capsys.readouterr().err
    assert ledger_sha256(calm.ledger(job)) == LEDGER_SHA256
    assert main(["audit", job, "--by-name", "--endpoint", calm.endpoint]) == 0
