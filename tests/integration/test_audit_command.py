"""`headrace audit`, `headrace job quarantine` and `headrace replay` against a real job over damaged data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis

from headrace import jobs_client, trainer
from headrace.cli.example import example_data
from headrace.cli.main import main

pytestmark = pytest.mark.integration

TARS = Path(__file__).parent.parent / "data" / "hostile" / "tars"


@pytest.fixture
def headrace(cluster, capsys):
    """Run a command against the cluster; exit code and standard output."""

    def run(*arguments: str, output: str = "json") -> tuple[int, str]:
        capsys.readouterr()
        code = main([*arguments, "--endpoint", cluster.endpoint, "--format", output])
        return code, capsys.readouterr().out

    return run


@pytest.mark.slow
def test_a_job_over_hostile_archives_is_audited_and_what_it_refused_is_listed_and_replayed(
    cluster, spec, headrace, monkeypatch
) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(2)
    job = cluster.submit(spec("hostile", sources=[{"path": str(TARS), "name": "h"}], global_batch=8, epochs=2))
    audited_under_way = []

    def audit_under_way(step: trainer.Step) -> None:
        if step.index == 3:
            audited_under_way.append(headrace("audit", job))

    cluster.consume(job, audit_under_way)
    ledger = cluster.ledger(job)
    monkeypatch.setattr(jobs_client, "LEDGER_PAGE", 3)
    assert cluster.ledger(job) == ledger
    assert len(ledger) > 3

    [(code, text)] = audited_under_way
    assert (code, json.loads(text)["steps"], json.loads(text)["state"]) == (0, 3, "running")
    for by_name in ([], ["--by-name"]):
        code, text = headrace("audit", job, *by_name)
        report = json.loads(text)
        assert (code, report["ok"], report["steps"]) == (0, True, len(ledger))
        assert {check["rule"] for check in report["checks"]} == {"steps", "places", "once", "whole", "quarantine"}
    code, text = headrace("audit", job, output="table")
    assert (code, "every sample once" in text) == (0, True)

    # Every quarantined sample with its place, in each of the forms.
    document = json.loads(headrace("job", "quarantine", job)[1])
    rows = {row["sample"]: row for row in document["quarantined"]}
    lines = headrace("job", "quarantine", job, output="jsonl")[1].splitlines()
    assert [json.loads(line) for line in lines] == document["quarantined"]
    assert sum(document["reasons"].values()) == len(rows)
    bad = rows["h/one_bad_of_three.tar/r"]
    assert {name: bad[name] for name in ("reason", "source", "shard", "key", "row")} == {
        "reason": "corrupt_media",
        "source": "h",
        "shard": "one_bad_of_three.tar",
        "key": "r",
        "row": 1,
    }
    assert bad["step"] == bad["number"] // 8
    whole = rows["h/zero.tar"]
    assert (whole["shard"], whole["key"], whole["row"], whole["step"]) == ("zero.tar", None, None, None)
    table = headrace("job", "quarantine", job, output="table")[1]
    assert f"{document['reasons']['corrupt_media']} corrupt_media" in table

    # Replayed, each comes to the verdict that the job came to.
    for name, row in rows.items():
        code, text = headrace("replay", job, name)
        replayed = json.loads(text)
        assert (code, replayed["refusal"]["reason"], replayed["refusal"]["detail"]) == (1, row["reason"], row["detail"])
        assert (replayed["row"], replayed["number"]) == (row["row"], row["number"])
        if row["row"] is not None:
            assert "BadSampleError" in replayed["refusal"]["traceback"]
    for name in sorted({name for entry in ledger for name in entry.samples})[::5]:
        assert headrace("replay", job, name)[0] == 0
    assert json.loads(headrace("replay", job, f"#{bad['number']}")[1])["sample"] == bad["sample"]


def test_replay_shows_every_piece_of_a_good_sample(cluster, spec, headrace) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(1)
    job = cluster.submit(spec("good", steps=1))
    cluster.consume(job)
    names = {name for entry in cluster.ledger(job) for name in entry.samples}
    kinds = set()
    for number in range(16):
        code, text = headrace("replay", job, str(number))
        report = json.loads(text)
        assert (code, report["refusal"], report["quarantined"], report["number"]) == (0, None, None, number)
        names.discard(report["sample"])
        kinds |= {medium["medium"].split()[0] for medium in report["media"]}
        assert report["fields"]
        assert report["turns"]
        assert 0 < report["tokens"]["with_loss"] < report["tokens"]["count"]
        assert sum(medium["tokens"] for medium in report["media"]) < report["tokens"]["count"]
        assert all(medium["format"] and medium["codec"] and medium["decoded"] for medium in report["media"])
        assert len(report["pieces"]) == 3 + 2 * len(report["media"])
    table = headrace("replay", job, "15", output="table")[1]
    assert report["sample"] in table
    assert table.rstrip().endswith("good")
    assert not names, "the first global batch has the first sixteen numbers"
    assert kinds >= {"image", "recording"}


@pytest.mark.slow
def test_a_mixture_that_changed_and_a_job_that_was_reset_are_right_and_a_ledger_that_was_touched_is_not(
    cluster, spec, headrace, store
) -> None:
    cluster.start_reorder(store=store.url)
    cluster.add_preprocessors(1)
    sources = [{"path": str(example_data()), "name": "most"}, {"path": str(TARS / "good.tar"), "name": "few"}]
    job = cluster.submit(spec("mixed", sources=sources, steps=9))
    with cluster.client() as client:
        client.set_weights(job, 6, {"most": 0.5, "few": 0.5})
    cluster.consume(job)
    with cluster.client() as client:
        client.reset(job, 5)
    cluster.consume(job)
    for by_name in ([], ["--by-name"]):
        code, text = headrace("audit", job, *by_name)
        assert (code, json.loads(text)["steps"]) == (0, 9)

    with redis.Redis(port=store.port) as client:
        key = f"headrace:{{{job}}}:ledger"
        entry = json.loads(client.lindex(key, 7))
        lost = entry["samples"].pop(0)
        client.lset(key, 7, json.dumps(entry))
    code, text = headrace("audit", job)
    report = json.loads(text)
    findings = {check["rule"]: check["findings"] for check in report["checks"]}
    assert (code, report["ok"]) == (1, False)
    [finding] = findings["places"]
    assert finding["step"] == 7
    assert lost.rpartition("/")[0] in finding["sentence"]
    assert findings["whole"], "an epoch of the small source lacks it"
    code, text = headrace("audit", job, "--by-name", output="table")
    assert (code, f"step 7 lacks {lost}, which the order puts there" in text) == (1, True)


@pytest.mark.slow
def test_what_cannot_be_looked_at_is_one_sentence(cluster, spec, headrace, capsys) -> None:
    cluster.start_reorder()
    job = cluster.submit(spec("small", sources=[{"path": str(TARS / "good.tar")}]))

    def refused(*arguments: str) -> str:
        capsys.readouterr()
        assert main([*arguments, "--endpoint", cluster.endpoint]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        return err

    assert "job 'small' has indexed 0 of ? shards" in refused("audit", job)
    assert "no job 'no-job'" in refused("audit", "no-job")
    assert "no job 'no-job'" in refused("job", "quarantine", "no-job")
    cluster.add_preprocessors(1)
    cluster.wait_for_state(job, "running")
    assert "'good.tar/no.tar/a' is in no shard of job 'small'" in refused("replay", job, "good.tar/no.tar/a")
    assert "has no sample with the key 'zz'" in refused("replay", job, "good.tar/good.tar/zz")
    assert "job 'small' has no sample #3: it ends with step 0" in refused("replay", job, "#3")
    assert headrace("audit", job)[0] == 0, "nothing is committed, and nothing is wrong"
    assert "no sample of job small is quarantined" in headrace("job", "quarantine", job, output="table")[1]
