"""The consumer: `connect` to a reorder service and iterate over the packed microbatches of its job."""

from trainer.loader import Microbatch, Step, StepLoader, connect

__all__ = ["Microbatch", "Step", "StepLoader", "connect"]
