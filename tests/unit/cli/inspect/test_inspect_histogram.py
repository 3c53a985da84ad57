"""Bins, percentiles, and the picture. What the picture looks like is for eyes; here: that it holds what it should."""

from pathlib import Path

import matplotlib.image
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from headrace.cli.costs.survey import COLUMNS, Tally, Values
from headrace.cli.inspect.histogram import MAX_BINS, PERCENTILES, QUANTITIES, bin_edges, draw_histograms, percentiles
from headrace.spec import parse_spec

COUNTS = arrays(np.int64, st.integers(1, 50), elements=st.integers(0, 10**7))
SECONDS = arrays(np.float64, st.integers(1, 50), elements=st.floats(0.03, 600.0))


@given(values=st.one_of(COUNTS, SECONDS))
def test_every_value_falls_into_one_of_a_bounded_number_of_bins(values: Values) -> None:
    edges = bin_edges(values)
    assert (np.diff(edges) > 0).all()
    assert 1 <= len(edges) - 1 <= MAX_BINS
    assert np.histogram(values, bins=edges)[0].sum() == len(values)


@given(values=COUNTS)
def test_every_bin_of_whole_numbers_holds_a_whole_number(values: Values) -> None:
    edges = bin_edges(values)
    assert (np.ceil(edges[:-1]) < edges[1:]).all()
    assert (edges % 1 == 0.5).all(), "no number lies on an edge"


def test_a_few_whole_numbers_get_a_bin_each() -> None:
    assert bin_edges(np.array([2, 5, 3])).tolist() == [1.5, 2.5, 3.5, 4.5, 5.5]
    assert bin_edges(np.array([7, 7])).tolist() == [6.5, 7.5]


@given(values=st.one_of(COUNTS, SECONDS))
def test_percentiles_are_values_that_occur_in_rising_order(values: Values) -> None:
    found = list(percentiles(values).values())
    assert set(found) <= set(values.tolist())
    assert found == sorted(found)
    assert (found[0], found[-1]) == (values.min(), values.max())


def test_percentiles_of_the_first_hundred_numbers_are_their_ranks() -> None:
    expected = {"min": 1, "p10": 10, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert percentiles(np.arange(1, 101)) == expected
    assert list(PERCENTILES) == list(expected)


def colours(picture: np.ndarray) -> set[str]:
    packed = (picture[::2, ::2, :3] * 255).round().astype(int) @ [1 << 16, 1 << 8, 1]
    return {f"#{pixel:06x}" for pixel in np.unique(packed).tolist()}


def draw(out: Path, columns: dict[str, Values], title: str = "data") -> np.ndarray:
    assert draw_histograms(out, columns, {"text": 3, "text+image": 1}, title=title, subtitle="4 samples") == out
    return matplotlib.image.imread(out)


def test_there_is_a_panel_for_each_column_and_none_for_the_others(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns: dict[str, Values] = {name: rng.integers(1, 5000, 200) for name in QUANTITIES}
    columns["audio_s"] = rng.lognormal(1, 1, 200)
    assert {quantity.colour for quantity in QUANTITIES.values()} <= colours(draw(tmp_path / "all.png", columns))
    del columns["audio_s"]
    assert QUANTITIES["audio_s"].colour not in colours(draw(tmp_path / "silent.png", columns))


def test_any_range_of_values_is_drawn(tmp_path: Path) -> None:
    ranges: list[Values] = [np.array([0]), np.array([5] * 9), np.array([0.5]), np.array([0, 10**6]), np.array([1, 10**7])]
    columns = dict(zip(QUANTITIES, ranges, strict=False))
    assert {QUANTITIES[name].colour for name in columns} <= colours(draw(tmp_path / "p.png", columns))


def test_a_path_is_a_title_whatever_it_holds(tmp_path: Path) -> None:
    columns: dict[str, Values] = {"tokens": np.array([1, 2])}
    short, long = (draw(tmp_path / "p.png", columns, title) for title in ("$x_{$", "s3://bucket/" + "folder$/" * 60))
    assert short.shape == long.shape


def test_whatever_is_measured_can_be_drawn() -> None:
    assert tuple(QUANTITIES) == COLUMNS


def test_a_tally_of_nothing_has_no_columns() -> None:
    tally = Tally(parse_spec({"name": "test", "sources": [{"path": "/data"}]}))
    assert tally.columns() == {}
    assert tally.modalities() == {"text": 0, "image": 0, "audio": 0}
