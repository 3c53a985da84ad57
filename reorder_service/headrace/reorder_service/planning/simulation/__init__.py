"""The simulator: a schedule timed with the microbatches of a plan, and the memory that its stages hold meanwhile."""
