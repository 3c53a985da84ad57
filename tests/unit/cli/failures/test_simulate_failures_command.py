"""`headrace simulate-failures`: its table, its picture, and what it says of files that it cannot use."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from headrace.cli.main import main
from headrace.reorder_service.recovery.forecast.policies import Assumptions

POLICIES = ["headrace", "varuna-like", "varuna-like, tuned", "bamboo-like", "torchft-like", "torchft-like, tuned"]
PROFILE = {"units": {"llm": 4}, "seconds": [[1.0]] * 4, "gpu_bytes": [[1e9]] * 4, "memory_bytes": 4e9}
TRACE = "time_s,node,event\n30,a,lost\n40,a,back\n200,b,lost\n"


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    profile, trace = tmp_path / "layers.json", tmp_path / "spot.csv"
    profile.write_text(json.dumps(PROFILE))
    trace.write_text(TRACE)
    job = ["--profile", str(profile), "--nodes", "6", "--failures", "1", "--global-batch", "24"]
    return ["simulate-failures", "--trace", str(trace), *job, "--out", str(tmp_path / "failures.png")]


def report_of(capsys: pytest.CaptureFixture[str], options: list[str], *more: str) -> dict[str, Any]:
    assert main([*options, "--format", "json", *more]) == 0
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return report


def test_every_policy_is_beside_the_bound_and_in_the_picture(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys, options, "--hours", "0.1")
    assert {key: report[key] for key in ("simulated", "nodes", "hours", "losses", "fewest_nodes", "least_nodes")} == {
        "simulated": True,
        "nodes": 6,
        "hours": 0.1,
        "losses": 2,
        "fewest_nodes": 5,
        "least_nodes": 2,
    }
    rows = {row["policy"]: row for row in report["policies"]}
    assert list(rows) == POLICIES
    for row in rows.values():
        assert row["of_failure_free"] == pytest.approx(row["samples_per_s"] / report["failure_free_samples_per_s"])
        assert 0 < row["of_failure_free"] <= 1
        assert row["lost_s"] == pytest.approx(
            sum(row[f"{name}_s"] for name in ("recovers", "undone", "saves", "waits", "stopped"))
        )
    assert rows["headrace"]["recoveries"] == 3
    assert matplotlib.image.imread(report["picture"]).shape[1] > 1000


def test_the_table_and_the_picture_say_that_they_are_simulated(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "failures.svg"
    assert main([*options, "--out", str(picture), "--notice", "30s", "--hours", "0.1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("SIMULATED: 6 nodes, 2 failures in 0.1 hours; fewest nodes 5, failure-free ")
    assert all(name in out for name in POLICIES)
    assert "picture in " in out
    assert "<svg" in picture.read_text()


def test_it_says_which_costs_were_measured_and_which_were_given(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options.append("--no-picture")
    measured = report_of(capsys, options)["assumed"]
    assert measured == {"copy_bytes_per_s": 2e9, "rebuild_s": 0.16, "measured": ["copy_bytes_per_s", "rebuild_s"]}
    given = report_of(capsys, options, "--copy-rate", "25")["assumed"]
    assert given == {"copy_bytes_per_s": 25e9, "rebuild_s": 0.16, "measured": ["rebuild_s"]}
    for more, words in [
        (
            [],
            "copies at 2 GB/s (measured) and has new process groups after 0.16 s (measured); measured by `make bench-recovery`",
        ),
        (["--copy-rate", "3", "--rebuild", "2"], "copies at 3 GB/s (as given) and has new process groups after 2 s (as given)\n"),
    ]:
        assert main([*options, *more]) == 0
        assert words in capsys.readouterr().out


def test_a_trace_is_drawn_from_its_times_and_seed(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    drawn = [options[0], *options[3:], "--mtbf", "5m", "--mttr", "10m", "--hours", "2", "--no-picture"]
    first, again, other = (report_of(capsys, drawn, "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again
    assert first != other
    assert first["losses"] > 5
    assert "picture" not in first


def test_lines_of_json_are_a_trace_as_well(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [dict(zip(("time_s", "node", "event"), line.split(","), strict=True)) for line in TRACE.splitlines()[1:]]
    path = tmp_path / "spot.jsonl"
    path.write_text("\n\n".join(map(json.dumps, rows)))
    options.append("--no-picture")
    assert report_of(capsys, options, "--trace", str(path)) == report_of(capsys, options)


def test_who_cannot_run_the_job_is_left_out(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "large.json"
    path.write_text(json.dumps(PROFILE | {"memory_bytes": 1e9}))
    assert main([*options, "--profile", str(path), "--nodes", "8", "--format", "json", "--hours", "0.1"]) == 0
    out, err = capsys.readouterr()
    assert "bamboo-like is left out: 8 nodes do not hold the model once" in err
    assert "bamboo-like" not in {row["policy"] for row in json.loads(out)["policies"]}


def test_who_stops_says_why(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "end.csv"
    path.write_text("time_s,node,event\n" + "".join(f"60,{node},lost\n" for node in "abcde"))
    assert main([*options, "--trace", str(path), "--hours", "0.05"]) == 0
    assert "headrace stops after 60 s: 1 nodes are left, but 2 replicas need 1 each: add 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.csv", "time,node\n1,a\n", "t.csv, line 1: no column time_s; begin with a line time_s,node,event"),
        (
            "t.csv",
            "time_s,node,event\nsoon,a,lost\n",
            "t.csv, line 2: time_s is seconds since the start, got 'soon'; write a number",
        ),
        ("t.csv", "time_s,node,event\n1,a,gone\n", "t.csv, line 2: got node 'a' and event 'gone'; name a node, and lost or back"),
        (
            "t.csv",
            "time_s,node,event\n1,a,lost\n2,a,lost\n",
            "t.csv: line 3, a lost at 2 s: the node is not there: take the event",
        ),
        ("t.csv", "time_s,node,event\n", "t.csv has no event; a trace has one or more rows of time_s, node, event"),
        ("t.csv", "time_s,node,event\n0,a,lost\n", "t.csv ends where it begins, at 0 s; say with --hours how long it goes on"),
        ("t.jsonl", '{"time_s": 1,', "t.jsonl, line 1: not JSON ("),
        ("t.jsonl", '{"time_s": 1}', "t.jsonl, line 1: no object with time_s, node, event; write one a line"),
    ],
)
def test_a_trace_that_cannot_be_used_is_named_with_its_line(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, words: str
) -> None:
    (tmp_path / name).write_text(text)
    assert main([*options, "--trace", str(tmp_path / name)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--out", "x.pdf"], "--out x.pdf is neither .png nor .svg: name a picture, or give --no-picture"),
        (["--trace", "none.csv"], "cannot read none.csv: No such file or directory; --trace takes CSV or JSONL"),
        (["--model", "3b"], "--model does not go with --profile, which has it already"),
        (["--nodes", "1"], "2 nodes are lost that were there at the start, of 1: start with 2 or more"),
        (["--global-batch", "3", "--microbatch", "2"], "3 samples are no whole microbatches of 2: 4 would be"),
        (["--profile", __file__], "is no profile: "),
    ],
)
def test_what_is_wrong_is_one_sentence(
    options: list[str], capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    assert main([*options, *more]) == 2
    err = capsys.readouterr().err
    assert err.startswith("headrace simulate-failures: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--notice", "soon"], "argument --notice: 'soon' is no time such as 90s, 10m, 1.5h or 2d"),
        (["--hours", "0"], "argument --hours: must be a number above 0, got '0'"),
        (["--save-every", "1.5"], "argument --save-every: must be a whole number of at least 1, got '1.5'"),
    ],
)
def test_a_number_that_is_none_is_named(
    options: list[str], capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    with pytest.raises(SystemExit):
        main([*options, *more])
    assert words in capsys.readouterr().err


def test_help_gives_the_defaults_of_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate-failures", "--help"])
    words = " ".join(capsys.readouterr().out.partition("what is assumed of times:")[2].split())
    given = [float(value) for value in re.findall(r"\(default: ([\d.]+)[);]", words)][: len(fields(Assumptions))]
    scales = {"copy_bytes_per_s": 1e9, "link_bytes_per_s": 1e9, "storage_bytes_per_s": 1e9}
    assert given == [getattr(Assumptions(), field.name) / scales.get(field.name, 1) for field in fields(Assumptions)]
