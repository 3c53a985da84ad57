"""Planning of one global batch: arrays in, a StepPlan out. No I/O, no clock, no logging, no state between calls."""

from headrace.reorder_service.planning.cost_model.cost import sample_costs
from headrace.reorder_service.planning.strategies import STRATEGIES, plan, warm_up

__all__ = ["STRATEGIES", "plan", "sample_costs", "warm_up"]
