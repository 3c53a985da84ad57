"""What is compared: every combination of schedule, planning, units, parallelism, frozen parts and numerics that the trainer
takes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from headrace.execution_spec import COLOCATED, NESTED
from headrace.plan import LLM
from headrace.schedule import ZERO_BUBBLE
from headrace.spec import STRATEGIES
from headrace.trainer.pipeline.topology import ENCODER

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "eager": {"schedule": "eager", "in_flight": 4},
    "zero-bubble": {"schedule": "zero-bubble"},
}
UNITS = (
    ("vision", "llm"),
    ("vision", "audio", "llm"),
    ("encoder", "llm"),
    ("vision", "llm", "generator"),
    ("vision", "audio", "llm", "generator"),
)
"""In pipeline order; `encoder` has both encoders, whole."""
DEGREES: dict[str, dict[str, dict[str, Any]]] = {
    "one stage each": {},
    "llm in 2": {"llm": {"pp": 2}, "generator": {"tp": 2}},
    "llm in 3": {"llm": {"pp": 3}, "generator": {"pp": 2}},
    "encoder in 2": {"encoder": {"pp": 2}, "llm": {"pp": 2}, "generator": {"pp": 2}},
    "2 replicas": {"encoder": {"dp": 2}, "llm": {"dp": 2, "pp": 2}},
    "2 to 3": {"encoder": {"dp": 2}, "llm": {"dp": 3}, "generator": {"dp": 2}},
    "3 to 2": {"encoder": {"dp": 3}, "llm": {"dp": 2}, "generator": {"dp": 2}},
    "2 replicas each": {"encoder": {"dp": 2}, "llm": {"dp": 2}, "generator": {"dp": 2}},
    "4 to 2": {"encoder": {"dp": 4}, "llm": {"dp": 2}},
    "2 to 4": {"encoder": {"dp": 2}, "llm": {"dp": 4}},
    "1 to 2": {"llm": {"dp": 2}, "generator": {"dp": 3}},
    "tp 1 to 2": {"llm": {"tp": 2}},
    "tp 2 to 1, 2 replicas": {"encoder": {"dp": 2, "tp": 2}, "llm": {"dp": 2}},
    "tp 2, llm in 2": {"encoder": {"tp": 2}, "llm": {"tp": 2, "pp": 2}},
    "tp 2 in pieces": {"encoder": {"tp": 2, "tp_overlap": 2}, "llm": {"tp": 2, "pp": 2, "tp_overlap": 3}},
    "nested on 2 stages": {"encoder": {"dp": 2, "on": LLM}, "llm": {"pp": 2}, "generator": {"pp": 2, "on": LLM}},
    "nested in 2, on 2 replicas": {"encoder": {"dp": 2, "pp": 2, "on": LLM}, "llm": {"dp": 2, "pp": 2}},
    "nested on slices": {"encoder": {"dp": 2, "on": LLM}, "llm": {"tp": 2}, "generator": {"tp": 2, "on": LLM}},
    "nested in pieces": {"encoder": {"dp": 2, "on": LLM, "pieces": 2}, "llm": {"pp": 2}},
    "colocated on 2 stages": {"encoder": {"dp": 2, "on": LLM}, "llm": {"pp": 2}},
    "colocated slices on 2 stages": {"encoder": {"tp": 2, "on": LLM}, "llm": {"pp": 2}},
}
"""`encoder`: of each one; `generator`: where there is one."""
CONTEXT_DEGREES: dict[str, dict[str, dict[str, Any]]] = {
    "cp 2": {"llm": {"cp": 2}},
    "cp 3": {"llm": {"cp": 3}},
    "cp 4": {"encoder": {"dp": 2}, "llm": {"cp": 4}},
    "cp 6": {"llm": {"cp": 6}},
    "cp 2, llm in 2": {"llm": {"cp": 2, "pp": 2}},
    "cp 3, llm in 2": {"llm": {"cp": 3, "pp": 2}},
    "cp 2, llm in 3": {"llm": {"cp": 2, "pp": 3}},
    "cp 2, tp 2": {"llm": {"cp": 2, "tp": 2}},
    "cp 3, tp 2": {"llm": {"cp": 3, "tp": 2}},
    "tp 2 to cp 2, tp 2 in pieces": {"encoder": {"tp": 2}, "llm": {"cp": 2, "tp": 2, "tp_overlap": 2}},
    "cp 2, 2 replicas": {"encoder": {"dp": 3}, "llm": {"cp": 2, "dp": 2}},
    "tp 2 to cp 2": {"encoder": {"tp": 2}, "llm": {"cp": 2}},
    "tp 2 to cp 3": {"encoder": {"tp": 2}, "llm": {"cp": 3}},
    "nested on 2 that share": {"encoder": {"dp": 2, "on": LLM}, "llm": {"cp": 2}},
    "nested in 2, on 2 that share": {"encoder": {"dp": 2, "pp": 2, "on": LLM}, "llm": {"cp": 2, "pp": 2}},
    "colocated on 2 that share": {"encoder": {"dp": 2, "on": LLM}, "llm": {"cp": 2}},
}
"""Those in which ranks share sequences of the LLM."""
_EVERY_DEGREE = DEGREES | CONTEXT_DEGREES
_WHOLLY: dict[str, bool | int] = {"frozen": True, "frozen_projector": True}
FROZEN: dict[str, dict[str, dict[str, bool | int]]] = {
    "all learn": {},
    "frozen encoder": {"encoder": {"frozen": True}},
    "frozen llm": {"llm": {"frozen": True}},
    "only projectors": {"encoder": {"frozen": True}, "llm": {"frozen": True}, "generator": {"frozen": True}},
    "only the llm": {"encoder": _WHOLLY, "llm": {"frozen_projector": True}, "generator": {"frozen": True}},
    "only the generator": {"encoder": _WHOLLY, "llm": {"frozen": True}},
    "first layers": {"encoder": {"frozen_layers": 2}, "llm": {"frozen_layers": 3}, "generator": {"frozen_layers": 1}},
    "only the llm's last layers": {"encoder": _WHOLLY, "llm": {"frozen_layers": 4}, "generator": {"frozen": True}},
}
"""The LLM's `frozen_projector` is that to the generator."""
CLIPPING = {"not clipped": 1e9, "clipped": 0.1}
"""Most norm of the gradient: one that none reaches, or one that all exceed."""
ACTIVATIONS = ("kept", "recomputed")
"""`recomputed`: with activation checkpointing, in all units but `encoder`, which has none."""
HEADS = ("tied", "untied")
"""Whether the LLM's head is its embedding or a matrix of its own."""
HALF_RESIDUAL = "bfloat16 residual"
PRECISIONS = ("float32", "bfloat16", HALF_RESIDUAL)
"""HALF_RESIDUAL: matrix products in bfloat16, and the residual stream too, in all units but `encoder`."""
WEIGHTS = ("whole", "sharded")
"""`sharded`: every replica keeps its share of a stage's weights."""
DROPOUT = {"nothing dropped": 0.0, "dropout": 0.2}
"""The rate in the LLM's layers."""
MOST_PROCESSES = 7


@dataclass(frozen=True, slots=True)
class Case:
    """One combination, by the names above."""

    schedule: str
    strategy: str
    units: tuple[str, ...]
    degrees: str
    frozen: str
    clipping: str = "not clipped"
    activations: str = "kept"
    head: str = "tied"
    precision: str = "float32"
    weights: str = "whole"
    dropout: str = "nothing dropped"

    def __str__(self) -> str:
        of_model = f"{'+'.join(self.units)}, {self.degrees}, {self.frozen}"
        others = ", ".join(self.kept if name == "weights" else getattr(self, name) for name in OTHERS if name != "strategy")
        return f"{self.schedule}, {self.strategy}, {of_model}, {others}"

    @property
    def topology(self) -> dict[str, Any]:
        """The document that a user would write."""
        degrees, frozen = _EVERY_DEGREE[self.degrees], frozen_in(self.units, self.frozen)
        recomputed = {unit: self.activations == "recomputed" and unit != ENCODER for unit in self.units}
        whole = {unit: self.precision != HALF_RESIDUAL or unit == ENCODER for unit in self.units}
        units = {
            unit: {
                **of_kind(degrees, unit),
                **frozen[unit],
                "checkpointing": recomputed[unit],
                "fp32_residual_connection": whole[unit],
                "shard_weights": self.kept == "sharded",
            }
            for unit in self.units
        }
        sharing = {"sharing": self.sharing} if self.sharing else {}
        return {**SCHEDULES[self.schedule], **sharing, "units": units, "dropout": DROPOUT[self.dropout]}

    @property
    def kept(self) -> str:
        """How weights are kept: ranks that units share keep them whole."""
        return WEIGHTS[0] if self.sharing else self.weights

    @property
    def sharing(self) -> str:
        """How units share ranks; empty if none do."""
        return next((order for order in (NESTED, COLOCATED) if self.degrees.startswith(order)), "")

    @property
    def dtype(self) -> str:
        """Of matrix products."""
        return self.precision.split()[0]

    @property
    def has_audio(self) -> bool:
        return bool({"audio", "encoder"} & set(self.units))

    @property
    def can_run(self) -> bool:
        """Whether MOST_PROCESSES reach, something learns, and units that have to be whole, or to send whole rows, do."""
        degrees = _EVERY_DEGREE[self.degrees]
        cut = self.schedule == "interleaved" or bool({"pp", "tp", "pieces"} & degrees.get("encoder", {}).keys())
        learns = "generator" in self.units or self.frozen != "only the generator"
        cut = cut or "frozen_layers" in FROZEN[self.frozen].get("encoder", {})
        in_pieces = "tp_overlap" in degrees.get("llm", {})
        fits = not (cut and "encoder" in self.units) and not (in_pieces and self.schedule == ZERO_BUBBLE)
        fits = fits and not (self.degrees == "nested in pieces" and self.schedule == "interleaved")
        fits = fits and not ("cp" in degrees.get("llm", {}) and "generator" in self.units)
        return fits and learns and self.num_processes <= MOST_PROCESSES

    @property
    def num_processes(self) -> int:
        units = [unit for unit in self.topology["units"].values() if "on" not in unit]
        return sum(math.prod(unit.get(degree, 1) for degree in ("dp", "tp", "cp", "pp")) for unit in units)


PIPELINES: dict[str, tuple[Any, ...]] = {
    "schedule": tuple(SCHEDULES),
    "units": UNITS,
    "degrees": tuple(DEGREES),
    "frozen": tuple(FROZEN),
}
"""The choices, by field of `Case`, of which some exclude each other."""
OTHERS: dict[str, tuple[Any, ...]] = {
    "strategy": STRATEGIES,
    "clipping": tuple(CLIPPING),
    "activations": ACTIVATIONS,
    "head": HEADS,
    "precision": PRECISIONS,
    "weights": WEIGHTS,
    "dropout": tuple(DROPOUT),
}
"""All other choices, which go with every pipeline."""


def of_kind(choice: Mapping[str, Mapping[str, Any]], unit: str) -> Mapping[str, Any]:
    """What a choice says of a unit."""
    return choice.get(unit if unit in ("llm", "generator") else "encoder", {})


def frozen_in(units: Sequence[str], name: str) -> dict[str, dict[str, bool | int]]:
    """What of each unit is frozen. The last one has no projector behind it."""
    flags = {unit: dict(of_kind(FROZEN[name], unit)) for unit in units}
    flags[units[-1]].pop("frozen_projector", None)
    return flags


def every_pipeline(degrees: Collection[str] = DEGREES) -> Iterator[Case]:
    """Every combination of PIPELINES, with these degrees, that can run, with the same choice of everything else."""
    kinds: dict[str, Collection[Any]] = {**PIPELINES, "degrees": degrees}
    for choices in product(*kinds.values()):
        if (case := Case(strategy=STRATEGIES[0], **dict(zip(kinds, choices, strict=True)))).can_run:
            yield case


def every_case(degrees: Collection[str] = DEGREES) -> Iterator[Case]:
    """The whole product with these degrees, as far as it can run."""
    for pipeline in every_pipeline(degrees):
        for choices in product(*OTHERS.values()):
            yield replace(pipeline, **dict(zip(OTHERS, choices, strict=True)))
