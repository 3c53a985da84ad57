"""A standing cluster of real processes, and faults that strike it at random: every job's ledger comes out the same."""
