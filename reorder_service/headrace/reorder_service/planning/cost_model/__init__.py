"""The cost model of a sample in each unit: forward seconds, kept activations and bytes sent between stages."""
