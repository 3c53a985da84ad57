"""A compact multimodal model in plain PyTorch on packed sequences: two encoders, projectors, a decoder, perhaps a generator."""
