"""What a case has come to, beside a job with which nothing went wrong. Pure: knows no process."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.ledger import LedgerEntry, ledger_sha256
from tests.chaos.processes import Footprint

LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 2e-5
"""Of a parameter: the norm of what differs, beside its own. Other pipelines add in another order, of which Adam makes the most
where gradients are smallest: after 16 steps and 24 changes of pipelines the last layer's query weights differ by 0.8e-5 to
1.6e-5. A step changes them by 4e-2, and one of its samples by a thousandth or more."""
STEPS_WITHIN = 8
"""Steps within which parameters keep to that: the differences of further ones add up like steps at random."""
WARM_GENERATIONS = 4  # after which a node has loaded and cached what it needs
ALLOWED = {"memory_kib": 20 << 10, "num_fds": 8, "num_threads": 4}
"""The memory: of buffers for the largest microbatch so far, which keeps its size."""
HELD = {"memory_kib": 4 << 10, "num_fds": 12, "num_threads": 8}
"""What a wait keeps that was given up in the middle of a message, until gloo's timeout: the message, and the connections and
threads of its generation (`headrace.trainer.recovery.cancellable_wait`)."""
STOOD_STILL_S = 15.0
"""Whoever needs so long has waited for somebody who was gone: that ends after `headrace.trainer.recovery.mesh.MEET_TIMEOUT`."""


@dataclass(slots=True, kw_only=True)
class Trained:
    """A job that has ended."""

    ledger: Sequence[LedgerEntry] = ()
    weights: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    """Of the checkpoint at its end."""
    steps: int = 0
    """In that checkpoint."""
    losses: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Of each step, as the nodes say."""
    evaluated: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Losses of the validation set after so many steps, as the nodes say that have evaluated it to the end."""
    attempts: defaultdict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    """At each step, by node."""
    computed: defaultdict[tuple[str, int], Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    """By node and step: how often it has begun to take each sample forth and back."""
    footprints: defaultdict[str, list[Footprint]] = field(default_factory=lambda: defaultdict(list))
    """Of each node, in every generation that it lived through; of its memory what is in use."""
    abandoned: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Of each node, in the same generations: waits that it has given up and that have not ended yet."""
    struck: set[int] = field(default_factory=set)
    """Numbers of the faults that came."""
    recovery_s: list[float] = field(default_factory=list)
    """From each fault to the next step that any node has applied."""
    errors: list[str] = field(default_factory=list)
    """Of nodes and of the harness."""

    @property
    def repeated(self) -> list[str]:
        """Nodes that have begun a sample of a step more than once, in words."""
        return [
            f"{node} has begun samples of step {step} again"
            for (node, step), samples in self.computed.items()
            if samples and max(samples.values()) > 1
        ]

    @property
    def num_replays(self) -> int:
        """Steps that were begun again, in all."""
        most: Counter[int] = Counter()
        for attempts in self.attempts.values():
            most |= attempts
        return sum(count - 1 for count in most.values())


def judge(expected: Trained, found: Trained, allowed_replays: int, *, is_whole: bool = True) -> list[str]:
    """All that is wrong. `is_whole`: the model that was found should be."""
    wrong = list(found.errors)
    if ledger_sha256(found.ledger) != ledger_sha256(expected.ledger):
        wrong.append(f"the ledger is another one: {_differing(expected.ledger, found.ledger)}")
    wrong += _wrong_losses("step", expected.losses, found.losses)
    wrong += _wrong_losses("the evaluation after", expected.evaluated, found.evaluated)
    if missing := expected.evaluated.keys() - found.evaluated.keys():
        wrong.append(f"there was no evaluation after {sorted(missing)} steps")
    tolerance = WEIGHT_TOLERANCE * math.sqrt(max(1.0, found.steps / STEPS_WITHIN))
    left = {name: weight for name, weight in expected.weights.items() if is_whole or name in found.weights}
    wrong += _wrong_weights(left, found.weights, tolerance)
    if not is_whole and len(found.weights) >= len(expected.weights):
        wrong.append("nothing of the model was lost")
    if found.num_replays > allowed_replays:
        wrong.append(f"{found.num_replays} steps were begun again, {allowed_replays} may be")
    wrong += [f"nobody applied a step for {pause_s:.0f} s" for pause_s in found.recovery_s if pause_s > STOOD_STILL_S]
    wrong += [f"{node} grew: {words}" for node in found.footprints if (words := _growth(found, node))]
    return wrong


def _wrong_losses(what: str, expected: Mapping[int, Sequence[float]], found: Mapping[int, Sequence[float]]) -> Iterable[str]:
    for steps, losses in found.items():
        right = expected.get(steps, [np.nan])[0]
        far = [loss for loss in losses if not abs(loss - right) <= LOSS_TOLERANCE * abs(right)]
        if far:
            yield f"{what} {steps} has losses {far}, not {right}"


def _growth(found: Trained, node: str) -> str:
    """Of a node that has lived long enough to tell. The least of some generations: in others the one before is not gone yet."""
    lived = found.footprints[node]
    if len(lived) < 3 * WARM_GENERATIONS:
        return ""
    num_abandoned = min(found.abandoned[node][-WARM_GENERATIONS:], default=0)
    for name, allowed in ALLOWED.items():
        values = [getattr(footprint, name) for footprint in lived]
        before, after = min(values[WARM_GENERATIONS : 2 * WARM_GENERATIONS]), min(values[-WARM_GENERATIONS:])
        if after > before + allowed + num_abandoned * HELD[name]:
            return f"{name} from {before} to {after} in {len(lived) - 2 * WARM_GENERATIONS} generations"
    return ""


def _differing(expected: Iterable[LedgerEntry], found: Iterable[LedgerEntry]) -> str:
    right = {entry.step: entry.samples for entry in expected}
    got = {entry.step: entry.samples for entry in found}
    return f"steps {sorted(step for step in right.keys() | got.keys() if right.get(step) != got.get(step))}"


def _wrong_weights(
    expected: Mapping[str, npt.NDArray[np.float32]], found: Mapping[str, npt.NDArray[np.float32]], tolerance: float
) -> Iterable[str]:
    if expected.keys() != found.keys():
        yield f"the checkpoint has {len(found)} parameters, not {len(expected)}: {sorted(expected.keys() ^ found.keys())[:3]}"
        return
    errors = {
        name: float(np.linalg.norm(found[name] - right) / np.linalg.norm(right))
        for name, right in expected.items()
        if right.any()
    }
    far = {name: error for name, error in errors.items() if not error <= tolerance}
    if far:
        name = max(far, key=lambda name: far[name])
        yield f"{len(far)} of {len(errors)} parameters differ, {name} by {far[name]:.1e}"
