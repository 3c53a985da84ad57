"""The planner: decides which samples each global batch holds and who processes them when."""
