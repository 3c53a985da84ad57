"""What a sample costs in each unit of a model: forward seconds, kept activations and bytes between stages."""
