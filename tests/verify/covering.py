"""Selections of cases that cover: every few choices of different kinds that exist together do so in one of them."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from tests.verify.cases import DEGREES, OTHERS, PIPELINES, Case, every_pipeline

_TRIES = 30  # cases drawn, of which the one is taken that covers most

_KINDS = (*PIPELINES, *OTHERS)
_Choices = tuple[tuple[str, Any], ...]  # (field of Case, choice) pairs, in the order of _KINDS


def covering_cases(strength: int, degrees: Collection[str] = DEGREES) -> list[Case]:
    """A selection in which every `strength` choices of different kinds, and of these degrees, that can run together do so at
    least once.

    Each case is made around choices that no earlier one has together, with the rest drawn at random, always in the same way.
    """
    rng, pipelines = random.Random(0), list(every_pipeline(degrees))
    kinds = PIPELINES | OTHERS | {"degrees": tuple(degrees)}
    having = {
        (kind, choice): [case for case in pipelines if getattr(case, kind) == choice]
        for kind in PIPELINES
        for choice in kinds[kind]
    }
    missing = dict.fromkeys(_all(kinds, strength))
    selection = []
    while missing:
        wanted = dict(next(iter(missing)))
        of_pipeline = [(kind, choice) for kind, choice in wanted.items() if kind in PIPELINES]
        fewest = min((having[choice] for choice in of_pipeline), key=len, default=pipelines)
        fitting = [case for case in fewest if all(getattr(case, kind) == choice for kind, choice in of_pipeline)]
        if not fitting:  # these choices exclude each other
            del missing[tuple(wanted.items())]
            continue
        drawn = [_completed(rng.choice(fitting), wanted, rng) for _ in range(_TRIES)]
        best = max(drawn, key=lambda case: sum(choices in missing for choices in _choices(case, strength)))
        for choices in _choices(best, strength):
            missing.pop(choices, None)
        selection.append(best)
    return selection


def _all(kinds: dict[str, tuple[Any, ...]], strength: int) -> Iterator[_Choices]:
    for some in combinations(kinds, strength):
        for choices in product(*(kinds[kind] for kind in some)):
            yield tuple(zip(some, choices, strict=True))


def _choices(case: Case, strength: int) -> Iterator[_Choices]:
    return combinations(((kind, getattr(case, kind)) for kind in _KINDS), strength)


def _completed(pipeline: Case, wanted: dict[str, Any], rng: random.Random) -> Case:
    return replace(pipeline, **{kind: wanted.get(kind, rng.choice(choices)) for kind, choices in OTHERS.items()})
