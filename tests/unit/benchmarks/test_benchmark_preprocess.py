"""What the preprocessing benchmark measures with: rates on a shared machine, readings, the common workload, the peers' names."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path

import pytest

from benchmarks.peers import DATALOADER, PEERS
from benchmarks.preprocess import delivery
from benchmarks.preprocess.meter import Meter, Reading, idle_s, memory_bytes, tree_cpu_s
from benchmarks.preprocess.workload import SampleDecoder, collate, job_spec, touch, write_photos, write_spread
from headrace.preprocessor import image
from headrace.preprocessor.sources import list_shards, open_shard

ALONE = Reading(
    samples=300, seconds=2.0, main_cpu_s=0.5, tree_cpu_s=2.5, watched_cpu_s=[0.5], idle_s=[0.25, 0.75], waits_s=[0.0, 0.125]
)
"""Two cores for two seconds: three of work, one of waiting."""


def test_on_a_machine_of_its_own_the_rate_is_the_plain_one() -> None:
    assert ALONE.taken == 0
    assert ALONE.rate == 300 / 2.0


def test_what_others_took_counts_as_if_it_had_not_been_there() -> None:
    slowed = dataclasses.replace(ALONE, seconds=4.0)  # two cores for four seconds, and the same work and waiting
    assert slowed.taken == 0.5
    assert slowed.rate == ALONE.rate


def test_of_a_core_counts_what_ours_used_of_it_and_what_nobody_did() -> None:
    assert ALONE.rate_on([0], cpu_s=1.75) == 300 / 2.0
    assert ALONE.rate_on([1], cpu_s=1.25) == 300 / 2.0


def test_a_reading_is_found_among_what_else_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print("a library says hello")
    ALONE.print()
    print("and good bye")
    assert Reading.parse(capsys.readouterr().out) == ALONE


def test_who_printed_no_reading_is_quoted() -> None:
    with pytest.raises(ValueError, match="no reading, but: 'only words'"):
        Reading.parse("only words\n")


def test_the_first_samples_are_not_counted() -> None:
    meter = Meter(skip_samples=20, seconds=0.0, watched=[os.getpid()])
    assert meter.add(16)
    assert not meter.counting
    assert meter.add(16)
    assert meter.counting
    assert not meter.add(16)
    reading = meter.reading([0.25])
    assert reading.samples == 16
    assert reading.waits_s == [0.25]
    assert len(reading.watched_cpu_s) == 1
    assert len(reading.idle_s) == os.cpu_count()


def test_data_that_end_too_early_are_no_reading() -> None:
    meter = Meter(skip_samples=20, seconds=1.0)
    meter.add(16)
    with pytest.raises(ValueError, match="ended after 16 samples"):
        meter.reading()


def test_the_machine_tells_of_its_processes_and_cores() -> None:
    resident, shared = memory_bytes(os.getpid())
    assert resident > shared >= 0
    assert tree_cpu_s(os.getpid()) > 0
    assert len(idle_s()) == os.cpu_count()


def test_preprocessors_on_ray_are_measured_against_plain_ones_of_the_same_round_and_are_no_peer() -> None:
    faster = dataclasses.replace(ALONE, samples=600)
    readings = {delivery.BARE: [faster] * 2, delivery.OURS: [ALONE, faster], delivery.ON_RAY: [faster, faster]}
    rows = {row.name: row for row in delivery.rates(readings, {}, rounds=2).rows}
    row = rows["Headrace on Ray over Headrace, its preprocessors plain processes"]
    assert (row.value, row.detail.partition(";")[0]) == (1.5, "rounds: 2.00, 1.00")
    assert not [name for name in rows if "best peer" in name]


def test_where_ray_cannot_be_installed_a_row_says_why() -> None:
    readings = {delivery.BARE: [ALONE], delivery.OURS: [ALONE]}
    rows = delivery.rates(readings, {delivery.ON_RAY: "No matching distribution found for ray"}, rounds=1).rows
    assert [(row.name, row.detail) for row in rows if "Ray" in row.name] == [
        ("Headrace on Ray: not measured", "No matching distribution found for ray")
    ]


def test_the_shards_are_a_data_set_whose_samples_the_peers_decode_alike(tmp_path: Path) -> None:
    paths = write_photos(tmp_path / "photos", num_samples=5, num_shards=2)
    spec = job_spec(tmp_path / "photos")
    shards = [open_shard(info.url, spec.sources[0]) for info in list_shards(spec)]
    assert len(paths) == len(shards) == 2
    assert [shard.num_rows for shard in shards] == [2, 3]
    record = shards[1].read(0)
    row = SampleDecoder()(record.load("jpg"), record.fields["txt"])
    expected, grid = image.decode(record.load("jpg"), spec.image)
    assert (row.patches == expected).all()
    assert row.image_grids.tolist() == [[1, grid.height, grid.width]]
    batch = collate([row, row])
    assert batch["patches"].shape == (2 * grid.patches, 588)
    assert batch["lengths"].tolist() == [len(row.input_ids)] * 2
    assert len(batch["input_ids"]) == len(batch["labels"]) == 2 * len(row.input_ids)
    assert touch(batch["patches"]) == int(batch["patches"].reshape(-1)[::4096].long().sum())


def test_the_spread_of_sizes_is_what_was_asked_for(tmp_path: Path) -> None:
    write_spread(tmp_path / "spread", num_samples=200, num_shards=1, smallest=8_000, spread=20)
    spec = job_spec(tmp_path / "spread")
    (info,) = list_shards(spec)
    with open_shard(info.url, spec.sources[0]) as shard:
        sizes = [image.read_size(shard.read(row).load("jpg"), spec.image) for row in range(shard.num_rows)]
    pixels = [width * height for width, height in sizes]
    assert len(pixels) == 200
    assert max(pixels) / min(pixels) == pytest.approx(20, rel=0.05)


def test_every_peer_has_a_module_and_an_environment_of_its_own() -> None:
    assert len({peer.module for peer in PEERS}) == len({peer.title for peer in PEERS}) == len(PEERS)
    assert DATALOADER in {peer.title for peer in PEERS}
    assert all(importlib.util.find_spec(f"benchmarks.peers.{peer.module}") for peer in PEERS)
    assert all(peer.requirements for peer in PEERS)
