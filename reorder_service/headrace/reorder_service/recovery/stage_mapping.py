"""Find the fastest chain of stages on a number of nodes: GPU-stage mapping (Oobleck, dissertation section 2.4.1.2).

A step with four microbatches per stage takes T = T1 + T2 + T3. With t_j for the forward and backward of stage j of S, and k for
the slowest stage, counted from 0 (the last of equally slow ones, for which T is the longest):

    T = sum of all t_j  +  (3 S + k - 1) t_k  +  sum of t_j from k on

Chains with different numbers of stages process different numbers of microbatches in T, so the fastest has the least T / S. (The
paper minimises T, which leads to few stages of many GPUs even where these gain little.)

Counted stage by stage, with tau = t_k: a stage before k costs t_j + 4 tau, one from k on costs 2 t_j + 3 tau, and tau is
subtracted at the end. For a given tau the best chain is a shortest path over (GPUs used, layers placed, slowest stage placed).

Why the search is exact. A chain has a T / S below T* / S*, that of the best chain so far, if S* T - T* S is below 0. That is a
sum over its stages too, with S* for `scale` and T* for `rebate` (Dinkelbach, Management Science 13(7), 1967). Consider all chains
whose slowest stage takes a tau from low to high. Their stages take at most `high`, at least one takes `low` or more, and all
stages after that one are faster than `high`. The shortest path over all chains with these properties, with `low` for tau, is no
longer than the shortest among the chains considered. An interval is dropped if this bound is not below 0. If the path really is
as long as the bound, as always with low = high, the interval is searched again with the better ratio; otherwise it is halved. tau
is one of finitely many sums of layers, and the search begins at the smallest tau of any chain.

Seconds are counted in whole quanta, so that sums are exact and equally slow stages compare equal. Of chains with the same T / S,
the first one found is returned, which does not depend on the machine.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints

_BITS = 36  # of the sum of all seconds, in quanta, so that T times the number of stages fits into 63 bits
_NONE = 2**62  # length of a chain that does not exist; also: no bound


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chains:
    """The possible chains of stages of a model of L layers on nodes of several GPUs, up to M of which may share a stage."""

    quantum: float
    """Seconds in a quantum, the unit of all times here."""
    sums: Ints
    """(M, L + 1) quanta that all layers before a given one take on 1 .. M GPUs."""
    ends: Ints
    """(M, L) end of the longest stage on 1 .. M GPUs that begins with a given layer and stays within one unit and GPU memory."""
    bottlenecks: Ints
    """(nodes + 1,) quanta of the slowest stage in the chain where it is fastest; `_NONE` if no chain uses that many nodes."""
    slowest: Ints
    """Quanta that a slowest stage can take, in rising order, each once."""
    gpus_per_node: int

    @classmethod
    def of(cls, seconds: Floats, num_bytes: Ints, unit_ends: Ints, memory: int, max_nodes: int, gpus_per_node: int = 0) -> Chains:
        """Find the chains of a model.

        seconds, num_bytes: (L, M) time of a layer on 1 .. M GPUs, and its bytes on each of them. memory: bytes of a GPU.
        unit_ends: (L,) end of each layer's unit. gpus_per_node: at least M; 0: M.
        """
        gpus_per_node = gpus_per_node or seconds.shape[1]
        _, exponent = math.frexp(float(seconds.max(axis=1).sum()))
        quantum = math.ldexp(1.0, exponent - _BITS)
        sums = _prefix_sums(np.maximum(np.rint(seconds / quantum), 1).astype(np.int64))
        ends = _ends(_prefix_sums(num_bytes), unit_ends, memory)
        return cls(
            quantum=quantum,
            sums=sums,
            ends=ends,
            bottlenecks=_bottlenecks(sums, ends, max_nodes, gpus_per_node),
            slowest=np.unique(_stage_times(sums, ends)),
            gpus_per_node=gpus_per_node,
        )

    def feasible(self, num_nodes: int) -> bool:
        """Whether some chain uses all GPUs of `num_nodes` nodes."""
        return bool(self.bottlenecks[num_nodes] < _NONE)

    def fastest(self, num_nodes: int) -> Ints:
        """Return (S, 3) number of GPUs, first layer and end layer of each stage in the chain with the least T / S.

        `num_nodes` must be feasible.
        """
        quanta = np.diff(self.sums)
        least = _of_the_rest(quanta.min(axis=0))
        effort = _of_the_rest((quanta * np.arange(1, len(quanta) + 1)[:, None]).min(axis=0))
        num_gpus = num_nodes * self.gpus_per_node
        most_stages = min(quanta.shape[1], num_gpus)
        low = int(self.bottlenecks[num_nodes])
        best, stages = _shortest(self.sums, self.ends, least, effort, num_nodes, num_gpus, low, low, 1, 0, _NONE)
        intervals = deque([(low, _NONE)])
        while intervals:
            low, high = intervals.popleft()  # the widest first: a good chain is found early, and more intervals are dropped
            scale, rebate = len(stages), best
            # T is at least the least time of all layers plus 3 S slowest stages
            high = min(high, (rebate * most_stages - scale * int(least[0])) // (3 * scale * most_stages))
            first, end = np.searchsorted(self.slowest, low), np.searchsorted(self.slowest, high, side="right")
            if first >= end:
                continue
            low, high = int(self.slowest[first]), int(self.slowest[end - 1])
            bound, found = _shortest(self.sums, self.ends, least, effort, num_nodes, num_gpus, low, high, scale, rebate, 0)
            if bound >= 0:
                continue
            total = int(iteration_time(self.stage_quanta(found), 4 * len(found)))
            value = scale * total - rebate * len(found)
            if value < 0:
                best, stages = total, found
            if bound < value:
                middle = int(self.slowest[(first + end - 1) // 2])
                intervals += [(low, middle), (middle + 1, high)]
            else:
                intervals.append((low, high))  # again, with the better ratio
        return stages

    def stage_quanta(self, stages: Ints) -> Ints:
        """(S,) quanta of stages given as `fastest` returns them."""
        gpus, first, end = stages.T
        quanta: Ints = self.sums[gpus - 1, end] - self.sums[gpus - 1, first]
        return quanta


def iteration_time(stages: Ints | Floats, num_microbatches: int) -> float:
    """Time of a step, T1 + T2 + T3, in the unit of `stages`: (S,) forward plus backward of one microbatch in each stage.

    The formula is for a pipeline that its microbatches fill: it is too low for fewer microbatches than stages.
    """
    count = len(stages)
    slowest = count - 1 - int(np.argmax(stages[::-1]))
    return float(stages.sum() + (num_microbatches - count + slowest - 1) * stages[slowest] + stages[slowest:].sum())


def _prefix_sums(of_layers: Ints) -> Ints:
    """Return (M, L + 1) sums over all layers before each one, from (L, M) values of layers."""
    num_layers, num_gpus = of_layers.shape
    sums = np.zeros((num_gpus, num_layers + 1), np.int64)
    np.cumsum(of_layers.T, axis=1, out=sums[:, 1:])
    return sums


def _of_the_rest(of_layers: Ints) -> Ints:
    """Return (L + 1,) sums over each layer and all after it, from (L,) values of layers."""
    return np.append(np.cumsum(of_layers[::-1])[::-1], 0)


@kernel
def _ends(byte_sums: Ints, unit_ends: Ints, memory: int) -> Ints:
    """Compute `Chains.ends`; a layer that is too large for so many GPUs is the end of its own stage."""
    num_gpus, num_layers = byte_sums.shape[0], unit_ends.size
    ends = np.empty((num_gpus, num_layers), np.int64)
    for m in range(num_gpus):
        end = 0
        for first in range(num_layers):
            end = max(end, first)
            while end < unit_ends[first] and byte_sums[m, end + 1] - byte_sums[m, first] <= memory:
                end += 1
            ends[m, first] = end
    return ends


@kernel
def _stage_times(sums: Ints, ends: Ints) -> Ints:
    """Return the quanta of every possible stage."""
    times = np.empty((ends - np.arange(ends.shape[1])).sum(), np.int64)
    count = 0
    for m in range(ends.shape[0]):
        for first in range(ends.shape[1]):
            for end in range(first + 1, ends[m, first] + 1):
                times[count] = sums[m, end] - sums[m, first]
                count += 1
    return times


@kernel
def _bottlenecks(sums: Ints, ends: Ints, max_nodes: int, gpus_per_node: int) -> Ints:
    """Compute `Chains.bottlenecks`, for all numbers of nodes in one pass."""
    most_gpus, num_layers = ends.shape
    least = np.full((max_nodes * gpus_per_node + 1, num_layers + 1), _NONE)
    least[0, 0] = 0
    for used in range(max_nodes * gpus_per_node):
        free = min(most_gpus, gpus_per_node - used % gpus_per_node)
        for first in range(num_layers):
            so_far = least[used, first]
            if so_far == _NONE:
                continue
            for m in range(free):
                for end in range(first + 1, ends[m, first] + 1):
                    slowest = max(so_far, sums[m, end] - sums[m, first])
                    if slowest < least[used + m + 1, end]:
                        least[used + m + 1, end] = slowest
    return least[::gpus_per_node, num_layers].copy()


@kernel
def _shortest(
    sums: Ints,
    ends: Ints,
    least: Ints,
    effort: Ints,
    num_nodes: int,
    num_gpus: int,
    low: int,
    high: int,
    scale: int,
    rebate: int,
    below: int,
) -> tuple[int, Ints]:
    """Return the length of the shortest path of an interval of tau (see the module), and its stages like `Chains.fastest`.

    The length is `scale` times the path's cost, less `rebate` for each stage.
    least: (L + 1,) least quanta of each layer and those after it together; effort: the same for their quanta times GPUs.
    A path that is no shorter than `below` is not found; the length is then `_NONE`.
    """
    most_gpus, num_layers = ends.shape
    gpus_per_node = num_gpus // num_nodes
    length = np.full((num_gpus + 1, num_layers + 1, 2), _NONE)
    before = np.empty((num_gpus + 1, num_layers + 1, 2, 3), np.int64)  # GPUs of the last stage, its first layer, phase before it
    length[0, 0, 0] = -scale * low
    of_each = 3 * scale * low - rebate  # what any stage costs besides its own time
    for used in range(num_gpus):
        free = min(most_gpus, gpus_per_node - used % gpus_per_node)
        nodes = num_nodes - used // gpus_per_node  # each of these nodes has at least one of the remaining stages
        for first in range(num_layers - nodes + 1):
            if effort[first] > (num_gpus - used) * high:
                continue
            of_rest = of_each * (nodes if of_each > 0 else min(num_gpus - used, num_layers - first))
            for phase in range(2):
                so_far = length[used, first, phase]
                if so_far == _NONE or so_far + scale * (1 + phase) * least[first] + of_rest >= below:
                    continue
                for m in range(free):
                    for end in range(first + 1, ends[m, first] + 1):
                        time = sums[m, end] - sums[m, first]
                        if time > high:
                            break
                        early, late = so_far + scale * (time + low) + of_each, so_far + scale * 2 * time + of_each
                        if phase == 0 and early < length[used + m + 1, end, 0]:
                            length[used + m + 1, end, 0] = early
                            before[used + m + 1, end, 0] = m + 1, first, 0
                        if (time < high if phase == 1 else time >= low) and late < length[used + m + 1, end, 1]:
                            length[used + m + 1, end, 1] = late
                            before[used + m + 1, end, 1] = m + 1, first, phase
    total = int(length[num_gpus, num_layers, 1])
    if total >= below:
        return _NONE, np.empty((0, 3), np.int64)
    stages = np.empty((num_layers, 3), np.int64)
    count, used, end, phase = 0, num_gpus, num_layers, 1
    while used > 0:
        gpus, first, phase_before = before[used, end, phase]
        count += 1
        stages[num_layers - count] = gpus, first, end
        used, end, phase = used - gpus, first, phase_before
    return total, stages[num_layers - count :].copy()
