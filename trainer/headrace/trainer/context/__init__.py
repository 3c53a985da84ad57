"""Context parallelism: the tokens of one sequence on several ranks, whose attention exchanges keys and values."""
