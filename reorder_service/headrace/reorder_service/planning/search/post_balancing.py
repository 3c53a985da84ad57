"""OrchMLLM's post-balancing forms (section 5.1 and appendix A): spread samples over bins for four kinds of model.

`lengths` are what a form balances: sequence lengths in the paper, or costs if a unit's time is not proportional to length.
A bin's load depends on how the model batches (b samples of lengths l, an attention that costs `lambda` per squared length):

| form       | load of a bin                | algorithm                                                                     |
|------------|------------------------------|-------------------------------------------------------------------------------|
| no_padding | sum l                        | Alg. 1: LPT (`number_partition`), at most 4/3 - 1/(3 bins) times the optimum  |
| padded     | b max l                      | Alg. 2: least bound under which a greedy packing of the rising lengths fits   |
| third      | sum l + lambda sum l^2       | Alg. 4: LPT on sums in steps of a tolerance, then on the sum of squares       |
| fourth     | sum l + lambda b (max l)^2   | Alg. 5: long samples packed together as far as they go, the rest by LPT       |

What the listings leave open, or cannot mean:

* Alg. 2 starts its search from the shortest length, but the bound is at least the longest one, and at most that times
  ceil(n / bins). It returns the packing of its last guess; ours is the packing of the bound found. Lengths are real numbers
  here: the bound is the least floating-point number that fits.
* Alg. 4 compares sums with a tolerance v. That is not transitive, so no heap can use it. We compare floor(sum / v).
* Alg. 5 bounds a batch by its count times its shortest sample, not its longest, to which it is padded. That looks like a
  slip, but it is what keeps long samples with long ones: bounding the longest leaves room that short samples then fill,
  and loads are up to four times higher. The form pays from about lambda * longest = 0.1; below that, LPT is better.
* Alg. 4 and 5 do without lambda. Where it is given, the third form is LPT on l + lambda l^2, as these loads add up, and the
  fourth is whichever of Alg. 5 and LPT has the lower heaviest load.
* Of equally loaded bins, the one with fewer samples is taken, then the lower number. Every form leaves as few bins empty as it
  can, the last ones: a bin that stays empty (if lengths are alike, fewer batches may do) gets the longer half of the fullest
  bin, which makes no bin heavier.
"""

from __future__ import annotations

import numpy as np

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.form_loads import bin_loads
from headrace.reorder_service.planning.post_balancing_options import TOLERANCE, Form
from headrace.reorder_service.planning.search.number_partition import descending, lpt


def post_balance(form: Form, lengths: Floats, num_bins: int, tolerance: float = TOLERANCE, quadratic: float = 0.0) -> Ints:
    """Spread n samples over bins with one of OrchMLLM's post-balancing forms: (n,) bin of each sample.

    lengths: (n,) sequence lengths or costs. tolerance: positive, used by the "third" form only, as a share of the mean sum of a
    bin. quadratic: `lambda` of the objective, per unit of length, or 0 if it is unknown; only the "third" and "fourth" form use
    it. Bins 0 .. min(n, num_bins) - 1 all get samples. O(n log n), the padded form O(n log n + n log bins).
    """
    falling = descending(lengths)
    if form == "no_padding":
        return lpt(lengths, falling, num_bins)
    if form == "third":
        if quadratic > 0:  # loads add up, so that LPT has its guarantee
            return lpt(lengths + quadratic * lengths**2, falling, num_bins)
        return by_sum_then_squares(lengths, falling, num_bins, tolerance * lengths.sum() / num_bins)
    if form == "padded":
        return fill_empty(pack_padded(lengths, falling, num_bins), falling, num_bins)
    balanced = lpt(lengths, falling, num_bins)
    heaviest = np.bincount(balanced, weights=lengths).max(initial=0.0)
    packed = fill_empty(pack_then_lpt(lengths, falling, num_bins, heaviest), falling, num_bins)
    if quadratic > 0:
        return min(packed, balanced, key=lambda bins: float(bin_loads(form, lengths, bins, num_bins, quadratic).max()))
    return packed


@kernel
def try_pack_padded(lengths: Floats, falling: Ints, num_bins: int, bound: float, bins: Ints) -> bool:
    """Fill one bin after the other with rising lengths up to a padded length of `bound`; return whether num_bins bins suffice.

    falling: (n,) positions by falling length. bins: (n,) filled in place with the bin of each sample.
    """
    current, count = 0, 0
    for place in range(falling.size - 1, -1, -1):
        item = falling[place]
        if count > 0 and (count + 1) * lengths[item] > bound:
            current, count = current + 1, 0
            if current == num_bins:
                return False
        bins[item] = current
        count += 1
    return True


@kernel
def fits_padded(rising: Floats, num_bins: int, bound: float) -> bool:
    """Return what `try_pack_padded` does for a bound that no length exceeds, from the lengths in rising order.

    A bin has nearly as many samples as the one before it: O(num_bins) for lengths that are alike.
    """
    start, count = 0, 1
    for _ in range(num_bins):
        count = min(count, rising.size - start)
        while count > 1 and count * rising[start + count - 1] > bound:
            count -= 1
        while start + count < rising.size and (count + 1) * rising[start + count] <= bound:
            count += 1
        start += count
        if start == rising.size:
            return True
    return False


@kernel
def pack_padded(lengths: Floats, falling: Ints, num_bins: int) -> Ints:
    """Pack samples under the least bound on a bin's padded length for which `try_pack_padded` succeeds (Alg. 2): (n,) bins."""
    bins = np.zeros(lengths.size, np.int64)
    if lengths.size == 0:
        return bins
    longest = lengths[falling[0]]
    fits = longest * ((lengths.size + num_bins - 1) // num_bins)
    if try_pack_padded(lengths, falling, num_bins, longest, bins):
        return bins
    too_low, rising = longest, lengths[falling[::-1]]
    middle = too_low + (fits - too_low) / 2
    while too_low < middle < fits:
        if fits_padded(rising, num_bins, middle):
            fits = middle
        else:
            too_low = middle
        middle = too_low + (fits - too_low) / 2
    try_pack_padded(lengths, falling, num_bins, fits, bins)
    return bins


@kernel
def by_sum_then_squares(lengths: Floats, falling: Ints, num_bins: int, step: float) -> Ints:
    """Put each length, in falling order, into the bin with the least (floor(sum / step), sum of squares) (Alg. 4): (n,) bins."""
    bins = np.empty(lengths.size, np.int64)
    sums = np.zeros(num_bins)
    keys, squares = np.zeros(num_bins), np.zeros(num_bins)
    counts, heap = np.zeros(num_bins, np.int64), np.arange(num_bins)
    for item in falling:
        top = heap[0]
        bins[item] = top
        sums[top] += lengths[item]
        squares[top] += lengths[item] * lengths[item]
        keys[top] = np.floor(sums[top] / step) if step > 0 else sums[top]
        counts[top] += 1
        _sink(heap, 0, keys, squares, counts)
    return bins


@kernel
def pack_then_lpt(lengths: Floats, falling: Ints, num_bins: int, bound: float) -> Ints:
    """Pack falling lengths bin by bin, then put each of the rest into the lightest bin (Alg. 5): (n,) bins.

    bound: most that a packed bin's count of samples times its shortest length may be.
    """
    bins = np.empty(lengths.size, np.int64)
    sums, nothing = np.zeros(num_bins), np.zeros(num_bins)
    counts, heap = np.zeros(num_bins, np.int64), np.arange(num_bins)
    current, packing = 0, True
    for item in falling:
        if packing and counts[current] > 0 and (counts[current] + 1) * lengths[item] > bound:
            current += 1
            if current == num_bins:
                packing = False
                for place in range(num_bins // 2 - 1, -1, -1):
                    _sink(heap, place, sums, nothing, counts)
        chosen = current if packing else heap[0]
        bins[item] = chosen
        sums[chosen] += lengths[item]
        counts[chosen] += 1
        if not packing:
            _sink(heap, 0, sums, nothing, counts)
    return bins


@kernel
def fill_empty(bins: Ints, falling: Ints, num_bins: int) -> Ints:
    """Give each empty bin the longer half of the bin with the most samples, as long as there are samples enough: (n,) bins."""
    counts = np.zeros(num_bins, np.int64)
    for item in range(bins.size):
        counts[bins[item]] += 1
    starts = np.cumsum(counts) - counts
    free = starts.copy()
    by_bin = np.empty(bins.size, np.int64)
    for item in falling:
        by_bin[free[bins[item]]] = item
        free[bins[item]] += 1
    filled = bins.copy()
    for empty in range(min(num_bins, bins.size)):
        if counts[empty] == 0:
            fullest = np.argmax(counts)
            half = counts[fullest] // 2
            starts[empty], counts[empty] = starts[fullest], half
            starts[fullest] += half
            counts[fullest] -= half
            for place in range(starts[empty], starts[empty] + half):
                filled[by_bin[place]] = empty
    return filled


@kernel
def _sink(heap: Ints, hole: int, first: Floats, second: Floats, counts: Ints) -> None:
    """Restore the order of a heap of bins at and below `hole`, where the bin may be too heavy for its place."""
    moving = heap[hole]
    while 2 * hole + 1 < heap.size:
        child = 2 * hole + 1
        if child + 1 < heap.size and _precedes(heap[child + 1], heap[child], first, second, counts):
            child += 1
        if not _precedes(heap[child], moving, first, second, counts):
            break
        heap[hole] = heap[child]
        hole = child
    heap[hole] = moving


@kernel
def _precedes(a: int, b: int, first: Floats, second: Floats, counts: Ints) -> bool:
    """Return whether bin a is to be filled before bin b: by least `first`, then `second`, then count, then number."""
    if first[a] != first[b]:
        return bool(first[a] < first[b])
    if second[a] != second[b]:
        return bool(second[a] < second[b])
    if counts[a] != counts[b]:
        return bool(counts[a] < counts[b])
    return a < b
