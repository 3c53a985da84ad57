"""What a pipeline cannot train on ends it as a whole, with one sentence on rank 0, and nothing of the step is committed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headrace.processes import ProcessGroup
from tests.integration.trainers import Units, start, wait

pytestmark = pytest.mark.integration

TOKENIZER = Path(__file__).parents[2] / "preprocessor/headrace/preprocessor/text/tokenizer.json"
UNITS: Units = {"encoder": {}, "llm": {"pp": 2}}
PLANNED = {"replicas": 1, "microbatches": 2, "stages": {"encoder": 1, "llm": 2}}


def renumbered(definition: str) -> str:
    """The tokenizer with a control token, which every sample has, behind all others."""
    document = json.loads(definition)
    (token,) = [token for token in document["added_tokens"] if token["content"] == "<|im_end|>"]
    token["id"] = document["model"]["vocab"][token["content"]] = 1 + max(document["model"]["vocab"].values())
    return json.dumps(document)


@pytest.mark.slow
def test_tokens_beyond_the_vocabulary_end_every_process_with_the_sentence(cluster, spec, tmp_path: Path) -> None:
    """A preprocessor that joins later has another tokenizer than the one that indexed the job."""
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(TOKENIZER.read_bytes())
    cluster.start_reorder()
    cluster.add_preprocessors(1)
    job = cluster.submit(spec("renumbered", text={"tokenizer": str(tokenizer)}, topology=PLANNED))
    cluster.wait_for_state(job, "running")
    cluster.preprocessors[0].terminate()
    cluster.preprocessors[0].wait(2.0)
    tokenizer.write_text(renumbered(tokenizer.read_text()))
    cluster.add_preprocessors(1)
    with ProcessGroup() as group:
        processes = start(group, cluster, job, tmp_path, UNITS, 3, 3)
        codes = wait(processes)
        assert all(codes), codes
        assert None not in codes
        assert "the model's vocabulary ends with" in processes[0].last_words()
    assert cluster.ledger(job) == []


def test_samples_longer_than_the_limit_are_quarantined_and_the_job_goes_on(calm, spec) -> None:
    job = calm.submit(spec("short", steps=2, text={"max_tokens": 100}))
    assert calm.consume(job) == [0, 1]
    with calm.client() as client:
        assert {str(item.reason) for item in client.quarantine(job)} == {"too_long"}


@pytest.mark.slow
def test_more_rows_than_a_stage_may_keep_are_refused(calm, spec, tmp_path: Path) -> None:
    job = calm.submit(spec("crowded", topology=PLANNED))
    with ProcessGroup() as group:
        processes = start(group, calm, job, tmp_path, {"encoder": {}, "llm": {"pp": 2, "max_rows": 10}}, 3, 3)
        codes = wait(processes)
        assert all(codes), codes
        words = processes[0].last_words()
    assert re.search(r"step 0: stage [01] of llm replica 0 would keep \d+ rows .* more than the max_rows 10", words), words
    assert calm.ledger(job) == []
