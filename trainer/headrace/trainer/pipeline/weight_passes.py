"""How often the replicas of a stage gather its weights in an action: equally often, whatever each of them has to compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from headrace.schedule import Action, Kind
from headrace.trainer.pipeline.message_order import Program
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.pipeline.sharded_weights import ShardedWeights
from headrace.trainer.pipeline.topology import PipelineTopology


class WeightPasses:
    """The passes of one process through the weights of its chunks in one step; none where every replica keeps all weights."""

    def __init__(self, sharded: Sequence[ShardedWeights], topology: PipelineTopology, routes: Routes, program: Program) -> None:
        """`sharded`: the weights of each chunk; empty if every replica keeps all."""
        self._sharded, self._program = sharded, program
        self._num_begun = 0  # in this action
        self._most: Counter[tuple[Kind, int]] = Counter()  # portions of a replica in an action, by its kind and microbatch
        unit = program.post[0]
        for replica in range(topology.units[unit].dp if sharded else 0):
            portions = routes.portions(unit, replica)
            self._most |= Counter((Kind.FORWARD, portion.forward) for portion in portions)
            self._most |= Counter((Kind.BACKWARD, portion.backward) for portion in portions)

    def __bool__(self) -> bool:
        return bool(self._sharded)

    def of_portion(self, chunk: int, kind: Kind) -> AbstractContextManager[object]:
        """Return a context in which a chunk's weights are there for the forward or the backward of one portion."""
        if not self._sharded:
            return nullcontext()
        self._num_begun += 1
        return self._sharded[chunk].passing(backward=kind == Kind.BACKWARD)

    def end(self, action: Action) -> None:
        """Go through the weights for the portions that another replica has in an action, and this one has not."""
        begun, self._num_begun = self._num_begun, 0
        is_backward = action.kind == Kind.BACKWARD
        if is_backward and not self._program.flow.has_backward(self._program.position(action)):
            return
        for _ in range(begun, self._most[action.kind, action.microbatch]):
            with self._sharded[action.chunk].passing(backward=is_backward):
                pass
