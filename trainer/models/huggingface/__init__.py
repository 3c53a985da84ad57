"""Modules of Hugging Face's `transformers` in place of the compact model's, on the same packed sequences."""
