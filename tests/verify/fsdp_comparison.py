"""What FSDP ranks compute of a case, beside one process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.verify.comparison import TOLERANCES, decided
from tests.verify.fsdp_cases import FsdpCase, one_process
from tests.verify.fsdp_processes import FsdpAnswer, FsdpOrder
from tests.verify.processes import Processes

TOLERANCE = 1e-5
_NOISE = 2 * TOLERANCES["float32"].noise


def fsdp_differences(processes: Processes, case: FsdpCase) -> list[str]:
    """What is not the same, in words; nothing where all is well."""
    alone = replace(case, ranks=1, strategy="random", microbatches=1, moved="", shard_ranks=None, form="no_padding", cp=1)
    results, gradients, weights = one_process(replace(alone, checkpointing=False))
    answers: list[FsdpAnswer] = processes.run(FsdpOrder(case))
    found = []
    for rank, answer in enumerate(answers):
        for number, (one, other) in enumerate(zip(answer.results, results, strict=True)):
            found += [
                f"rank {rank}, step {number}: {name} {getattr(one, name)}, not {getattr(other, name)}"
                for name in ("loss", "target_weight", "grad_norm")
                if not np.isclose(getattr(one, name), getattr(other, name), rtol=TOLERANCE, atol=0, equal_nan=True)
            ]
        if answer.sent_bytes != answer.planned_bytes:
            found.append(f"rank {rank} has sent {answer.sent_bytes} bytes, and the plans say {answer.planned_bytes}")
    if answers[0].gradients.keys() != gradients.keys():
        found.append(f"gradients of {sorted(answers[0].gradients.keys() ^ gradients.keys())} on one side only")
    for name in gradients.keys() & answers[0].gradients.keys():
        error, size = np.abs(answers[0].gradients[name] - gradients[name]).max(), np.abs(gradients[name]).max()
        if error > TOLERANCE * size:
            found.append(f"gradient of {name} is off by {error:.3g} of {size:.3g}")
    for name, weight in answers[0].weights.items():
        error, size = np.abs(weight - weights[name]), np.abs(weights[name]).mean()
        if name in gradients:
            error = decided(error, gradients[name], TOLERANCE * np.abs(gradients[name]).max())
        if error.mean() > TOLERANCE * size + _NOISE:
            found.append(f"weight of {name} is off by {error.mean():.3g} of {size:.3g}")
    return found
