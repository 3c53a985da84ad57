"""Jobs, from spec to ledger: shards are counted, steps are planned, given to preprocessors and ranks, and committed."""
