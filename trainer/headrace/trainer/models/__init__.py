"""A compact multimodal model in plain PyTorch: two encoders, their projectors and a decoder, all on packed sequences."""
