"""The validation sets of a job for a library's own evaluation loop, which takes one batch after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from headrace.trainer.integrations.step_stream import StepStream
from headrace.trainer.loading.steps import Microbatch


class ValidationBatches:
    """The microbatches of a validation set, a batch each. Each iteration is a pass of its own over the set.

    A batch has the model's inputs, and "target_weight", the sum of the weights of its targets, 0 where it has none. The loss of
    the set is the sum of the batches' summed losses over the sum of these, both over all ranks.
    """

    def __init__(self, stream: StepStream, name: str, inputs: Callable[[Microbatch], dict[str, Any]]) -> None:
        """`name`: of the set. `inputs`: makes the arguments of the model from a microbatch."""
        self._stream, self._name, self._inputs = stream, name, inputs
        self.num_samples = 0
        """Samples of the newest pass so far, over all ranks."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.num_samples = 0
        for step in self._stream.evaluate(self._name):
            self.num_samples += step.num_samples
            for microbatch in step:
                yield {**self._inputs(microbatch), "target_weight": microbatch.data.target_weight}
