"""`headrace bench`: it measures the real parts, and says in words what holds them up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from headrace.cli.bench import bench_preprocess, bench_transport
from headrace.cli.bench.bench import preprocess_verdict, transport_verdict
from headrace.cli.bench.bench_preprocess import Stage
from headrace.cli.bench.bench_services import with_equal_trainers
from headrace.cli.bench.bench_transport import MIB, Rate
from headrace.cli.main import main
from headrace.transport.base import TRANSPORTS

IMAGES = Stage(name="images", cpu_s_per_sample=0.006, amount=0.3, unit="megapixels")
READ = Stage(name="read", cpu_s_per_sample=0.002, amount=0.1, unit="MB")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_preprocess, "REPEAT_S", 0.0)
    monkeypatch.setattr(bench_transport, "SIZES", (MIB // 4, MIB))
    monkeypatch.setattr(bench_transport, "FETCHES", 2)


def test_every_stage_of_a_data_set_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "preprocess", "--limit", "20", "--threads", "2", "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_samples"] == 20
    assert [stage["name"] for stage in report["stages"]][:2] == ["read", "headers, tokens"]
    *measured, rest = report["stages"]
    assert all(stage["cpu_s_per_sample"] > 0 and stage["amount"] > 0 for stage in measured)
    assert rest["name"] == "the rest"
    assert rest["cpu_s_per_sample"] >= 0  # a difference of measurements: none where noise is larger than it
    assert set(report["samples_per_s"]) == {"1", "2"}


def test_the_sources_of_a_job_are_measured_in_turn_as_the_job_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"title": "A film."}\n' * 9)
    (tmp_path / "b.jsonl").write_text('{"caption": "A barn."}\n' * 2)
    sources = [{"path": str(tmp_path / "a.jsonl"), "mapping": {"text": "title"}}, {"path": str(tmp_path / "b.jsonl")}]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"name": "two", "sources": sources}))
    options = ["--spec", str(tmp_path / "job.yaml"), "--limit", "6", "--threads", "1", "--format", "json"]
    assert main(["bench", "preprocess", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_samples"], report["num_refused"]) == (6, 0)
    assert main(["bench", "preprocess", *options, "--mapping", "text=caption"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_samples"], report["num_refused"]) == (2, 4), "four of the first source, both of the second"


def test_a_data_set_without_samples_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "preprocess", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["preprocess", "--limit", "0"],
        ["preprocess", "--threads", "0"],
        ["transport", "--rounds", "0"],
        ["services", "--steps", "0"],
        ["services", "--threads", "0"],
        ["services", "--global-batch", "0"],
    ],
)
def test_numbers_below_one_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert "at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("topology", "global_batch", "equal"),
    [
        ({"replicas": 1, "microbatches": 8, "stages": {"encoder": 1, "llm": 1}}, 16, (2, 4)),
        ({"replicas": 2, "microbatches": 3, "stages": {"vision": 1, "llm": 4}}, 64, (10, 1)),
        ({"replicas": 64, "microbatches": 2, "stages": {"llm": 1}}, 512, (16, 8)),
        ({"replicas": 2, "microbatches": 1, "stages": {"vision": 1, "llm": 1}}, 3, (3, 1)),
    ],
)
def test_services_are_measured_with_a_loader_for_each_trainer(
    topology: dict[str, object], global_batch: int, equal: tuple[int, int]
) -> None:
    job = with_equal_trainers({"global_batch": global_batch, "topology": topology, "execution": {"schedule": "eager"}})
    assert (job["topology"]["replicas"], job["topology"]["microbatches"]) == equal
    assert job["topology"]["stages"] == topology["stages"]
    assert "execution" not in job


def test_the_slowest_stage_is_named_the_bottleneck() -> None:
    figures = bench_preprocess.PreprocessFigures(
        num_samples=10, num_refused=1, stages=(READ, IMAGES), samples_per_s={1: 120.0, 2: 216.0}
    )
    verdict = preprocess_verdict(figures)
    assert "images: 75%" in verdict
    assert "216 on 2 (1.80 x)" in verdict
    assert IMAGES.rate == pytest.approx(50)


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True])
def test_transports_are_measured_between_two_processes(encrypted: bool) -> None:
    figures = bench_transport.measure(rounds=1, encrypted=encrypted)
    assert set(figures.rates) | set(figures.impossible) == set(TRANSPORTS)
    for rates in (figures.raw, *figures.rates.values(), *figures.single.values()):
        assert all(rate.bytes_per_s > 0 for rate in rates.values())
    for rates in (figures.raw, figures.rates["flight"]):
        assert all(rate.cpu_s_per_gb > 0 and rate.sender_cpu_s_per_gb > 0 for rate in rates.values())
    assert set(figures.hand_off_s) <= set(figures.write_s) == {MIB // 4, MIB}


def test_a_network_transport_far_below_a_raw_socket_is_itself_the_bottleneck() -> None:
    figures = bench_transport.TransportFigures(
        raw={MIB: Rate(bytes_per_s=4e9, cpu_s_per_gb=0.2, sender_cpu_s_per_gb=0.2)},
        rates={"flight": {MIB: Rate(bytes_per_s=1e9, cpu_s_per_gb=0.5, sender_cpu_s_per_gb=0.5)}},
        single={},
        hand_off_s={},
        write_s={MIB: 1e-4},
        memcpy_s={MIB: 1e-4},
        impossible={"shared_memory": "the preprocessor has no shared memory"},
    )
    assert "0.25 of a raw socket; the bottleneck is flight itself" in transport_verdict(figures)
