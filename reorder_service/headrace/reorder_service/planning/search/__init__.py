"""Search algorithms that strategies combine: balancing, partitioning, deferral, permutation and the order of microbatches."""
