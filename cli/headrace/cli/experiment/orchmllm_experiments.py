"""OrchMLLM's experiments (Zheng et al. 2025, section 8): what balancing every phase gains, and how long it takes.

A step is one batch for each rank. Its phases (vision, audio, LLM) end for all ranks together, since each has collectives; so a
step takes the sum over the phases of the fullest rank's work. The audio encoder pads its recordings to the longest of a batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from headrace.cli.experiment.findings import Findings, Row
from headrace.cli.experiment.orchmllm_samples import SETTINGS, Mixture, draw
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.post_balancing_options import Form
from headrace.reorder_service.planning.search.node_permutation import Traffic, permute_heuristically
from headrace.reorder_service.planning.search.post_balancing import post_balance

LARGE_RANKS, MICRO_RANKS, RANKS_PER_NODE = 2_560, 128, 8
PHASES = ("vision", "audio", "llm")
TAILORED: Mapping[str, Form] = {"vision": "no_padding", "audio": "padded", "llm": "no_padding"}
"""The form of post-balancing that suits each phase's batching (section 8, input preprocessing)."""
TABLE_2 = {64: 16.66, 128: 18.49, 256: 21.32, 512: 24.64, 1024: 31.37, 2560: 53.88}
"""Milliseconds of overhead by GPUs, MLLM-10B with 60 samples a GPU."""
_TABLE_2_SAMPLES = 60
_OVER_NONE = (1.4, 1.9)
_NODE_WISE = (0.436, 0.722)
_BATCHES = 4
_DRAWN = (
    "Lengths are drawn in the manner of the three public data sets, and work is counted operations; exchanges take no time, "
    "and memory is not in it but for the published sizes of batches.",
)


def figure_8() -> Findings:
    """Throughput on 2,560 ranks over the same system without balancing, each with its published batch."""
    rows = []
    for model, setting in SETTINGS.items():
        balanced_s = _step(draw(model, LARGE_RANKS * setting.mini_batch, 0), LARGE_RANKS, TAILORED)
        unbalanced_s = _step(draw(model, LARGE_RANKS * setting.unbalanced, 0), LARGE_RANKS, {})
        gain = (setting.mini_batch / balanced_s) / (setting.unbalanced / unbalanced_s)
        rows.append(
            Row(
                name=f"{model}, {setting.mini_batch} beside {setting.unbalanced} samples a rank",
                ours=gain,
                published=_OVER_NONE,
                unit="x",
                within=0.1 if model != "mllm-84b" else None,
            )
        )
    notes = (
        *_DRAWN,
        "The batches that fit, 80, 60 and 30 beside 65, 40 and 15, are taken as published.",
        "MLLM-84B's 15 samples a rank are so few that one long sample decides; how often there are any is drawn, so its row "
        "claims nothing.",
        "Megatron-LM, over which 3.1 to 4.2 are published, is left out: how its stages are cut is not in the text.",
    )
    return Findings(what="throughput over the same without balancing (figures 8 and 9)", rows=tuple(rows), notes=notes)


def figure_10() -> Findings:
    """What balancing the encoders adds to balancing the LLM alone, which is how balancing before the batches are made works."""
    return _beside("figure 10", {"llm alone": {"llm": "no_padding"}, "none": {}})


def figure_11() -> Findings:
    """One algorithm for both encoders beside one for each."""
    rigid: dict[str, Mapping[str, Form]] = {
        "all as without padding": {**TAILORED, "audio": "no_padding"},
        "all as padded": {**TAILORED, "vision": "padded"},
    }
    return _beside("figure 11", rigid)


def figure_13() -> Findings:
    """The heaviest volume of a rank to other nodes, rearranged by nodes over not, of the traffic from where samples arrive."""
    rows = []
    nodes = np.arange(MICRO_RANKS) // RANKS_PER_NODE
    for model, setting in SETTINGS.items():
        mixture = draw(model, MICRO_RANKS * setting.micro_batch, 0)
        for phase in PHASES:
            lengths: Floats = getattr(mixture, phase)
            batches = post_balance(TAILORED[phase], lengths, MICRO_RANKS)
            traffic = Traffic.of_samples(_arrival(mixture, MICRO_RANKS), batches, lengths, MICRO_RANKS)
            rearranged = permute_heuristically(traffic, RANKS_PER_NODE, 0).rank_of_batch // RANKS_PER_NODE
            share = traffic.leaving(rearranged, RANKS_PER_NODE).max() / traffic.leaving(nodes, RANKS_PER_NODE).max()
            rows.append(Row(name=f"{model}, {phase}", ours=float(share), published=_NODE_WISE))
    notes = (
        *_DRAWN,
        'Published is a reduction "from 0.436 to 0.722": the text does not say whether of what is left or of what is saved.',
        "With samples in random order every batch has its samples from all nodes, and little can be saved; in Headrace raw "
        "inputs do not travel between ranks at all.",
    )
    return Findings(what="heaviest volume to other nodes, rearranged over not", rows=tuple(rows), notes=notes)


def table_2() -> Findings:
    """Time in which all three phases are balanced."""
    rows = []
    for ranks, published in TABLE_2.items():
        mixture = draw("mllm-10b", ranks * _TABLE_2_SAMPLES, 0)
        _balance(mixture, ranks, TAILORED)
        before = time.perf_counter()
        _balance(mixture, ranks, TAILORED)
        seconds = time.perf_counter() - before
        rows.append(Row(name=f"{ranks:,} ranks", ours=1e3 * seconds, published=published, unit="ms"))
    notes = (
        "Ours is computing on one core of this machine, measured once and warm; published is the whole overhead, with "
        "communication, of a forward of about 4 s.",
    )
    return Findings(what="time of balancing", rows=tuple(rows), notes=notes, kind="MEASURED")


def _beside(what: str, others: Mapping[str, Mapping[str, Form]]) -> Findings:
    rows = []
    for model, setting in SETTINGS.items():
        mixtures = [draw(model, MICRO_RANKS * setting.micro_batch, seed) for seed in range(_BATCHES)]
        tailored_s = sum(_step(mixture, MICRO_RANKS, TAILORED) for mixture in mixtures)
        for name, forms in others.items():
            gain = sum(_step(mixture, MICRO_RANKS, forms) for mixture in mixtures) / tailored_s
            rows.append(
                Row(
                    name=f"{model}, over {name}",
                    ours="tailored is faster" if gain > 1 else "tailored is no faster",
                    published="tailored is faster",
                    within=0.0,
                    detail=f"{gain:.2f} x",
                )
            )
    notes = (*_DRAWN, f"The bars of {what} have no numbers in the text, which says which is better.")
    return Findings(what=f"step over that with tailored algorithms, {MICRO_RANKS} ranks", rows=tuple(rows), notes=notes)


def _step(mixture: Mixture, ranks: int, forms: Mapping[str, Form]) -> float:
    """Return the operations of a step's critical ranks. forms: of the phases that are balanced; others keep arrival order."""
    places = _balance(mixture, ranks, forms)
    return sum(float(_load(mixture, phase, places[phase], ranks).max()) for phase in PHASES)


def _balance(mixture: Mixture, ranks: int, forms: Mapping[str, Form]) -> dict[str, Ints]:
    """Return by phase the (n,) rank of each sample."""
    places = dict.fromkeys(PHASES, _arrival(mixture, ranks))
    for phase, form in forms.items():
        lengths: Floats = getattr(mixture, phase)
        has = np.flatnonzero(lengths)  # what a phase has nothing of stays where it is
        places[phase] = places[phase].copy()
        places[phase][has] = post_balance(form, lengths[has], ranks)
    return places


def _arrival(mixture: Mixture, ranks: int) -> Ints:
    return np.arange(mixture.llm.size) % ranks


def _load(mixture: Mixture, phase: str, places: Ints, ranks: int) -> Floats:
    """Return the (ranks,) operations of each rank in a phase; audio is padded to the longest recording of a rank."""
    lengths: Floats = getattr(mixture, phase)
    if phase == "audio":
        longest = np.zeros(ranks)
        np.maximum.at(longest, places, lengths)
        lengths = np.where(lengths > 0, longest[places], 0.0)
    return np.bincount(places, weights=mixture.work(phase, lengths), minlength=ranks).astype(np.float64, copy=False)
