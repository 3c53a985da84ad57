"""The reorder service: plans which samples each global batch has, and which rank processes them when."""
