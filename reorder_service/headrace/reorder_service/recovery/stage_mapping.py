"""GPU-stage mapping (Oobleck, dissertation section 2.4.1.2): the chain of stages that is fastest on so many nodes.

A step of four microbatches a stage takes T = T1 + T2 + T3. With t_j for the forward and backward of stage j of S, and k for the
slowest stage (of equally slow ones the last, whose time is the longest):

    T = sum of all t_j  +  (3 S + k - 1) t_k  +  sum of t_j from k on

Chains of different numbers of stages do different numbers of microbatches in T: the fastest has the least T / S. (The paper
takes the least T, which has few stages of many GPUs even where these gain little.)

Counted stage by stage, with tau = t_k: a stage before k costs t_j + 4 tau, one from k on costs 2 t_j + 3 tau, and tau is taken
off at the end. For a given tau the best chain is a shortest path over (GPUs used, layers placed, slowest stage placed).

Why the search is exact. A chain has a T / S below T* / S*, that of the best one so far, if its S* T - T* S is below 0; that is a
sum over its stages too, with S* for `scale` and T* for `rebate` (Dinkelbach, Management Science 13(7), 1967). Take all chains
whose slowest stage takes a tau from low to high. Such a chain has stages of at most `high`, one of at least `low`, and behind
that one only faster stages than `high`. The shortest path over all chains of which this is true, with `low` for tau, is no longer
than the shortest among them. An interval is dropped where this bound is not below 0; where the path is really as long as the
bound, as always with low = high, the interval is searched again with the better ratio; else it is halved. tau is one of finitely
many sums of layers, and the search begins at the smallest that any chain has.

Seconds are counted in whole quanta, so that sums are exact and equally slow stages equal. Of chains with the same T / S it is the
one found first, which does not depend on the machine.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints

_BITS = 36  # of the sum of all seconds, in quanta: so T, times stages, fits into 63 bits
_NONE = 2**62  # no such chain; also: no bound


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chains:
    """All chains of stages of a model of L layers on nodes of M GPUs."""

    quantum: float
    """Seconds."""
    sums: Ints
    """(M, L + 1) quanta that the layers before each one take on 1 .. M GPUs."""
    ends: Ints
    """(M, L) end of the longest stage that begins with a layer: of one unit, and within the memory of a GPU."""
    bottlenecks: Ints
    """(nodes + 1,) quanta of the slowest stage where it is as fast as can be; `_NONE` where so many nodes have no chain."""
    slowest: Ints
    """Quanta that a slowest stage can take, rising, each once."""

    @classmethod
    def of(cls, seconds: Floats, num_bytes: Ints, unit_ends: Ints, memory: int, max_nodes: int) -> Chains:
        """seconds, num_bytes: (L, M) of a layer on 1 .. M GPUs, the bytes on each of them; memory: of a GPU.
        unit_ends: (L,) end of each layer's unit."""
        _, exponent = math.frexp(float(seconds.max(axis=1).sum()))
        quantum = math.ldexp(1.0, exponent - _BITS)
        sums = _prefix_sums(np.maximum(np.rint(seconds / quantum), 1).astype(np.int64))
        ends = _ends(_prefix_sums(num_bytes), unit_ends, memory)
        return cls(
            quantum=quantum,
            sums=sums,
            ends=ends,
            bottlenecks=_bottlenecks(sums, ends, max_nodes),
            slowest=np.unique(_stage_times(sums, ends)),
        )

    def feasible(self, num_nodes: int) -> bool:
        """Whether some chain uses all GPUs of so many nodes."""
        return bool(self.bottlenecks[num_nodes] < _NONE)

    def fastest(self, num_nodes: int) -> Ints:
        """(S, 3) number of GPUs, first and end layer of each stage of the chain with the least T / S.

        So many nodes are feasible.
        """
        quanta = np.diff(self.sums)
        least = _of_the_rest(quanta.min(axis=0))
        effort = _of_the_rest((quanta * np.arange(1, len(quanta) + 1)[:, None]).min(axis=0))
        most_stages = min(quanta.shape[1], num_nodes * len(quanta))
        low = int(self.bottlenecks[num_nodes])
        best, stages = _shortest(self.sums, self.ends, least, effort, num_nodes, low, low, 1, 0, _NONE)
        intervals = deque([(low, _NONE)])
        while intervals:
            low, high = intervals.popleft()  # the widest: a good chain is found early, and more intervals are dropped
            scale, rebate = len(stages), best
            # T is at least the least of all layers and 3 S slowest stages
            high = min(high, (rebate * most_stages - scale * int(least[0])) // (3 * scale * most_stages))
            first, end = np.searchsorted(self.slowest, low), np.searchsorted(self.slowest, high, side="right")
            if first >= end:
                continue
            low, high = int(self.slowest[first]), int(self.slowest[end - 1])
            bound, found = _shortest(self.sums, self.ends, least, effort, num_nodes, low, high, scale, rebate, 0)
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
        """(S,) of stages as `fastest` returns them."""
        gpus, first, end = stages.T
        quanta: Ints = self.sums[gpus - 1, end] - self.sums[gpus - 1, first]
        return quanta


def iteration_time(stages: Ints | Floats, num_microbatches: int) -> float:
    """T1 + T2 + T3 of stages (S,) whose forward and backward of a microbatch together take so long, in the unit of `stages`.

    The formulas are of a pipeline that its microbatches fill: they are too low for fewer microbatches than stages.
    """
    count = len(stages)
    slowest = count - 1 - int(np.argmax(stages[::-1]))
    return float(stages.sum() + (num_microbatches - count + slowest - 1) * stages[slowest] + stages[slowest:].sum())


def _prefix_sums(of_layers: Ints) -> Ints:
    """(M, L + 1) of (L, M): what the layers before each one have together."""
    num_layers, num_gpus = of_layers.shape
    sums = np.zeros((num_gpus, num_layers + 1), np.int64)
    np.cumsum(of_layers.T, axis=1, out=sums[:, 1:])
    return sums


def _of_the_rest(of_layers: Ints) -> Ints:
    """(L + 1,) what each layer (L,) and those behind it have together."""
    return np.append(np.cumsum(of_layers[::-1])[::-1], 0)


@kernel
def _ends(byte_sums: Ints, unit_ends: Ints, memory: int) -> Ints:
    """See `Chains.ends`; a layer that is too large for so many GPUs is the end of its own stage."""
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
    """Quanta of every stage that there can be."""
    times = np.empty((ends - np.arange(ends.shape[1])).sum(), np.int64)
    count = 0
    for m in range(ends.shape[0]):
        for first in range(ends.shape[1]):
            for end in range(first + 1, ends[m, first] + 1):
                times[count] = sums[m, end] - sums[m, first]
                count += 1
    return times


@kernel
def _bottlenecks(sums: Ints, ends: Ints, max_nodes: int) -> Ints:
    """See `Chains.bottlenecks`: of all numbers of nodes in one pass."""
    gpus_of_node, num_layers = ends.shape
    least = np.full((max_nodes * gpus_of_node + 1, num_layers + 1), _NONE)
    least[0, 0] = 0
    for used in range(max_nodes * gpus_of_node):
        free = gpus_of_node - used % gpus_of_node
        for first in range(num_layers):
            so_far = least[used, first]
            if so_far == _NONE:
                continue
            for m in range(free):
                for end in range(first + 1, ends[m, first] + 1):
                    slowest = max(so_far, sums[m, end] - sums[m, first])
                    if slowest < least[used + m + 1, end]:
                        least[used + m + 1, end] = slowest
    return least[::gpus_of_node, num_layers].copy()


@kernel
def _shortest(
    sums: Ints, ends: Ints, least: Ints, effort: Ints, num_nodes: int, low: int, high: int, scale: int, rebate: int, below: int
) -> tuple[int, Ints]:
    """The shortest path of an interval (see the module), and its stages as `Chains.fastest` returns them.

    Its length is `scale` times what it costs less `rebate` for each stage.
    least: (L + 1,) quanta that each layer and those behind it take at the least; effort: their quanta times GPUs at the least.
    A path that is no shorter than `below` is not found; the length is then `_NONE`.
    """
    gpus_of_node, num_layers = ends.shape
    num_gpus = num_nodes * gpus_of_node
    length = np.full((num_gpus + 1, num_layers + 1, 2), _NONE)
    before = np.empty((num_gpus + 1, num_layers + 1, 2, 3), np.int64)  # GPUs of the last stage, its first layer, phase before it
    length[0, 0, 0] = -scale * low
    of_each = 3 * scale * low - rebate  # what any stage costs besides its own time
    for used in range(num_gpus):
        free = gpus_of_node - used % gpus_of_node
        nodes = num_nodes - used // gpus_of_node  # each has at least one of the stages to come
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
