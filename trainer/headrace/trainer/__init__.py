"""The consumer: `connect` to a reorder service and iterate over the packed microbatches of its job."""

from headrace.trainer.loading.connecting import connect
from headrace.trainer.loading.elastic import replan
from headrace.trainer.loading.parallel import Parallel
from headrace.trainer.loading.step_loader import StepLoader
from headrace.trainer.loading.steps import Microbatch, Step
from headrace.trainer.local_job import LocalJob, local

__all__ = ["LocalJob", "Microbatch", "Parallel", "Step", "StepLoader", "connect", "local", "replan"]
