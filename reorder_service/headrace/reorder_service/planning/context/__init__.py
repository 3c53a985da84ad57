"""Context parallelism: which rank takes which tokens of a sequence, and how many ranks take a sequence."""
