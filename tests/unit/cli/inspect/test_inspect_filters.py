"""What a job's filter leaves out, and what it cuts, is told apart from what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.main import main

JOB = """
name: j
sources:
- path: {path}
  filter: {{fields: {{score: {{min: 2}}}}, sizes: {{tokens: {{min: 6}}}}}}
text: {{max_tokens: 20, too_long: truncate_end}}
"""


def test_filtered_cut_and_refused_samples_are_counted_by_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"text": "one two three four five six", "score": 1},
        {"text": "one two three four five six", "score": 2},
        {"text": "one", "score": 3},
        {"text": "one two three " * 30, "score": 4},
        {"text": "one two three four five six"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "job.yaml").write_text(JOB.format(path=tmp_path / "rows.jsonl"))
    options = ["inspect", "--spec", str(tmp_path / "job.yaml"), "--out", str(tmp_path / "out")]
    assert main([*options, "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["truncated"]) == (2, 1)
    assert [(item["reason"], item["sample"][-2:]) for item in report["refused"]] == [("schema_error", "/4")]
    assert [item["detail"] for item in report["filtered"]] == [
        "1 of 5 samples do not fulfil filter.fields",
        f"{report['filtered'][1]['detail'].split()[0]} tokens",
    ]
    assert main(options) == 0
    table = capsys.readouterr().out
    assert "cut as too long" in table
    assert "filtered out, shards and single samples: 2" in table
