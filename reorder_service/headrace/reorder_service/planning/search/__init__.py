"""The searches that strategies are made of: balancing, partitioning, deferral, permutation and the order of microbatches."""
