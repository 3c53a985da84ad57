"""The disaggregated pipeline runtime: every unit of the model has its own replicas, stages and tensor slices."""
