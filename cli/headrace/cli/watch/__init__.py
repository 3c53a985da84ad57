"""Commands that ask a running reorder service: jobs, rates, bottlenecks, ledgers and quarantined samples."""
