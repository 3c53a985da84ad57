"""The consumer: `connect` to a reorder service and iterate over the packed microbatches of its job."""

from trainer.connecting import connect
from trainer.elastic import replan
from trainer.loader import StepLoader
from trainer.steps import Microbatch, Step

__all__ = ["Microbatch", "Step", "StepLoader", "connect", "replan"]
