"""Which source gives the sample at each place of a job, by weights that may change on the way.

The sources interleave evenly: sample k of a source with share p is due at time (k + 1/2) / p, and samples are taken in the
order in which they are due. Where the weights change, time starts at 0 again, and every source continues after the samples that
it has given. A source that may give only so many samples has a weight of 0 from its last one on. All of it allows random access,
so a resumed job computes nothing twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Weights = Sequence[float]

_ENDLESS = np.iinfo(np.int64).max
_NO_LIMITS: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True)
class _Span:
    """The places from `first` on up to the next span, which have the same weights."""

    first: int
    shares: npt.NDArray[np.float64]
    given: npt.NDArray[np.int64]
    """(number of sources,) samples that each source has given before `first`."""


class Mixture:
    """The interleaving of sources by their weights: maps each place to a source and a position in it."""

    def __init__(
        self, weights: Weights, changes: Sequence[tuple[int, Weights]] = (), most: Mapping[int, int] = _NO_LIMITS
    ) -> None:
        """`changes`: (place, weights from there on) each, by ascending place. `most`: source -> samples that it gives in all.

        Raises ValueError where the weights or the order of the changes are invalid.
        """
        self._most = np.full(len(weights), _ENDLESS)
        self._most[list(most)] = list(most.values())
        self._spans = [_Span(0, np.zeros(len(weights)), np.zeros(len(weights), np.int64))]
        self._weigh(0, weights)
        for place, (first, later) in enumerate(changes):
            before = changes[place - 1][0] if place else 0
            if first < before or len(later) != len(weights):
                raise ValueError(f"weights from place {first} on must follow those from {before} on, one for each source")
            self._end_sources(first)
            self._weigh(first, later)
        self._end_sources(None)

    def _weigh(self, first: int, weights: Weights) -> None:
        """Begin a span with other weights, in which sources that have given all of their samples have none."""
        given = self.given(first)
        if self._spans[-1].first == first:
            self._spans.pop()
        shares = _shares(weights)
        if (is_over := given >= self._most).any():
            left = np.where(is_over, 0.0, shares)
            shares = _shares(left.tolist()) if left.any() else left
        self._spans.append(_Span(first, shares, given))

    def _end_sources(self, stop: int | None) -> None:
        """Begin a span wherever a source gives its last sample before the place `stop`; None: at any place."""
        while True:
            span = self._spans[-1]
            ending = np.flatnonzero((span.shares > 0) & (self._most < _ENDLESS))
            if not len(ending):
                return
            last = self._most[ending] - span.given[ending] - 1
            first = int(np.lexsort((last, ending, (last + 0.5) / span.shares[ending]))[0])  # as samples are due
            place = self.place(int(ending[first]), int(self._most[ending[first]]) - 1)
            assert place is not None, "the source has a weight in this span"
            if stop is not None and place + 1 >= stop:
                return
            self._weigh(place + 1, span.shares.tolist())

    def positions(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """(n, 2) source, and position in the source, of each of the n places start .. stop - 1."""
        found = [np.empty((0, 2), np.int64)]
        while start < stop:
            number = bisect_right(self._spans, start, key=lambda span: span.first) - 1
            span = self._spans[number]
            assert span.shares.any(), "the mixture has no place behind the last sample of its last source"
            end = min(stop, self._spans[number + 1].first) if number + 1 < len(self._spans) else stop
            within = _interleaved(span.shares, start - span.first, end - span.first)
            within[:, 1] += span.given[within[:, 0]]
            found.append(within)
            start = end
        return np.concatenate(found)

    def given(self, place: int) -> npt.NDArray[np.int64]:
        """Return how many samples of each source stand before a place."""
        span = self._spans[bisect_right(self._spans, place, key=lambda span: span.first) - 1]
        return span.given + _counts(span.shares, place - span.first)

    def shares(self, place: int) -> npt.NDArray[np.float64]:
        """Return the share of each source in the samples from a place on: (number of sources,); all 0 behind the last place."""
        return self._spans[bisect_right(self._spans, place, key=lambda span: span.first) - 1].shares

    def is_endless(self, source: int) -> bool:
        """Return whether a source goes on giving samples for ever: it has a weight after the last change."""
        return bool(self._spans[-1].shares[source])

    def place(self, source: int, position: int) -> int | None:
        """Return the place of a source's sample; None where the source's weight becomes 0 before its turn."""
        number = bisect_right([int(span.given[source]) for span in self._spans], position) - 1
        span = self._spans[number]
        share = span.shares[source]
        if share == 0:
            return None
        position -= int(span.given[source])
        due = int((position + 0.5) / share)
        start = max(0, due - len(span.shares) - 1)
        within = _interleaved(span.shares, start, due + len(span.shares) + 2)
        return span.first + start + int(np.flatnonzero((within == (source, position)).all(axis=1))[0])


def _shares(weights: Weights) -> npt.NDArray[np.float64]:
    array = np.array(weights, np.float64)
    if not np.isfinite(array).all() or (array < 0).any() or not array.any():
        raise ValueError(f"weights must be numbers of 0 or more, and one of them more than 0, got {list(weights)}")
    shares: npt.NDArray[np.float64] = array / array.sum()
    return shares


def _interleaved(shares: npt.NDArray[np.float64], start: int, stop: int) -> npt.NDArray[np.int64]:
    """(n, 2) source and position of the places start .. stop - 1, where all sources begin at place 0."""
    first, due = _due(shares, start, stop)
    skip = start - int(first.sum())
    return due[skip : skip + stop - start]


def _counts(shares: npt.NDArray[np.float64], length: int) -> npt.NDArray[np.int64]:
    """Return how many samples of each source stand at the first `length` places."""
    if not shares.any():
        return np.zeros(len(shares), np.int64)
    if len(shares) == 1:
        return np.array([length])
    first, due = _due(shares, length, length)
    return first + np.bincount(due[: length - int(first.sum()), 0], minlength=len(first))


def _due(shares: npt.NDArray[np.float64], start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first position of each source to look at, and (n, 2) source and position from there on, as they are due.

    When the sample at place g is due, a source of share p has given p * t samples, rounded, at a time t that is at most half the
    number n of sources from g, as n roundings add up to that. So it has given p * g samples, give or take 1/2 + p * n / 2, and
    merging the samples due around there, 2 n or so, finds the exact counts without walking from place 0.
    """
    margins = np.ceil(shares * (len(shares) / 2)).astype(np.int64) + 2
    first = np.maximum(0, np.floor(shares * start).astype(np.int64) - margins)
    giving = np.flatnonzero(shares)
    lengths = (shares[giving] * stop).astype(np.int64) + margins[giving] + 1 - first[giving]
    source = np.repeat(giving, lengths)
    position = np.arange(len(source)) + np.repeat(first[giving] - (np.cumsum(lengths) - lengths), lengths)
    order = np.lexsort((position, source, (position + 0.5) / shares[source]))
    return first, np.stack((source, position), axis=1)[order]
