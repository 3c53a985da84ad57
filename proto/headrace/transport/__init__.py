"""Transports that carry payload from the preprocessor that decoded it to the rank that needs it; `base` defines the contract."""
