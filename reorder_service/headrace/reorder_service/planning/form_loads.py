"""What a batch of samples takes in a unit under each of OrchMLLM's forms, which `search.post_balancing` has a table of."""

from __future__ import annotations

import numpy as np

from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.post_balancing_options import Form, PostBalancing


def bin_loads(form: Form, lengths: Floats, bins: Ints, num_bins: int, quadratic: float = 0.0) -> Floats:
    """Return the (num_bins,) load of each bin as the table in `search.post_balancing` defines it; an empty bin has none.

    quadratic: `lambda` per unit of length; 0 leaves the quadratic term out.
    """
    sums = np.asarray(np.bincount(bins, weights=lengths, minlength=num_bins), np.float64)
    if form == "no_padding":
        return sums
    if form == "third":
        return sums + quadratic * np.bincount(bins, weights=lengths**2, minlength=num_bins)
    counts, longest = np.bincount(bins, minlength=num_bins), np.zeros(num_bins)
    np.maximum.at(longest, bins, lengths)
    padded = counts * longest
    return padded if form == "padded" else sums + quadratic * padded * longest


def lengths_of(costs: Floats, quadratic: float) -> tuple[Floats, float]:
    """Return the (n,) lengths that a unit's form balances, and lambda in their unit: costs, over the mean if lambda is known.

    quadratic: as in `PostBalancing`; the mean is of the samples that cost anything.
    """
    if quadratic == 0 or not costs.any():
        return costs, 0.0
    return costs / costs[costs > 0].mean(), quadratic


def weights_alone(form: Form, costs: Floats, quadratic: float) -> Floats:
    """Return the (n,) load of a batch of each sample alone, so scaled that all together are the sum of the costs.

    What a form adds to the costs is thus how they fall on long and short samples, and what padding adds to that.
    """
    if form in ("no_padding", "padded") or quadratic == 0:
        return costs
    lengths, factor = lengths_of(costs, quadratic)
    alone = lengths + factor * lengths**2
    return alone * (costs.sum() / alone.sum()) if costs.any() else costs


def form_seconds(options: PostBalancing, unit: str, costs: Floats, slots: Ints, num_slots: int) -> Floats:
    """Return the (num_slots,) forward seconds of each microbatch of a unit under its form, with what padding adds.

    costs: (n,) seconds of each sample alone; one without any is in no batch of the unit. slots: (n,) of each sample.
    """
    form = options.forms.get(unit, "no_padding")
    if form == "no_padding" or not costs.any():
        return bin_loads("no_padding", costs, slots, num_slots)
    some = np.flatnonzero(costs)
    lengths, quadratic = lengths_of(costs[some], options.quadratic)
    loads = bin_loads(form, lengths, slots[some], num_slots, quadratic)
    alone = lengths.sum() if form == "padded" else (lengths + quadratic * lengths**2).sum()
    scaled: Floats = loads * (costs.sum() / alone)
    return scaled
