"""The pipeline runtime beside one process that computes the same."""
