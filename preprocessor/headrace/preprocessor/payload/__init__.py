"""Decoded parts on their way out: what is read and decoded next, the memory that holds it, and the leases on it."""
